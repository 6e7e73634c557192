"""Cache breakpoints as clients write them: where a prefix of the chat ends, and how long it stays.

Three dialects: Anthropic's ``cache_control``, OpenAI's ``prompt_cache_options`` with
``prompt_cache_breakpoint`` parts, and its older ``prompt_cache_retention``. Knows parts of messages
and seconds; nothing of tokens, and nothing of what is granted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from radixkv.errors import InvalidRequest
from radixkv.service.engine.boundaries import Cut
from radixkv.service.http.faults import explain
from radixkv.service.http.fields import Strict

Model = TypeVar("Model", bound=Strict)

MAX_MARKS = 4
MAX_TTL_S = 30 * 86400
RETENTION_S = 86400.0
_OPENAI_TTL = "30m"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def ttl_seconds(ttl: str) -> float:
    """Read ``"90s"``, ``"5m"``, ``"1h"`` or ``"7d"``; raises ValueError for anything else."""
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", ttl, re.ASCII)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_S:
        raise ValueError("wanted a time such as 90s, 5m, 1h or 7d, and at most 30d")
    return float(seconds)


def _checked_ttl(ttl: str) -> str:
    ttl_seconds(ttl)
    return ttl


Ttl = Annotated[str, AfterValidator(_checked_ttl), Field(examples=["5m", "1h"])]
"""A time to live since the last use, as text."""


class CacheControl(Strict):
    """Anthropic's breakpoint: what comes before the end of this block is to stay resident."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="Since the last use; default 5m.")

    @property
    def ttl_s(self) -> float:
        """Seconds since the last use."""
        return ttl_seconds(self.ttl or "5m")


class CacheBreakpoint(Strict):
    """OpenAI's breakpoint on a content part."""

    mode: Literal["explicit"]
    ttl: Ttl | None = Field(None, description="Default: that of `prompt_cache_options`.")


class CacheOptions(Strict):
    """OpenAI's options of a request's breakpoints."""

    mode: Literal["implicit", "explicit"] | None = Field(
        None,
        description="`implicit` (default) adds one breakpoint, at the end of the last message.",
    )
    ttl: Ttl | None = Field(None, description="Since the last use; default 30m.")
    comparison_response_id: str | None = Field(
        None, max_length=128, description="An earlier answer that misses are explained against."
    )

    @property
    def adds_one(self) -> bool:
        """Whether they ask for a breakpoint at the end of the last message."""
        if self.mode is None and self.ttl is None:
            return self.comparison_response_id is None  # else they ask for a comparison alone
        return self.mode != "explicit"


class AutomaticFields(Strict):
    """What a chat may say of its breakpoints as a whole, as Anthropic has it."""

    cache_control: CacheControl | None = Field(
        None, description="One breakpoint at the end of the last message."
    )


class CacheFields(AutomaticFields):
    """The same, as both APIs have it."""

    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(
        None, description="`24h` keeps this prompt resident for a day after its last use."
    )


@dataclass(frozen=True, slots=True)
class Mark:
    """Keep what comes before ``cut`` until it was not used for ``ttl_s`` seconds."""

    cut: Cut
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message; of the two kinds of breakpoints it may end with one."""

    text: str
    control: CacheControl | None = None
    breakpoint: CacheBreakpoint | None = None
    at: str = ""
    """Its place in the body, for errors."""
    is_call: bool = False
    """Whether it is a call, which has no text."""


def marks_of(
    turns: Sequence[Sequence[Part]],
    fields: AutomaticFields,
    tools: Sequence[CacheControl | None] = (),
) -> tuple[Mark, ...]:
    """Collect the breakpoints of a chat; raises InvalidRequest where they break a rule.

    ``turns`` are the parts of each message that the template is shown; ``tools``: the breakpoint
    of each tool.
    """
    marks = _controls(turns, fields.cache_control, tools)
    if isinstance(fields, CacheFields):
        marks += _breakpoints(turns, fields, MAX_MARKS - len(marks))
    found: dict[Cut, float] = {}
    for mark in marks:
        found[mark.cut] = max(mark.ttl_s, found.get(mark.cut, 0.0))
    return tuple(Mark(cut, ttl_s) for cut, ttl_s in found.items())


def _cut(turns: Sequence[Sequence[Part]], i: int, j: int) -> Cut:
    if j == len(turns[i]) - 1:
        return Cut(i)
    before = turns[i][: j + 1]
    texts = [part.text for part in before if not part.is_call]
    return Cut(i, "\n".join(texts), calls=len(before) - len(texts))


def _controls(
    turns: Sequence[Sequence[Part]],
    automatic: CacheControl | None,
    tools: Sequence[CacheControl | None],
) -> list[Mark]:
    found: list[Mark] = []
    longest: float | None = None
    last: Part | None = None
    for i, control in enumerate(tools):
        if control is not None:
            longest = _in_order(control.ttl_s, longest, f"tools[{i}].cache_control.ttl")
            found.append(Mark(Cut(None, tools=i + 1), control.ttl_s))
    for i, parts in enumerate(turns):
        for j, last in enumerate(parts):
            control = last.control
            if control is None:
                continue
            if not last.text and not last.is_call:
                raise InvalidRequest(
                    f"{last.at} is empty and has a cache_control; wanted some text",
                    param=f"{last.at}.cache_control",
                )
            longest = _in_order(control.ttl_s, longest, f"{last.at}.cache_control.ttl")
            found.append(Mark(_cut(turns, i, j), control.ttl_s))
    if automatic is not None and last is not None:
        if last.control is None:
            _in_order(automatic.ttl_s, longest, "cache_control.ttl")
            found.append(Mark(Cut(len(turns) - 1), automatic.ttl_s))
        elif last.control.ttl_s != automatic.ttl_s:
            raise InvalidRequest(
                "cache_control asks for another ttl than the last block's own cache_control",
                param="cache_control.ttl",
            )
    if len(found) > MAX_MARKS:
        raise InvalidRequest(
            f"{len(found)} blocks have a cache_control, a top-level one included; at most "
            f"{MAX_MARKS} may",
            param="cache_control",
        )
    return found


def _in_order(ttl_s: float, longest: float | None, param: str) -> float:
    if longest is not None and ttl_s > longest:
        raise InvalidRequest(
            "a cache_control with ttl 1h comes after one with ttl 5m; the longer ones come first",
            param=param,
        )
    return ttl_s


def _breakpoints(turns: Sequence[Sequence[Part]], fields: CacheFields, room: int) -> list[Mark]:
    options = fields.prompt_cache_options
    ttl = (options and options.ttl) or _OPENAI_TTL
    found = [
        Mark(_cut(turns, i, j), ttl_seconds(part.breakpoint.ttl or ttl))
        for i, parts in enumerate(turns)
        for j, part in enumerate(parts)
        if part.breakpoint is not None
    ]
    if fields.prompt_cache_retention is not None and (found or options is not None):
        raise InvalidRequest(
            "prompt_cache_retention cannot be combined with prompt_cache_options or with "
            "prompt_cache_breakpoint; leave it out",
            param="prompt_cache_retention",
        )
    whole: list[Mark] = []
    if turns and options is not None and options.adds_one:
        whole = [Mark(Cut(len(turns) - 1), ttl_seconds(ttl))]
    elif turns and fields.prompt_cache_retention == "24h":
        whole = [Mark(Cut(len(turns) - 1), RETENTION_S)]
    # As OpenAI does: the latest are written, the implicit one among them.
    explicit = found[-(room - len(whole)) :] if room > len(whole) else []
    return explicit + whole[:room]


def read_part(part: Mapping[str, Any], at: str) -> Part:
    """Read the breakpoints of a content part whose text was looked at before."""
    return Part(
        part["text"],
        _read(CacheControl, part, "cache_control", at),
        _read(CacheBreakpoint, part, "prompt_cache_breakpoint", at),
        at,
    )


def _read(model: type[Model], part: Mapping[str, Any], name: str, at: str) -> Model | None:
    if part.get(name) is None:
        return None
    try:
        return model.model_validate(part[name])
    except ValidationError as e:
        raise explain(e, f"{at}.{name}") from None
