"""Decode steps replayed over static buffers give what each kernel launched anew gives.

On a CPU the recording is a stand-in (``replayed``) that proves that it could be replayed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.cuda_graphs import cuda_graphs
from radixkv.service.engine.engine import Engine
from radixkv.service.engine.graphs import buckets
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.runner import ModelRunner
from tests.decoding import BLOCK, build_runner, greedy, ragged
from tests.replayed import POISON, ReplayedEagerly
from tests.tiny_models import ARCHITECTURES, build


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model, tokenizer = build(request.param)
    return LoadedModel.from_model(model, tokenizer, name=request.param, decoder="generic")


@pytest.fixture(scope="module")
def generic() -> LoadedModel:
    model, tokenizer = build("llama")
    return LoadedModel.from_model(model, tokenizer, name="tiny", decoder="generic")


def graphs_of(runner: ModelRunner) -> tuple[int, int]:
    assert runner.graphs is not None
    return runner.graphs.num_recordings, runner.graphs.num_replays


def test_ragged_batches_that_come_and_go_decode_to_the_same_ids(loaded: LoadedModel) -> None:
    """CORRECT: joins, leaves, four batch sizes, block borders, windows; nothing but the buffers."""
    want = greedy(build_runner(loaded, backend="torch"), ragged())
    device = ReplayedEagerly()
    runner = build_runner(loaded, backend="torch", graphs=device, max_num_seqs=8)
    assert greedy(runner, ragged()) == want
    recordings, replays = graphs_of(runner)
    assert recordings == device.num_recorded == 4  # 1, 2, 4 and 8 rows
    assert replays > 20


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_pools_are_replayed_too(generic: LoadedModel, kv_dtype: torch.dtype) -> None:
    want = greedy(build_runner(generic, backend="torch", kv_dtype=kv_dtype), ragged())
    options: dict[str, Any] = {"backend": "torch", "kv_dtype": kv_dtype}
    options["graphs"] = ReplayedEagerly()
    assert greedy(build_runner(generic, **options), ragged()) == want


def test_the_lists_of_the_gpu_kernels_are_replayed_in_the_interpreter() -> None:
    """Run in a process of its own: triton reads TRITON_INTERPRET once, when it is imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    tests = Path(__file__).with_name("triton_graphs_interpreted.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tests.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def step_of(runner: ModelRunner, num_seqs: int, kv_len: int = 20) -> StepBatch:
    tables = np.arange(num_seqs * 2, dtype=np.int32).reshape(num_seqs, 2)
    return StepBatch(
        token_ids=np.arange(3, 3 + num_seqs),
        query_lens=np.ones(num_seqs, np.int32),
        kv_lens=np.full(num_seqs, kv_len, np.int32),
        block_tables=tables,
        logit_rows=np.arange(num_seqs),
    )


def test_rows_that_nobody_has_write_to_the_scratch_block_alone(generic: LoadedModel) -> None:
    runner = build_runner(generic, backend="torch", graphs=ReplayedEagerly(), max_num_seqs=8)
    data = runner.pool.data
    assert runner.pool.num_blocks == 97
    before = data.clone()
    runner.forward(step_of(runner, 5))
    changed = (data != before).flatten(4).any(-1)[0, 0]  # [blocks, block_size]
    slots = {tuple(x) for x in changed.nonzero().tolist()}
    assert slots == {(2 * s + 1, 3) for s in range(5)} | {(96, 0)}


def test_logits_are_the_callers_own_and_in_the_wanted_order(generic: LoadedModel) -> None:
    runner = build_runner(generic, backend="torch", graphs=ReplayedEagerly(), max_num_seqs=8)
    whole = runner.forward(step_of(runner, 4))
    kept = whole.clone()
    batch = step_of(runner, 4)
    batch.logit_rows = np.array([2, 0])
    picked = runner.forward(batch)
    torch.testing.assert_close(picked, kept[[2, 0]])
    batch = step_of(runner, 4, kv_len=19)
    batch.logit_rows = np.array([], dtype=np.int64)
    assert runner.forward(batch).shape == (0, generic.vocab_size)
    assert torch.equal(whole, kept)


def test_prefill_mixed_adapted_and_larger_steps_are_left_to_kernel_by_kernel(
    generic: LoadedModel,
) -> None:
    runner = build_runner(generic, backend="torch", graphs=ReplayedEagerly(), max_num_seqs=4)
    assert runner.graphs is not None
    for batch in (step_of(runner, 5), step_of(runner, 4)):
        batch.query_lens[-1] = 1 if len(batch.query_lens) == 5 else 2
        if batch.query_lens[-1] == 2:
            batch.token_ids = np.append(batch.token_ids, 9)
        assert runner.graphs.forward(batch) is None
        assert batch.kv_lens.min() > POISON  # untouched
    adapted = step_of(runner, 2)
    adapted.adapters = (None, cast(Any, object()))
    assert runner.graphs.forward(adapted) is None
    assert graphs_of(runner) == (0, 0)


def test_other_weights_are_recorded_anew() -> None:
    """ADMIN-1: a recording of old weights is never replayed."""
    model, tokenizer = build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny", decoder="generic")
    device = ReplayedEagerly()
    runner = build_runner(loaded, backend="torch", graphs=device)
    first = runner.forward(step_of(runner, 2))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    loaded.weights_changed()
    second = runner.forward(step_of(runner, 2))
    assert device.num_recorded == 2 and graphs_of(runner) == (1, 2)
    assert not torch.allclose(first, second)
    plain = build_runner(loaded, backend="torch")
    plain.pool.data.copy_(runner.pool.data[:, :, :96])
    torch.testing.assert_close(plain.forward(step_of(plain, 2)), second)


class Refuses:
    """A device that cannot record."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def sent(self, *sources: object) -> None:
        raise AssertionError("nothing is replayed")


def test_a_model_that_cannot_be_recorded_is_served_all_the_same(
    generic: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    want = greedy(build_runner(generic, backend="torch"), ragged())
    runner = build_runner(generic, backend="torch", graphs=Refuses())
    with caplog.at_level("WARNING", "radixkv.engine"):
        assert greedy(runner, ragged()) == want
    assert runner.graphs is not None
    assert runner.graphs.off == "operation not permitted when stream is capturing"
    assert len([r for r in caplog.records if "kernel by kernel" in r.message]) == 1


def test_batch_sizes_are_powers_of_two_up_to_the_most_that_run() -> None:
    assert buckets(64) == (1, 2, 4, 8, 16, 32, 64)
    assert buckets(48) == (1, 2, 4, 8, 16, 32, 48)
    assert buckets(1) == (1,)


def test_a_cpu_records_nothing_and_off_is_off() -> None:
    assert cuda_graphs(torch.device("cpu"), "auto") is None
    assert cuda_graphs(torch.device("cuda", 0), "off") is None


def test_an_engine_over_recorded_steps_answers_as_without(
    generic: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through scheduler, prefix hits, copies on write, forks and several requests at once."""
    prompts = [prompt for _, prompt, _ in ragged(1)] + [ragged(1)[1][1] + [9, 8, 7]]

    def answers(engine: Engine) -> list[list[list[int]]]:
        asked = [
            engine.stream_generate(p, max_tokens=12, temperature=0, n=1 + i % 2, ignore_eos=True)
            for i, p in enumerate(prompts)
        ]
        return [[list(c.token_ids) for c in stream.result().choices] for stream in asked]

    settings: dict[str, Any] = {"kv_memory": "2MiB", "max_num_seqs": 6, "block_size": BLOCK}
    with Engine(generic, **settings) as engine:
        want = answers(engine)
    device = ReplayedEagerly()
    monkeypatch.setattr("radixkv.service.engine.building.cuda_graphs", lambda *_: device)
    with Engine(generic, **settings) as engine:
        assert answers(engine) == want
        assert answers(engine) == want  # over the cache
        assert engine.check() == []
    assert device.num_recorded >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_a_gpu_replays_to_the_ids_of_eager_steps(arch: str, kv_dtype: torch.dtype | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, tokenizer = build(arch)
    loaded = LoadedModel.from_model(model.to("cuda"), tokenizer, name=arch)
    want = greedy(build_runner(loaded, kv_dtype=kv_dtype), ragged())
    device = cuda_graphs(loaded.device, "auto")
    assert device is not None
    runner = build_runner(loaded, kv_dtype=kv_dtype, graphs=device, max_num_seqs=8)
    assert greedy(runner, ragged()) == want
    assert runner.graphs is not None and runner.graphs.off is None
    assert runner.graphs.num_replays > 20
