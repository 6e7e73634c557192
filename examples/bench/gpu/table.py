"""Measures all lines of the GPU table and prints it; knows when to stop, not what is measured."""

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import triton

from examples.bench.gpu.attention import attention_rows
from examples.bench.gpu.moves import latent_rows, move_rows
from examples.bench.gpu.rows import DRY, GPU, as_table


def gpu_table(
    rounds: int, dtype: torch.dtype, budget_s: float, output: Path | None, *, dry_run: bool
) -> None:
    """Print the table, then a line of JSON each for the machine and for every row.

    No line is begun later than ``budget_s`` after the first.

    ``dry_run`` goes through every line on the CPU, in Triton's interpreter, on shapes so small that
    the numbers mean nothing.
    """
    sizes = dataclasses.replace(DRY if dry_run else GPU, dtype=dtype)
    start = time.monotonic()
    where: dict[str, Any] = {
        "machine": "dry run" if dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(dtype),
        "heads": [sizes.q_heads, sizes.kv_heads, sizes.head_dim],
        "block_size": sizes.block_size,
    }
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    results: list[dict[str, Any]] = []
    for row in itertools.chain(attention_rows(sizes), latent_rows(sizes), move_rows(sizes)):
        results.append(row.measure(sizes, rounds))
        if time.monotonic() - start > budget_s:
            print(f"stopped after {budget_s:.0f} s: the lines below are all that were measured")
            break
    print(as_table(results))
    lines = [json.dumps(entry) for entry in (where, *results)]
    print("\n".join(lines))
    if output is not None:
        output.write_text("\n".join(lines) + "\n")
