"""Run a whole engine on a GPU: compare its ids with transformers', then time its decode steps.

    python examples/bench/bench_steps.py [--layers N] [--output FILE] [--budget S]

First a small model in float32, whose every id must be what `transformers.generate` gives, with CUDA
graphs and without, cold and over the cache. Then decode steps of a model in the shape of an 8B
Llama, bfloat16, random weights: milliseconds a step with each kernel launched anew and as CUDA
graphs, and the share of equal draws. Prints a line of JSON for each row, and fails if ids differ.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="of the large model; default 32")
    parser.add_argument("--budget", type=float, default=60, metavar="S", help="begin no row after")
    parser.add_argument("--output", type=Path, help="also write the lines here")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from examples.bench.gpu.engine import DRY, EXACT, LLAMA_8B, build, compare_ids, time_steps
    from radixkv.service.engine.cuda_graphs import cuda_graphs

    start = time.monotonic()
    device = torch.device("cpu" if args.dry_run else "cuda")
    small = DRY if args.dry_run else EXACT
    large = DRY if args.dry_run else dataclasses.replace(LLAMA_8B, layers=args.layers)
    lines = [
        {
            "machine": "dry run" if args.dry_run else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "layers": large.layers,
            "threads": os.cpu_count(),
        }
    ]
    print(json.dumps(lines[0]), flush=True)
    loaded = build(small, torch.float32, device)
    rows = compare_ids(small, loaded)
    failed = False
    for row in rows:
        lines.append(row)
        print(json.dumps(row), flush=True)
        failed |= not row["met"]
    del loaded
    if not args.dry_run:
        torch.cuda.empty_cache()
    loaded = build(large, torch.float32 if args.dry_run else torch.bfloat16, device)
    print(f"built after {time.monotonic() - start:.0f} s", flush=True)
    with torch.inference_mode():
        for row in time_steps(large, loaded, cuda_graphs(loaded.device, "auto")):
            lines.append(row)
            print(json.dumps(row), flush=True)
            if time.monotonic() - start > args.budget:
                print(f"stopped after {args.budget:.0f} s")
                break
    if args.output is not None:
        args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
