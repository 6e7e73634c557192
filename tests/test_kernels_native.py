"""The compiled CPU kernels: the build, and attention against float64."""

import ctypes
import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from radixkv.kernels import native
from radixkv.kernels.attention import choose_backend
from tests.kernel_cases import Case, cases, fresh_memory_is_nan, make_case

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native.COMPILERS), reason="no C compiler here"
)
__all__ = ["fresh_memory_is_nan"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@needs_compiler
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(dtypes=DTYPES))
def test_native_agrees_with_float64_on_any_step(case: Case) -> None:
    """CORRECT: poisoned blocks, slots past the length and keys outside the window never leak."""
    case.check("native")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_work_units_are_merged(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lens = [255, 256, 257, 700, 1, 1025]
        for options in ({}, {"sinks": True, "alibi": True}, {"sliding_window": 300}):
            make_case(
                [1] * 6,
                lens,
                num_q_heads=9,
                num_kv_heads=3,
                dtype=dtype,
                shared_blocks=10,
                **options,
            ).check("native")
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_strided_queries_and_odd_head_sizes_are_read_right() -> None:
    case = make_case([1, 1], [40, 9], head_dim=80, num_q_heads=6)
    transposed = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not transposed.is_contiguous()
    assert torch.equal(dataclasses.replace(case, q=transposed).run("native"), case.run("native"))
    every_second = torch.stack([case.q, case.q], dim=-1).flatten(2)[..., ::2]
    assert torch.equal(dataclasses.replace(case, q=every_second).run("native"), case.run("native"))
    make_case([1, 1], [40, 9], head_dim=24).check("native")  # no multiple of a vector: torch's part


@needs_compiler
def test_large_scores_neither_overflow_nor_lose_the_peak() -> None:
    case = make_case([1], [500], num_q_heads=3, num_kv_heads=1)
    dataclasses.replace(case, options={"scale": 40.0}).check("native")
    dataclasses.replace(case, options={"scale": 40.0, "soft_cap": 30.0}).check("native")


@needs_compiler
def test_the_cpu_uses_the_compiled_kernels_where_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_backend(torch.device("cpu")) == "native"
    sources, kept = tmp_path / "csrc", tmp_path / "kept"
    sources.mkdir()
    kept.mkdir()
    (sources / "a.c").write_text('#include "a.h"\nint one(void) { return ONE; }\n')
    (sources / "a.h").write_text("#define ONE 1\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    first = native.build(kept)
    assert ctypes.CDLL(str(first)).one() == 1
    stamp = first.stat().st_mtime_ns
    assert native.build(kept) == first and first.stat().st_mtime_ns == stamp
    assert os.listdir(kept) == [first.name], "scratch files are removed"
    (sources / "a.h").write_text("#define ONE 2\n")
    assert native.build(kept) != first, "another source is another library"


def test_without_a_compiler_the_reason_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(native.NativeUnavailable, match="no C compiler found.*no-such-cc"):
        native.build(tmp_path, compilers=("no-such-cc",))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    folder = tmp_path / "kept"
    folder.mkdir()
    with pytest.raises(native.NativeUnavailable, match="this compiler is broken"):
        native.build(folder, compilers=(str(broken),))
    assert not os.listdir(folder)


@needs_compiler
def test_every_row_of_the_output_is_written(fresh_memory_is_nan: None) -> None:
    make_case([3, 1, 40, 0, 1], [3, 80, 64, 5, 1], num_q_heads=14).check("native")
