"""The pure parts of the comparison with other engines: targets, ratios, bounds, rows, weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from examples.bench import plots
from examples.bench.engine import floors, report, rows
from examples.bench.engine.drivers import transformers_driver
from examples.bench.engine.weights import to_bfloat16

RESULTS: dict[str, dict[str, Any]] = {
    "radixkv": {
        "a": {"tokens_per_s": 60.0},
        "bc": {"prefill_tokens_per_s": 900.0, "cold_ms": 1000.0, "warm_ms": 70.0},
        "d": {"wall_s": 6.0},
        "start": {"first_token_s": 15.0},
        "s": {"outside_share": 0.03},
    },
    "llamacpp": {"a": {"tokens_per_s": 80.0}, "d": {"note": "over 240 s"}},
    "vllm": {"d": {"wall_s": 9.0}},
}


def verdict(line: str) -> report.Verdict:
    return report.judge(report.parse(line), RESULTS)


def test_every_target_line_can_be_read() -> None:
    targets = [report.parse(line) for line in report.TARGETS]
    assert {t.figure for t in targets} == {"a", "b", "c.warm", "d", "w", "e", "f", "start", "s"}
    assert report.parse("d <= 0.6 vllm") == report.Target("d", "<=", 0.6, "vllm")
    assert report.parse("start < 15").of is None


@pytest.mark.parametrize(
    "line", ["a", "a 0.7 llamacpp", "z >= 1", "a >= 1 nobody", "a >= fast", "a >= 1 vllm too"]
)
def test_a_line_that_is_no_target_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        report.parse(line)


def test_a_ratio_to_a_peer_is_ours_over_theirs() -> None:
    assert verdict("a >= 0.7 llamacpp").ratio == pytest.approx(0.75)
    assert verdict("a >= 0.7 llamacpp").met is True
    assert verdict("a >= 0.76 llamacpp").met is False
    assert verdict("d <= 0.6 vllm").met is False
    assert verdict("d <= 0.7 vllm").met is True


def test_a_target_may_be_relative_to_another_figure_of_ours_or_absolute() -> None:
    assert verdict("c.warm <= 0.08 c.cold").ratio == pytest.approx(0.07)
    assert verdict("c.warm <= 0.08 c.cold").met is True
    assert verdict("start < 15").met is False  # 15 is not below 15
    assert verdict("s <= 0.05").met is True


def test_what_was_not_measured_is_neither_met_nor_missed_and_says_why() -> None:
    assert verdict("b >= 0.7 openvino").met is None
    assert verdict("b >= 0.7 openvino").why == "openvino: not run"
    assert verdict("d <= 0.6 llamacpp").why == "llamacpp: over 240 s"
    assert verdict("e >= 1.3 vllm").why == "radixkv: not measured"


def test_the_tables_show_figures_bounds_notes_and_verdicts() -> None:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(report.figures_table(RESULTS, {"a": 120.0, "d": 3.0}, "title"))
        console.print(report.targets_table(RESULTS))
    lines = captured.get().splitlines()
    row_a = next(line for line in lines if "decode, one stream, tok/s" in line)
    assert "60.0" in row_a and "80.0" in row_a and "120.0" in row_a and "50%" in row_a
    row_d = next(line for line in lines if "32 x [1,024 shared + 32] -> 32, cold, s" in line)
    assert "6.00" in row_d and "over 240 s" in row_d and "9.00" in row_d and "50%" in row_d
    assert any("openvino: not run" in line for line in lines)
    assert any("/ llamacpp" in line and "0.75" in line and "met" in line for line in lines)
    assert any("<= 5%" in line and "3.0%" in line for line in lines)


def test_speedups_point_up_for_rates_and_for_times_alike() -> None:
    found = plots.speedups(RESULTS)
    assert found["llamacpp"][plots.RATIOS.index("a")] == pytest.approx(0.75)
    assert found["vllm"][plots.RATIOS.index("d")] == pytest.approx(1.5)
    assert found["vllm"][plots.RATIOS.index("a")] is None
    assert "openvino" not in found


def test_the_shape_is_smollm2s() -> None:
    s = floors.SMOLLM2
    assert s.body + s.head == pytest.approx(134.5e6, rel=1e-3)
    assert s.kv_bytes == 30 * 2 * 3 * 64 * 2


def test_one_stream_is_bound_by_memory_and_a_prefill_by_arithmetic() -> None:
    slow_memory = floors.bounds(floors.Machine(read_gb_s=10, gemm_gflop_s=1000))
    fast_memory = floors.bounds(floors.Machine(read_gb_s=20, gemm_gflop_s=1000))
    assert fast_memory["a"] == pytest.approx(2 * slow_memory["a"])
    assert slow_memory["a"] == pytest.approx(10e9 / 269e6, rel=0.02)
    assert fast_memory["b"] == pytest.approx(slow_memory["b"])
    flop = 2 * 106.2e6 * 1024 + 4 * 30 * 9 * 64 * 1024 * 1025 / 2 + 2 * 28.3e6
    assert slow_memory["b"] == pytest.approx(1024 / (flop / 1000e9), rel=0.01)


def test_a_primed_prefix_saves_its_prefill_and_no_more() -> None:
    machine = floors.Machine(20, 150)
    bounds = floors.bounds(machine)
    assert bounds["d"] - bounds["w"] == pytest.approx(
        floors.prefill_s(machine, floors.SMOLLM2, 1024)
    )


def test_rows_are_named_by_letters_and_b_and_c_are_measured_together() -> None:
    assert rows.wanted("a,c") == ["a", "bc"]
    assert rows.wanted("w, b") == ["bc", "w"]
    assert rows.wanted(None) == list(rows.ORDER)
    with pytest.raises(ValueError, match="no row z"):
        rows.wanted("a,z")


class FakeEngine:
    """Takes 1 ms a prompt token that it has not seen at that place, and 10 ms a step."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.asked: list[tuple[int, int]] = []

    def __call__(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        self.asked.append((len(prompts), tokens))
        new = 0
        for prompt in prompts:
            for end in range(1, len(prompt) + 1):
                new += tuple(prompt[:end]) not in self.seen
                self.seen.add(tuple(prompt[:end]))
        first = new / 1000
        return {
            "wall_s": first + (tokens - 1) / 100,
            "ttft_s": [first] * len(prompts),
            "ids": [[0] * tokens for _ in prompts],
        }


def asker(scale: int = 16) -> tuple[FakeEngine, rows.Asker]:
    engine = FakeEngine()
    return engine, rows.Asker(engine, rows.Size(rounds=2, scale=scale), seed=1)


def test_decode_counts_the_steps_after_the_first_token() -> None:
    _, ask = asker()
    assert rows.decode(ask)["tokens_per_s"] == pytest.approx(100)


def test_ttft_is_cold_and_then_warm_in_every_round() -> None:
    _, ask = asker()
    found = rows.ttft(ask)
    assert found["cold_ms"] == pytest.approx(64)
    assert found["warm_ms"] == pytest.approx(2)
    assert found["prefill_tokens_per_s"] == pytest.approx(1000)
    assert found["rounds"] == 2


@pytest.mark.parametrize("primed", [False, True])
def test_a_burst_shares_its_prefix_and_a_primed_one_does_not_pay_for_it(primed: bool) -> None:
    engine, ask = asker()
    found = rows.burst(ask, 4, 32, 1024, 32, primed)
    computed = 2 * 2 + (0 if primed else 64)  # two requests with two tokens of their own
    assert found["wall_s"] == pytest.approx(computed / 1000 + 1 / 100)
    assert (2, 2) in engine.asked


def test_unshared_prompts_share_nothing() -> None:
    _, ask = asker(scale=8)
    assert rows.unshared(ask)["wall_s"] == pytest.approx(4 * 16 / 1000 + 7 / 100)


def test_the_curve_falls_from_all_of_the_prompt_to_nothing() -> None:
    _, ask = asker()
    curve = rows.ttft_over_share(ask)["256"]
    assert [share for share, _ in curve] == list(rows.SHARES)
    times = [ms for _, ms in curve]
    assert times[0] == pytest.approx(256) and times[-1] == pytest.approx(0)
    assert times == sorted(times, reverse=True)


def test_every_engine_gets_the_same_prompts_and_every_round_other_ones() -> None:
    _, ask = asker()
    _, other = asker()
    assert ask.prompt(8, 1, 0) == other.prompt(8, 1, 0)
    assert ask.prompt(8, 1, 0) != ask.prompt(8, 1, 1)


def test_the_step_share_is_what_the_model_did_not_take() -> None:
    found = rows.step_share([0.1, 0.2, 0.1], [0.09, 0.19, 0.08])
    assert found["outside_share"] == pytest.approx(0.1)
    assert found["steps"] == 3
    with pytest.raises(ValueError):
        rows.step_share([], [])


def test_weights_are_rounded_to_bfloat16_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    values[:4] = 0.0, -0.0, 1.00390625, 1.01171875  # the last two are ties
    wanted = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(to_bfloat16(values), wanted)


def test_a_prefix_kept_by_hand_is_what_all_prompts_have_in_common() -> None:
    assert transformers_driver.common([1, 2, 3, 4], [[1, 2, 3, 9], [1, 2, 8, 4]]) == 2
    assert transformers_driver.common([], [[1]]) == 0
