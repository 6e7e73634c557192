"""A batch on a real engine: each prefix computed once, each line answered once, faults by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidConfig
from radixkv.service.batch.asks import Asks
from radixkv.service.batch.results import Done, ResultFile, recover
from radixkv.service.batch.run import BatchRun
from radixkv.service.batch.tally import BatchStopped, Tally
from radixkv.service.engine.engine import Engine
from radixkv.service.http.serving import Serving
from tests.batch_cases import chat, completion, read_lines, three_levels, tree_tokens, write_lines
from tests.http_server import RunningServer, build_engine


def small_engine(num_blocks: int, **settings: Any) -> Engine:
    """An engine whose pool has so many blocks of 16 tokens."""
    probe = 2 * 2 * 16 * 2 * 16 * 4  # layers, K and V, head_dim, heads, tokens a block, float32
    return build_engine(kv_memory=num_blocks * probe, batch_share=1.0, **settings)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with build_engine(batch_share=1.0) as engine:
        yield engine


def run(
    engine: Engine,
    source: Path,
    *,
    resume: bool = False,
    errors: Path | None = None,
    **options: Any,
) -> tuple[Tally, list[dict[str, Any]]]:
    """Run a batch to its end; what was counted and what was written."""
    output, done = source.with_name("out.jsonl"), Done()
    if resume:
        recover(output, done)

    async def main() -> Tally:
        serving = Serving()
        serving.start(engine)
        try:
            with ResultFile(output) as answers, ResultFile(errors or output) as bad:
                return await BatchRun(
                    engine, Asks(serving), source, answers=answers, errors=bad, done=done, **options
                ).run()
        finally:
            serving.stop()

    return asyncio.run(main()), read_lines(output)


def test_each_shared_prefix_is_computed_once_in_a_pool_that_holds_little_more_than_a_path(
    tmp_path: Path,
) -> None:
    """BATCH-3: 300 shuffled prompts of three levels; computed tokens == the sum of the edges."""
    lines, prompts = three_levels(300)
    source = write_lines(tmp_path / "in.jsonl", lines)
    unique, repeats = tree_tokens(prompts)
    longest = max(map(len, prompts))
    with small_engine(9) as engine:
        assert engine.stats().num_blocks * 16 < 2 * longest < unique / 10
        tally, answers = run(engine, source)
        stats = engine.stats()
    assert tally.planned.unique_tokens == unique
    assert stats.prompt_tokens_computed_total == unique + repeats
    assert tally.computed_tokens == tally.planned.optimum_tokens == unique + repeats
    assert stats.recomputed_tokens_total == stats.violations_total == 0
    assert sorted(a["custom_id"] for a in answers) == sorted(line["custom_id"] for line in lines)


def test_answers_do_not_depend_on_the_order_and_are_those_of_the_routes(tmp_path: Path) -> None:
    """BATCH-3: the same file in another order gives the same answers; so does HTTP, by line."""
    lines, _ = three_levels(40)
    lines += [
        chat("chat", "You are brief.", "Why?"),
        completion("text", "hello there", logprobs=2),
        completion("score", "in the sand", max_tokens=0, echo=True, logprobs=1),
        completion("two", ["one thing", "another thing"], n=2, seed=5, temperature=1),
    ]
    found: list[dict[str, Any]] = []
    for order in (lines, lines[::-1]):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        with build_engine(batch_share=1.0, deterministic=True) as engine:
            tally, answers = run(engine, write_lines(folder / "in.jsonl", order))
        assert tally.refused == 0
        found.append({a["custom_id"]: a["response"]["body"]["choices"] for a in answers})
    assert found[0] == found[1]
    with build_engine(deterministic=True) as engine:
        server = RunningServer(engine, max_body=2**20, ping_s=15.0)
        try:
            for line in lines[-4:]:
                status, _, reply = server.ask("POST", line["url"], line["body"])
                assert status == 200
                assert reply["choices"] == found[0][line["custom_id"]]
        finally:
            server.close()


def test_a_bad_line_is_an_error_of_its_own_and_the_rest_is_answered(
    engine: Engine, tmp_path: Path
) -> None:
    """BATCH-2: one bad line is only in the error file, by number and by custom_id."""
    lines: list[Any] = [
        completion("a", "one"),
        "not json",
        completion("a", "two"),
        {"custom_id": "no-url", "method": "POST", "url": "/v1/embeddings", "body": {}},
        completion("hot", "three", temperature=9),
        completion("long", [1] * 5000),
        completion("stream", "four", stream=True),
        completion("b", "five"),
        {"custom_id": 5, "url": "/v1/completions", "body": {}},
        "",
        completion("other", "six", model="gpt-9"),
    ]
    errors = tmp_path / "errors.jsonl"
    tally, answers = run(engine, write_lines(tmp_path / "in.jsonl", lines), errors=errors)
    assert sorted(a["custom_id"] for a in answers) == ["a", "b"]
    refused = read_lines(errors)
    codes = {
        r["error"]["line"]: (r["custom_id"], r["error"]["code"]) for r in refused if r["error"]
    }
    assert codes == {
        2: (None, "invalid_json_line"),
        3: ("a", "duplicate_custom_id"),
        4: ("no-url", "invalid_url"),
        9: (None, "invalid_custom_id"),
    }
    bodies = {
        r["custom_id"]: (r["response"]["status_code"], r["response"]["body"]["error"]["param"])
        for r in refused
        if r["response"]
    }
    assert bodies == {
        "hot": (400, "temperature"),
        "long": (400, "prompt"),
        "stream": (400, "stream"),
        "other": (404, "model"),
    }
    assert (tally.lines, tally.answered, tally.refused) == (10, 2, 8)


def test_a_run_over_a_finished_file_adds_nothing(engine: Engine, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [completion("a", "x y"), "nonsense", completion("b", "z")]
    )
    _, first = run(engine, source)
    tally, again = run(engine, source, resume=True)
    assert again == first
    assert (tally.skipped, tally.answered, tally.refused) == (3, 0, 0)


def test_half_a_line_at_the_end_is_cut_off_and_answered_again(
    engine: Engine, tmp_path: Path
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [completion(str(i), f"number {i}") for i in range(8)]
    )
    run(engine, source)
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40, whole.index(b"\n") + 20, 10, 0):
        output.write_bytes(whole[:cut])
        tally, answers = run(engine, source, resume=True)
        assert sorted(a["custom_id"] for a in answers) == [str(i) for i in range(8)]
        assert tally.skipped == whole[:cut].count(b"\n")


def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "precious.txt"
    path.write_text("my diary\nhalf")
    with pytest.raises(InvalidConfig, match="no output of a batch"):
        recover(path, Done())
    assert path.read_text() == "my diary\nhalf"


def test_an_engine_that_ends_in_the_middle_stops_the_batch_and_loses_no_answer(
    tmp_path: Path,
) -> None:
    lines, _ = three_levels(60, max_tokens=20)
    source = write_lines(tmp_path / "in.jsonl", lines)
    with build_engine(batch_share=1.0, max_num_seqs=4) as engine:
        answered = 0

        def count(_: object) -> None:
            nonlocal answered
            answered += 1
            if answered == 10:
                engine._core.close(0)

        with pytest.raises(BatchStopped):
            run(engine, source, on_usage=count)
    kept = read_lines(tmp_path / "out.jsonl")
    assert len(kept) >= 10
    with build_engine(batch_share=1.0) as engine:
        tally, answers = run(engine, source, resume=True)
    assert tally.skipped == len(kept)
    assert sorted(a["custom_id"] for a in answers) == sorted(line["custom_id"] for line in lines)


def test_salts_are_kept_apart(engine: Engine, tmp_path: Path) -> None:
    ids = list(range(50, 90))
    lines = [completion(f"{salt}{i}", ids, cache_salt=salt) for salt in "xy" for i in range(2)]
    tally, _ = run(engine, write_lines(tmp_path / "in.jsonl", lines))
    assert tally.planned.optimum_tokens == tally.computed_tokens == 2 * (40 + 1)


@pytest.mark.soak
def test_two_thousand_prompts_of_three_levels_cost_their_unique_tokens(tmp_path: Path) -> None:
    lines, prompts = three_levels(2000, tops=8, middles=25, max_tokens=4)
    source = write_lines(tmp_path / "in.jsonl", lines)
    unique, repeats = tree_tokens(prompts)
    with small_engine(9) as engine:
        tally, answers = run(engine, source)
        assert engine.stats().prompt_tokens_computed_total == unique + repeats
    assert tally.computed_tokens == unique + repeats
    assert len({json.dumps(a["custom_id"]) for a in answers}) == len(answers) == 2000
