"""What past prompts were made of, and in what a prompt differs from an earlier one.

Knows section digests of past prompts, each tenant's apart and bounded; never text or tokens. The
digests are keyed with a secret of this process, so that nobody can test a guess against them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radixkv.service.hints import Hint, kwarg_hint, tool_keys_hint, tool_order_hint

MAX_PROMPTS = 256
"""Prompts remembered of one tenant."""
MAX_TENANTS = 256
MAX_BYTES = 16 << 20
"""Memory of all remembered prompts together; one of MAX_MESSAGES takes some 200 KB."""
MAX_MESSAGES = 2048
"""Messages of a prompt whose digests are kept; what comes later counts as one."""
_MAX_KWARGS = 16
_FEW_BYTES = 512  # what is neither messages nor arguments takes at most
_SECRET = secrets.token_bytes(32)

Change = Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]


@dataclass(frozen=True, slots=True)
class PromptSections:
    """The digests of what one prompt was made of, in the order in which it matters."""

    model: bytes
    salt: bytes | None
    tools: bytes | None
    """As sent: the order of tools and keys included."""
    tool_set: bytes | None
    """Whatever the order of the tools."""
    tool_list: bytes | None
    """Whatever the order of their keys."""
    system: bytes | None
    messages: tuple[bytes, ...]
    kwargs: tuple[tuple[str, bytes], ...]
    chars: tuple[int, ...]
    """Characters of tools, system and each message: by these, tokens are estimated."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes. O(messages)."""
        size = sys.getsizeof
        parts = (self.messages, self.kwargs, self.chars)
        own = sum(map(size, parts)) + sum(map(size, self.messages)) + sum(map(size, self.chars))
        return own + _FEW_BYTES + sum(size(name) + 2 * _FEW_BYTES for name, _ in self.kwargs)


def sections_of(
    *,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    salt: str | None = None,
) -> PromptSections:
    """Digest a prompt's parts, all of them JSON. ``model``: the name, with its adapter's.

    A first message of the role ``system`` or ``developer`` is the system prompt.
    """
    rest = list(messages)
    system: object = None
    if rest and rest[0].get("role") in ("system", "developer"):
        system = rest.pop(0).get("content")
    shown = [_json_as_sent(message) for message in rest]
    if len(shown) > MAX_MESSAGES:
        shown[MAX_MESSAGES:] = ["".join(shown[MAX_MESSAGES:])]
    tool_texts = [_json_as_sent(tool) for tool in tools or ()]
    sorted_texts = [_json_sorted(tool) for tool in tools or ()]
    system_text = None if system is None else _json_as_sent(system)
    return PromptSections(
        model=_digest(model),
        salt=None if salt is None else _digest(salt),
        tools=_digest(*tool_texts) if tool_texts else None,
        tool_set=_digest(*sorted(sorted_texts)) if tool_texts else None,
        tool_list=_digest(*sorted_texts) if tool_texts else None,
        system=None if system_text is None else _digest(system_text),
        messages=tuple(map(_digest, shown)),
        kwargs=tuple(
            (name[:64], _digest(_json_as_sent(value)))
            for name, value in sorted((kwargs or {}).items())[:_MAX_KWARGS]
        ),
        chars=(sum(map(len, tool_texts)), len(system_text or ""), *map(len, shown)),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a prompt goes on from an earlier one."""

    changed: Change | None
    """The first section that differs; None if the earlier prompt is a prefix, or is longer."""
    shared: float
    """Share of the later prompt's characters that comes before the difference, 0 to 1."""
    hints: tuple[Hint, ...] = ()


def compare(earlier: PromptSections, later: PromptSections) -> Comparison:
    """Find the first section in which ``later`` leaves ``earlier``.

    A prompt that stops where the earlier one went on has not changed: it was shortened.
    """
    total = max(1, sum(later.chars))
    tools, system = later.chars[0], later.chars[1]
    kwargs = _changed_kwargs(earlier, later)
    hints: tuple[Hint, ...] = (kwarg_hint(kwargs),) if kwargs else ()
    if earlier.model != later.model:
        return Comparison("model_changed", 0.0, hints)
    if earlier.tools != later.tools:
        if later.tool_list is not None and earlier.tool_list == later.tool_list:
            hints += (tool_keys_hint(),)
        elif later.tool_set is not None and earlier.tool_set == later.tool_set:
            hints += (tool_order_hint(),)
        return Comparison("tools_changed", 0.0, hints)
    if earlier.system != later.system:
        return Comparison("system_changed", tools / total, hints)
    if kwargs:  # the template writes them where it likes, mostly near the beginning
        return Comparison("system_changed", 0.0, hints)
    same = _num_same(earlier.messages, later.messages)
    forked = same < min(len(earlier.messages), len(later.messages))
    share = (tools + system + sum(later.chars[2 : 2 + same])) / total
    return Comparison("messages_changed" if forked else None, share)


class _Past:
    """The past prompts of one tenant by the id of their answers, oldest first."""

    __slots__ = ("num_bytes", "prompts")

    def __init__(self) -> None:
        self.prompts: OrderedDict[str, PromptSections] = OrderedDict()
        self.num_bytes = 0

    def put(self, answer_id: str, sections: PromptSections) -> None:
        old = self.prompts.pop(answer_id, None)
        self.prompts[answer_id] = sections
        self.num_bytes += sections.num_bytes - (0 if old is None else old.num_bytes)

    def forget_one(self) -> None:
        _, old = self.prompts.popitem(last=False)
        self.num_bytes -= old.num_bytes


class PromptMemory:
    """The sections of past prompts by the id of their answer; for one thread.

    A tenant's oldest go when it has too many, the idlest tenant when there are too many, and the
    oldest of whoever takes most when they all take more than ``max_bytes``: so that whoever sends
    long chats makes nobody else forget.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, _Past] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Memory that all prompts take. O(tenants)."""
        return sum(past.num_bytes for past in self._tenants.values())

    def remember(self, tenant: str, answer_id: str, sections: PromptSections) -> None:
        """Keep what the answer ``answer_id`` answered."""
        mine = self._tenants.setdefault(tenant, _Past())
        self._tenants.move_to_end(tenant)
        mine.put(answer_id, sections)
        if len(mine.prompts) > MAX_PROMPTS:
            mine.forget_one()
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        excess = self.num_bytes - self._max_bytes
        while excess > 0:
            most = max(self._tenants.values(), key=lambda past: past.num_bytes)
            excess -= most.num_bytes
            most.forget_one()
            excess += most.num_bytes

    def recall(
        self, tenant: str, answer_id: str, sections: PromptSections
    ) -> PromptSections | None:
        """Return what an answer of this tenant answered, to compare ``sections`` with.

        None if it is not known, or no more, or of another salt: then nothing could be shared.
        """
        past = self._tenants.get(tenant)
        found = None if past is None else past.prompts.get(answer_id)
        return found if found is not None and found.salt == sections.salt else None

    def nearest(self, tenant: str, sections: PromptSections) -> Comparison | None:
        """Compare with that past prompt of this tenant and salt which shares most messages.

        The latest of these; None if no past prompt has the first message. O(MAX_PROMPTS).
        """
        best: PromptSections | None = None
        most = (0, False)
        mine = self._tenants.get(tenant)
        for past in reversed(mine.prompts.values()) if mine is not None else ():
            if past.salt != sections.salt or past.model != sections.model:
                continue
            same = _num_same(past.messages, sections.messages)
            near = (same, past.system == sections.system)
            if same and near > most:
                best, most = past, near
        return None if best is None else compare(best, sections)


def _num_same(earlier: Sequence[bytes], later: Sequence[bytes]) -> int:
    """Count the messages that both begin with."""
    same = 0
    for then, now in zip(earlier, later, strict=False):
        if then != now:
            break
        same += 1
    return same


def _changed_kwargs(earlier: PromptSections, later: PromptSections) -> list[str]:
    before, after = dict(earlier.kwargs), dict(later.kwargs)
    return sorted(name for name in before | after if before.get(name) != after.get(name))


# Made once: `json.dumps` makes one a call where anything is not as it likes, at twice the cost.
_json_as_sent = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_json_sorted = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def _digest(*texts: str) -> bytes:
    """Return 16 bytes that differ with any text, and with where one ends and the next begins."""
    digest = hashlib.blake2b(key=_SECRET, digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
