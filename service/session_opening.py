"""How a session begins: what it is given once, for all its turns and forks.

Knows arguments; nothing of what happens in a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.errors import InvalidRequest
from radixkv.service.engine.origin import take_origin
from radixkv.service.session import Session, Setting
from radixkv.service.session_arguments import check_limits, named, one_answer
from radixkv.service.session_hold import Hold, Holds
from radixkv.service.session_snapshot import Snapshot
from radixkv.service.session_text import (
    ChatWriter,
    Message,
    PlainWriter,
    Transcript,
    Writer,
    read_messages,
)

if TYPE_CHECKING:
    from radixkv.service.engine.engine import Engine


def open_session(
    engine: Engine,
    holds: Holds,
    *,
    system: str | None,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    template: bool,
    template_kwargs: Mapping[str, Any] | None,
    ttl_s: float | None,
    budget_blocks: int | None,
    sampling: Mapping[str, Any],
) -> Session:
    """Begin a session; the arguments are those of ``Engine.session``. Raises InvalidRequest."""
    begin: list[Message] = []
    if system is not None:
        begin.append({"role": "system", "content": system})
    begin += read_messages(messages) if messages else []
    writer: Writer
    if template:
        writer = ChatWriter(
            engine.prompting, engine.tokenizer, tools=tools, template_kwargs=template_kwargs
        )
    elif begin or tools or template_kwargs:
        raise InvalidRequest("system, messages, tools and template_kwargs need the template")
    else:
        writer = PlainWriter(engine.prompting, engine.tokenizer)
    check_limits(ttl_s, budget_blocks)
    fields = dict(sampling)
    origin = take_origin(fields)
    fields = named(fields)
    one_answer(fields)  # refuses bad ones here and now
    seed = fields.pop("seed", None)
    setting = Setting(engine, holds, writer, origin, fields)
    hold = Hold(origin.tenant, ttl_s, budget_blocks)
    return Session(setting, Snapshot(Transcript(tuple(begin))), hold, seed)
