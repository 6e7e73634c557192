"""A chat in the terminal against a server; needs nothing of the engine, only HTTP.

Knows one conversation at a time. Every turn sends the whole of it, which is what the server's cache
is for: the line under each answer shows how much of it was still there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console

_CONNECT_TIMEOUT_S = 10.0
_HELP = "/reset begins a new conversation, /exit ends, Ctrl-C stops an answer."


class ChatError(Exception):
    """The conversation cannot go on; the message says why and what to do."""


@dataclass(slots=True)
class TurnStats:
    """What one answer took; filled while it streams."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    began_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.cached_tokens}/{self.prompt_tokens} prompt tokens cached"]
        if self.first_s is not None:
            parts.append(f"first token {self.first_s - self.began_s:.2f} s")
            decode_s = self.ended_s - self.first_s
            if self.completion_tokens > 1 and decode_s > 0:
                parts.append(f"{(self.completion_tokens - 1) / decode_s:.1f} tokens/s")
        return " · ".join(parts)


class Client:
    """Asks one server. Raises ChatError, at once if nothing answers at ``url``."""

    def __init__(
        self,
        url: str,
        *,
        max_tokens: int,
        temperature: float | None = None,
        api_key: str | None = None,
    ) -> None:
        self.url = server_url(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._options: dict[str, float] = {"max_tokens": max_tokens}
        if temperature is not None:
            self._options["temperature"] = temperature
        with self._open("/v1/models", None) as reply:
            try:
                self.model: str = json.load(reply)["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as e:
                raise ChatError(f"{self.url} does not answer like an OpenAI server: {e!r}") from e

    def ask(self, messages: list[dict[str, str]], stats: TurnStats) -> Iterator[str]:
        """Yield the answer as it comes; closing the iterator aborts it."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | self._options
        stats.began_s = time.monotonic()
        with self._open("/v1/chat/completions", body) as reply:
            try:
                for event in _events(reply):
                    if event.get("error"):
                        raise ChatError(str(event["error"].get("message", event["error"])))
                    usage = event.get("usage")
                    if usage:
                        stats.prompt_tokens = usage["prompt_tokens"]
                        stats.completion_tokens = usage["completion_tokens"]
                        details = usage.get("prompt_tokens_details") or {}
                        stats.cached_tokens = details.get("cached_tokens") or 0
                    for choice in event.get("choices", ()):
                        text = choice["delta"].get("content")
                        if text:
                            stats.first_s = stats.first_s or time.monotonic()
                            yield text
            except (OSError, http.client.HTTPException) as e:
                raise ChatError(f"the connection to {self.url} broke: {e}") from e
        stats.ended_s = time.monotonic()

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
            # An answer may be long in coming; only whether anybody is there must show soon.
            timeout_s = _CONNECT_TIMEOUT_S if body is None else None
            reply = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as e:
            said = f"{self.url} says: {_message(e)}"
            if e.code == 401:
                said += " Give the key with --api-key or in RADIXKV_API_KEY."
            raise ChatError(said) from e
        except (OSError, ValueError, http.client.HTTPException) as e:
            reason = getattr(e, "reason", None) or e
            raise ChatError(
                f"no server answers at {self.url} ({reason}); start one with: radixkv serve"
            ) from e
        assert isinstance(reply, http.client.HTTPResponse)
        return reply


class ChatTerminal:
    """Reads turns from a terminal or a pipe and writes answers to stdout.

    The lines about tokens and times go to stderr, so that piped answers stay clean.
    """

    def __init__(self, client: Client, *, system: str | None = None) -> None:
        self._client = client
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)
        self._notes = Console(stderr=True, highlight=False)

    def run(self, source: TextIO) -> None:
        """Talk until /exit or the end of input; from a pipe, the first error ends it."""
        interactive = source.isatty()
        if interactive:
            self._note(f"{self._client.model} at {self._client.url}. {_HELP}")
        for line in _typed() if interactive else source:
            said = line.strip()
            if said in ("/exit", "/quit"):
                return
            if said == "/reset":
                self._messages = list(self._first)
                self._note("A new conversation.")
            elif said in ("/help", "/?"):
                self._note(_HELP)
            elif said:
                try:
                    self._turn(said)
                except ChatError as e:
                    if not interactive:
                        raise
                    self._note(f"{e}", style="red")

    def _turn(self, said: str) -> None:
        """One question and its answer; a turn that fails leaves the conversation as it was."""
        asked = [*self._messages, {"role": "user", "content": said}]
        stats, parts = TurnStats(), []
        try:
            for text in self._client.ask(asked, stats):
                parts.append(text)
                sys.stdout.write(printable(text))
                sys.stdout.flush()
        except KeyboardInterrupt:
            self._note("\n(stopped)")
            if not parts:
                return
        finally:
            if parts:
                sys.stdout.write("\n")
                sys.stdout.flush()
        self._messages = [*asked, {"role": "assistant", "content": "".join(parts)}]
        if stats.ended_s:
            self._note(str(stats))

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, markup=False, soft_wrap=True)


def server_url(given: str) -> str:
    """What a user calls the server, as the URL that the routes are under: http://host:port."""
    url = given.strip().rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def printable(text: str) -> str:
    """Drop control characters: a model must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _typed() -> Iterator[str]:
    """Yield lines from the terminal, with line editing where Python has it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it from then on
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            return


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in reply:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            yield json.loads(line[5:])


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {error.code}"
