"""From what people write to token ids, once and in one way, so that equal prompts share blocks.

Knows the tokenizer and its chat template; nothing of models or caches.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from radixkv.errors import InvalidRequest
from radixkv.service.tools_formats import ToolFormat, format_of
from radixkv.service.tools_history import shorten_ids, shown_call, with_objects
from radixkv.service.tools_parsing import parse
from radixkv.service.tools_pieces import Answer

_NINE = "length 9"
"""By which templates that insist on short ids of calls say so (Mistral's)."""
_MESSAGE = '{"role": ..., "content": ...}'
_PROBE = "radixkv_probe_function"
_ASKED = {"role": "user", "content": "hello"}
_REMEDY = (
    "has no place for {what}, so the model would not see them; start the server with "
    "--chat-template FILE, or make the Engine(chat_template=FILE), with one that has, such as "
    "examples/templates/chatml_tools.jinja for models that speak ChatML"
)


class Prompting:
    """Renders chats and tokenizes text. Any thread may use it: all that it keeps is what it found
    out about the template."""

    def __init__(self, tokenizer: Any, vocab_size: int, *, tool_call_parser: str = "auto") -> None:
        """``tool_call_parser``: how the model writes calls; ``auto`` tells by its template."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tool_call_parser = tool_call_parser
        self._probed: dict[tuple[str, str], bool] = {}
        self.bos_token_id: int | None = tokenizer.bos_token_id

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Write the chat out with the model's template; ``tools`` as they are, in their order.

        Raises InvalidRequest if these are no messages, or there is no template, or it refuses them,
        or would leave out tools or calls.
        """
        _expect_messages(messages)
        if not messages:
            raise InvalidRequest("messages is empty; wanted at least one", param="messages")
        if not self.has_template:
            raise InvalidRequest(
                "this model's tokenizer has no chat template; use completions", param="messages"
            )
        if "self" in (template_kwargs or ()):  # the name that Jinja itself uses
            raise InvalidRequest("template_kwargs cannot set 'self'", param="template_kwargs")
        if tools:
            self.expect_tools()
        if any(message.get("tool_calls") for message in messages) and not self._shows("calls"):
            raise InvalidRequest(
                f"the chat template {_REMEDY.format(what='tool_calls')}", param="messages"
            )
        return self._render(
            with_objects(messages),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=[dict(tool) for tool in tools] if tools else None,
            **(template_kwargs or {}),
        )

    def expect_tools(self) -> None:
        """Raise InvalidRequest unless the template shows tools to the model."""
        if not self._shows("tools"):
            raise InvalidRequest(f"the chat template {_REMEDY.format(what='tools')}", param="tools")

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of functions; None: nobody knows."""
        return format_of(self._template("tool_use"), self._tool_call_parser)

    def read_answer(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Answer:
        """Tell an answer's text from its calls of ``tools``, which are in OpenAI's shape."""
        how = self.tool_format
        if how is None or not tools:
            return Answer(text)
        return parse(how.parser([tool["function"]["name"] for tool in tools]), text)

    def special_ids(self, names: Collection[str]) -> dict[str, int]:
        """Return the ids of those of ``names`` that are special tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {t.content: i for i, t in added.items() if t.special and t.content in names}

    def _template(self, name: str = "default") -> str | None:
        """Return the template's text; of several named ones ``name``, where there is one."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get(name) or template.get("default")
        return template if isinstance(template, str) else None

    def _shows(self, what: Literal["tools", "calls"]) -> bool:
        """Whether the template writes tools, or calls in the history; found out once."""
        key = (what, json.dumps(getattr(self._tokenizer, "chat_template", None)))
        if key not in self._probed:
            function: dict[str, Any] = {"name": _PROBE, "description": "", "parameters": {}}
            tools: list[dict[str, Any]] | None = None
            messages: list[dict[str, Any]] = [_ASKED]
            if what == "tools":
                tools = [{"type": "function", "function": function}]
            else:
                call = shown_call("000000000", _PROBE, "{}")
                messages = [_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                shown = _PROBE in self._render(messages, tools=tools)
            except InvalidRequest:  # it wants another chat than this one: then it is to say so
                shown = True
            self._probed[key] = shown
        return self._probed[key]

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        if _NINE in (self._template("tool_use") or ""):
            messages = shorten_ids(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        assert isinstance(text, str)
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Write the chat out and tokenize it; the template brings its own special tokens."""
        return self.tokenize(self.render_text(messages, **kwargs), add_special_tokens=False)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize ``text``. Text that already begins with the BOS token gets no second one, so a
        rendered chat sent as a plain prompt has the same ids as the chat (TEMPLATE-4)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included; halves of characters are left out."""
        text = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text).strip("\ufffd")

    def char_start(self, token_ids: Sequence[int], at: int) -> int:
        """Return the index of the last token up to ``at`` that begins where a character does."""
        for start in range(at, max(0, at - 4), -1):  # a character has 4 bytes at most
            text = self._tokenizer.decode(
                list(token_ids[max(0, start - 8) : start]), clean_up_tokenization_spaces=False
            )
            if not str(text).endswith("\ufffd"):
                return start
        return max(0, at - 4)

    def offset(self, text: str, token_ids: Sequence[int], at: int) -> int:
        """Return the character of ``text`` at which token ``at`` of it begins."""
        if self._tokenizer.is_fast:
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = found["offset_mapping"]
            return int(offsets[at][0]) if at < len(offsets) else len(text)
        return min(len(self.text_of(token_ids[:at])), len(text))

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest unless there are ids and all are in the vocabulary."""
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens; wanted at least one", param=param)
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(
                f"{param} has token id {low if low < 0 else high}; "
                f"this model's ids are 0 to {self._vocab_size - 1}",
                param=param,
            )


def _expect_messages(given: object) -> None:
    """Raise InvalidRequest for what Python would let a caller pass, a text above all."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequest(
            f"messages is a {type(given).__name__}; wanted a list of {_MESSAGE}", param="messages"
        )
    for i, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"messages[{i}] is a {type(message).__name__}; wanted {_MESSAGE}", param="messages"
            )
