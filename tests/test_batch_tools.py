"""A line of a batch may have tools; it is answered as its request would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.batch.asks import Asks
from radixkv.service.batch.lines import Line
from radixkv.service.http.serving import Serving
from tests.batch_cases import chat
from tests.http_server import build_engine
from tests.tool_cases import ADD, WEATHER

TEMPLATE = str(Path(__file__).parents[1] / "examples" / "templates" / "chatml_tools.jinja")


def test_a_forced_call_is_a_call_and_a_wrong_one_is_the_lines_own_fault() -> None:
    """BATCH: per-line errors."""
    body = chat("a", "hello", tools=[ADD, WEATHER], max_tokens=120, ignore_eos=False)["body"]
    forced = {"tool_choice": {"type": "function", "function": {"name": "add"}}}
    with build_engine(chat_template=TEMPLATE, max_model_len=4096) as engine:
        serving = Serving()
        serving.start(engine)
        try:
            asks = Asks(serving)
            ask = asks.parse(line(body | forced))
            (prompt,) = asks.prompts(ask)
            assert len(prompt.tokens) > 4 * 300  # the tools are in it
            ids = engine.render(body["messages"], tools=[ADD, WEATHER])
            done = engine.submit(ids, ask.params, origin=ask.origin).result()
            (choice,) = asks.reply(ask, [done])["choices"]
            with pytest.raises(InvalidRequest, match="not among tools"):
                asks.parse(
                    line(body | {"tool_choice": {"type": "function", "function": {"name": "x"}}})
                )
        finally:
            serving.stop()
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and set(json.loads(call["function"]["arguments"])) == {
        "a"
    }


def line(body: object) -> Line:
    """A line with this body."""
    return Line(1, 0, "a", "/v1/chat/completions", body)  # type: ignore[arg-type]
