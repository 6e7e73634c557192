"""The kernel benchmark goes through every line of its GPU table, and reckons rightly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from examples.bench.gpu import rows, timing  # noqa: E402

ROOT = Path(__file__).parent.parent
ROWS = [
    "decode 64 x 4096",
    "tree 64 x (8192 + 256)",
    "prefill 8 x 2048",
    "tree 64 x (4096 + 4096 of 8 + 256)",
    "prefill 8 x 512 on 4096",
    "decode 1 x 4096",
    "decode 64 x 1024",
    "decode 64 x 4096 int8",
    "decode 64 x 4096 float8_e4m3fn",
    "latent decode 64 x 4096, 16 heads",
    "latent decode 64 x 4096, 128 heads",
    "write 8192 bfloat16",
    "write 8192 int8",
    "write 8192 float8_e4m3fn",
    "copy 256 blocks",
    "gather 256 blocks",
    "scatter 256 blocks",
]


def test_a_dry_run_measures_every_row_in_the_interpreter(tmp_path: Path) -> None:
    """Each row compares results before it times anything, so a wrong kernel ends the run."""
    output = tmp_path / "rows.jsonl"
    script = str(ROOT / "examples/bench/bench_kernels.py")
    done = subprocess.run(
        [sys.executable, script, "--dry-run", "--budget", "600", "--output", str(output)],
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    machine, *found = map(json.loads, output.read_text().splitlines())
    assert machine["machine"] == "dry run"
    assert [row["row"] for row in found] == ROWS
    assert not any(row["notes"] for row in found), "a peer that is always there was left out"
    compared = {name for row in found for name in row["us"]}
    assert {"ours", "machine", "flat", "sdpa", "flex", "torch"} <= compared
    assert [(r["row"], r["wanted"]) for r in found if r["wanted"]] == [
        (ROWS[0], 0.8),
        (ROWS[1], 5.0),
        (ROWS[2], 0.6),
    ]
    for line in output.read_text().splitlines() + ROWS:
        assert line in done.stdout


def reckoned(monkeypatch: pytest.MonkeyPatch, row: rows.Row) -> dict[str, Any]:
    """Measure a row whose calls take 2 ms (ours), 5 ms (flat) and 1 ms (the machine's own)."""
    times = {"ours": 2e-3, "flat": 5e-3, "machine": 1e-3}
    monkeypatch.setattr(rows, "median_seconds", lambda *args: times)
    sizes = rows.Sizes(torch.device("cpu"), torch.float32, 4, 2, 16, 4, 1, 1, 10, 1000)
    return row.measure(sizes, 1)


def test_shares_are_of_what_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"ours": timing.Column(lambda i: None)}
    # The machine copies 1000 bytes in 1 ms: 2 MB/s read and written.
    got = reckoned(monkeypatch, rows.Row("r", columns, 1, work=3200.0, wanted=0.8))
    assert (got["share"], got["reached"], got["met"]) == (0.8, 0.8, True)
    got = reckoned(monkeypatch, rows.Row("r", columns, 1, work=3100.0, wanted=0.8))
    assert (got["share"], got["met"]) == (0.775, False)
    got = reckoned(monkeypatch, rows.Row("r", columns, 1, work=4e9))
    assert (got["rate"], got["unit"], got["met"]) == (2000.0, "GB/s", None)


def test_products_are_shares_of_a_product_and_factors_are_over_a_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = {"ours": timing.Column(lambda i: None)}
    # The machine multiplies 10 x 10 matrices in 1 ms: 2 MFLOP/s.
    got = reckoned(monkeypatch, rows.Row("r", columns, 1, work=2000.0, gemm=True, wanted=0.6))
    assert (got["share"], got["unit"], got["met"]) == (0.5, "TFLOP/s", False)
    got = reckoned(monkeypatch, rows.Row("r", columns, 1, work=1.0, wanted=2.5, over="flat"))
    assert (got["reached"], got["met"]) == (2.5, True)
    assert "2.5 x flat, met" in rows.as_table([got])


def test_what_is_timed_is_the_mean_over_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 9.0, 10.0, 13.0, 20.0, 23.0, 30.0, 39.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    seen: list[int] = []
    columns = {"ours": timing.Column(seen.append)}
    got = timing.median_seconds(columns, 3, 3, torch.device("cpu"), [])
    assert seen == [0, 1, 2] * 4
    assert got == {"ours": 1.0}, "the median of 3, 3 and 9 seconds over three sets"
