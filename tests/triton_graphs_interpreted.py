"""Run by ``test_graphs`` in a process of its own, under TRITON_INTERPRET=1: what a GPU launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv.kernels import triton_decode, triton_merge, triton_tree
from radixkv.kernels.fixed import FixedStep, padded_plan
from radixkv.kernels.tree import CostModel
from radixkv.kernels.triton_attention import DecodeLists, Heads, Tuning, paged_attention_triton
from radixkv.kernels.triton_config import SMALL_BYTES
from radixkv.kernels.triton_fixed import Room
from radixkv.service.engine.loading import LoadedModel
from tests.decoding import FEW, build_runner, greedy, ragged
from tests.replayed import ReplayedEagerly
from tests.tiny_models import build
from tests.triton_cases import FLAT, SHARE, make_step


class Noted:
    """A kernel whose launches are noted with all that a graph would keep of them."""

    def __init__(self, kernel: Any, notes: list[Any]) -> None:
        self._kernel, self._notes = kernel, notes

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = [*args, *kwargs.items()]
            kept = [self._kept(x) for x in given]
            self._notes.append((grid, kept))
            self._kernel[grid](*args, **kwargs)

        return launch

    def _kept(self, x: Any) -> Any:
        if isinstance(x, tuple) and len(x) == 2:
            return x[0], self._kept(x[1])
        return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    notes: list[Any] = []
    for module, name in (
        (triton_decode, "_decode_kernel"),
        (triton_merge, "_merge_kernel"),
        (triton_tree, "_tree_kernel"),
    ):
        monkeypatch.setattr(module, name, Noted(getattr(module, name), notes))
    return notes


class SameLaunches(ReplayedEagerly):
    """Also holds the launches of the kernels against those that were recorded."""

    def __init__(self, notes: list[Any]) -> None:
        super().__init__()
        self._notes = notes

    def record(self, run: Any) -> Any:
        self._notes.clear()
        result, replay = super().record(run)
        half = len(self._notes) // 2
        warm, recorded = self._notes[:half], self._notes[half:]
        assert recorded and recorded == warm, "the second run launched other than the first"

        def again() -> None:
            self._notes.clear()
            replay()
            assert self._notes == recorded

        return result, again


def test_a_model_decodes_to_the_same_ids_from_lists_in_static_buffers(
    launches: list[Any],
) -> None:
    """Windows whose first split moves, rows that nobody has, batch sizes that change."""
    model, tokenizer = build("gemma3")  # layers with a window and without
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny", decoder="generic")
    asked = ragged(shapes=FEW)
    want = greedy(build_runner(loaded, backend="torch"), asked)
    device = SameLaunches(launches)
    runner = build_runner(loaded, backend="triton", graphs=device, max_num_seqs=4)
    assert greedy(runner, asked) == want
    assert runner.graphs is not None and runner.graphs.num_replays > 3
    assert device.num_recorded == 2


def test_shared_runs_are_read_once_in_a_recorded_step_too(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt in common is one run for all; the ids are those of flat, eager steps."""
    monkeypatch.setattr(
        Tuning, "of", classmethod(lambda cls, heads: cls(split=16, run=32, cost=SHARE))
    )
    model, tokenizer = build("qwen3")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny", decoder="generic")
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, 300, 64).tolist()
    asked = [(0, prompt + rng.integers(3, 300, n).tolist(), 3) for n in (1, 20, 3)]
    want = greedy(build_runner(loaded, backend="torch"), asked, shared=64)
    runner = build_runner(loaded, backend="triton", graphs=SameLaunches(launches))
    assert greedy(runner, asked, shared=64) == want
    assert any(
        "run_queries" in dict(x for x in kept if isinstance(x, tuple)) for _, kept in launches
    )


def heads_of(step: Any) -> Heads:
    q, k = step.q, step.k_pool
    quantised = step.k_scales is not None
    return Heads(
        q.shape[1], k.shape[2], q.shape[2], q.dtype, k.element_size(), quantised, SMALL_BYTES
    )


@pytest.mark.parametrize(
    ("cost", "window", "pool_dtype"),
    [
        (FLAT, None, None),
        (SHARE, None, torch.int8),
        (SHARE, 100, None),
        (FLAT, 40, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_one_set_of_buffers_serves_every_step_that_fits(
    cost: CostModel, window: int | None, pool_dtype: torch.dtype | None
) -> None:
    """Longer, shorter, fewer rows, sharing that comes and goes: all as in float64."""
    prompt = list(range(12))
    rows = [prompt + list(range(12 + 20 * s, 20 + 20 * s)) for s in range(4)]
    apart = [list(range(100 + 20 * s, 120 + 20 * s)) for s in range(4)]
    steps = [
        make_step(
            [1] * len(lens), lens, np.array(tables, dtype=np.int32), 16,
            pool_dtype=pool_dtype, sliding_window=window, features=("soft cap", "sinks"),
        )
        for tables, lens in (
            (rows, [250, 193, 310, 200]),
            (rows[:3], [210, 197, 220]),
            (apart, [1, 64, 65, 320]),
        )
    ]  # fmt: skip
    heads = heads_of(steps[0])
    lister = DecodeLists(heads, [window], tuning=Tuning(split=64, run=64, cost=cost))
    tables = torch.full((4, 20), 0, dtype=torch.int32)
    room = Room(decode=32, runs=4, run_queries=4, slots=64)
    fixed = lister.step(room, 4, tables, 16)
    for step in steps:
        n = step.plan.num_seqs
        # A scratch block behind the pool, as a runner has one.
        pools = [torch.cat([x, torch.zeros_like(x[:1])]) for x in (step.k_pool, step.v_pool)]
        scales = [
            None if x is None else torch.cat([x, torch.ones_like(x[:1])])
            for x in (step.k_scales, step.v_scales)
        ]
        plan = padded_plan(
            step.plan.host_kv_lens, step.plan.host_block_tables, 4, step.num_blocks, 16
        )
        fixed.load(np.arange(n), plan, room.fill(lister.of(plan)))
        q = torch.full((4, *step.q.shape[1:]), 7.0)
        q[:n] = step.q
        out = torch.full_like(q, torch.nan)
        k_pool, v_pool = pools
        k_scales, v_scales = scales
        paged_attention_triton(
            q, k_pool, v_pool, fixed.plan, step.features, k_scales, v_scales, out=out
        )
        assert torch.isfinite(out).all()
        step.check(out[:n])


def test_lists_for_other_heads_are_refused() -> None:
    step = make_step([1], [4], np.zeros((1, 1), dtype=np.int32), 16)
    lister = DecodeLists(heads_of(step), [None])
    plan = padded_plan(step.plan.host_kv_lens, step.plan.host_block_tables, 1, 0, 16)
    room = lister.room(lister.of(plan))
    fixed = lister.step(room, 1, torch.zeros(1, 1, dtype=torch.int32), 16)
    fixed.load(np.zeros(1, np.int64), plan, room.fill(lister.of(plan)))
    narrow = step.q[:, :2].contiguous()
    with pytest.raises(ValueError, match="what was listed for"):
        paged_attention_triton(narrow, step.k_pool, step.v_pool, fixed.plan, step.features)
    alone = FixedStep(1, torch.zeros(1, 1, dtype=torch.int32), 16)
    with pytest.raises(ValueError, match="lists for a window of None"):
        paged_attention_triton(step.q, step.k_pool, step.v_pool, alone.plan, step.features)
