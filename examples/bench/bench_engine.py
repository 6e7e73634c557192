"""Compare radixkv with other engines on this machine: one model, greedy, fixed lengths, one run.

    python examples/bench/bench_engine.py [--quick] [--threads N] [--output FILE.json]
                                          [--only a,c,w] [--engines radixkv,openvino] [--resume]

Each engine runs in a process of its own, one after the other. Prints the figures beside what the
machine allows, the targets, and with --quick the grid of tree attention. ``--output`` is written
after every row; ``--resume`` skips what it already holds, ``--only`` measures those rows again.
The other engines come from peers.py; one that is not installed is left out. What each row means is
in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from examples.bench import peers
from examples.bench.engine import floors, report, rows
from examples.bench.engine.process import ROOT, Engine, Failed, TooSlow
from radixkv.service.engine.resolving import resolve_model

console = Console(stderr=True)
KV_BYTES = 2 << 30
START_LIMIT_S = 900.0
# Seconds after which a row is given up, per request that an engine is asked.
LIMITS_S = {"a": 120.0, "bc": 120.0, "d": 240.0, "w": 240.0, "e": 240.0, "f": 900.0, "t": 240.0}
QUICK_ROWS = {"radixkv": ("a", "bc", "d", "w", "s"), "peers": ("a", "bc", "w")}
# What no peer's design can answer in minutes: left out rather than waited for.
HOPELESS = {
    ("llamacpp", "f"): "no sharing",
    ("openvino", "f"): "no sharing",
    ("transformers", "f"): "no sharing",
    ("transformers", "t"): "kept by hand",
}
QUICK_S = 225.0
QUICK_START_S = {"vllm": 180.0}
"""What an engine must have left of a quick run to be started at all; 30 s for the others."""


class Run:
    """The results so far, kept in a file between calls."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.path: Path | None = args.output
        keep = self.path is not None and self.path.exists() and (args.resume or args.only)
        self.data: dict[str, Any] = json.loads(self.path.read_text()) if keep else {}
        self.data.setdefault("engines", {})
        self.data.setdefault("floors", [])
        self.data |= {
            "machine": f"{cpu_name()}, {os.cpu_count()} cores",
            "threads": args.threads,
            "quick": args.quick,
            "scale": args.scale,
        }
        self.began = time.perf_counter()

    @property
    def left_s(self) -> float:
        """Seconds that a quick run may still take."""
        limit = QUICK_S if self.args.quick else float("inf")
        return limit - (time.perf_counter() - self.began)

    def put(self, engine: str, measurement: str, figures: dict[str, Any]) -> None:
        self.data["engines"].setdefault(engine, {})[measurement] = figures
        self.save()

    def save(self) -> None:
        if self.path is not None:
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(self.data, indent=1) + "\n")
            fresh.replace(self.path)

    def todo(self, engine: str) -> list[str]:
        """The measurements that this engine still has to make."""
        found = rows.wanted(self.args.only)
        if self.args.quick:
            quick = QUICK_ROWS["radixkv" if engine == "radixkv" else "peers"]
            found = [name for name in found if name in quick]
        if engine != "radixkv":
            found = [name for name in found if name != "s"]
        have = self.data["engines"].get(engine, {})
        again = self.args.only is not None and not self.args.resume
        return [name for name in found if again or name not in have or "note" in have[name]]


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def say(text: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False)


def measure_floors(run: Run) -> None:
    """Measure the machine once more: before each engine, so that a noisy spell shows."""
    command = [sys.executable, "-m", "examples.bench.engine.floors", str(run.args.threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    run.data["floors"].append(found)
    say(f"machine: {found['read_gb_s']:.1f} GB/s read, {found['gemm_gflop_s']:.0f} GFLOP/s")


def machine(run: Run) -> floors.Machine:
    """The best that was seen: a floor is what the machine can do when nothing disturbs it."""
    best = {key: max(found[key] for found in run.data["floors"]) for key in run.data["floors"][0]}
    return floors.Machine(**best)


class Session:
    """One engine, started for as many rows as it survives."""

    def __init__(self, name: str, run: Run, log: Path) -> None:
        self.name, self.run, self.log = name, run, log
        self.engine: Engine | None = None
        self.limit_s = 0.0

    def start(self) -> None:
        peer = peers.PEERS.get(self.name)
        args = self.run.args
        model = str(resolve_model("smollm2"))
        fields: dict[str, Any] = {
            "model": "smollm2" if peer is None else model,
            "threads": args.threads,
            "kv_bytes": KV_BYTES,
            "max_model_len": 8192,
            "dtype": args.dtype,
            "precision": args.precision.get(self.name),
        }
        env = {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
        if self.name == "openvino":
            fields["gguf_f16"] = str(peers.weights("f16"))
        if self.name == "llamacpp":
            kind = fields["precision"] or "bf16"
            fields |= {f"gguf_{kind}": str(peers.weights(kind)), "slots": 32, "slot_tokens": 36864}
        if peer is not None and (first := peers.preload(peer)):
            env["LD_PRELOAD"] = first
        say(f"[bold]{self.name}[/bold]: starting")
        python = sys.executable if peer is None else peer.python
        self.engine = Engine(python, self.name, self.log, env)
        about = self.engine.ask("start", START_LIMIT_S, **fields)
        prompt = rows.Asker(self.generate, rows.Size(), self.run.args.seed).prompt(32, 0)
        self.limit_s = START_LIMIT_S
        self.generate([prompt], 1)
        first_s = time.perf_counter() - self.engine.began
        say(
            f"{self.name} {about['version']} ({about['precision']}): first token in {first_s:.1f} s"
        )
        self.generate([prompt + prompt], 4)  # the rest of what only a first call costs
        self.run.put(self.name, "about", about)
        self.run.put(self.name, "start", {"first_token_s": first_s})

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        assert self.engine is not None
        done = self.engine.ask("generate", self.limit_s, prompts=prompts, tokens=tokens)
        counts = {len(ids) for ids in done["ids"]}
        # llama.cpp checks its count itself: what it streams leaves tokens out.
        if self.name != "llamacpp" and counts != {tokens}:
            raise Failed(f"asked for {tokens} tokens, got {sorted(counts)}")
        return done

    def measure(self, name: str) -> dict[str, Any]:
        args = self.run.args
        self.limit_s = min(LIMITS_S.get(name, 240.0), self.run.left_s)
        size = rows.Size(1 if args.quick and name in "dwf" else 3, 40.0, args.scale)
        ask = rows.Asker(self.generate, size, args.seed, lambda text: say(f"  {name} {text}"))
        if name == "s":
            prompts = [ask.prompt(size.of(128), 10, n) for n in range(32)]
            assert self.engine is not None
            found = self.engine.ask("step_share", 240.0, prompts=prompts, tokens=size.of(64))
            return rows.step_share(**found)
        return rows.MEASUREMENTS[name](ask)

    def end(self) -> None:
        if self.engine is not None:
            self.engine.end()
            self.engine = None


def run_engine(name: str, run: Run, log: Path) -> None:
    """Measure every row of one engine; a row that fails leaves a note and the rest goes on."""
    todo = run.todo(name)
    session = Session(name, run, log)
    try:
        for row in todo:
            if (name, row) in HOPELESS:
                run.put(name, row, {"note": HOPELESS[name, row]})
                continue
            if run.left_s <= (QUICK_START_S.get(name, 30.0) if session.engine is None else 5.0):
                run.put(name, row, {"note": "no time left"})
                continue
            if session.engine is None:
                try:
                    session.start()
                except (Failed, TooSlow) as error:
                    say(f"[red]{name} does not start: {error}[/red]")
                    run.put(name, row, {"note": "did not start"})
                    return
            try:
                run.put(name, row, session.measure(row))
            except TooSlow as error:
                run.put(name, row, {"note": str(error)})
                session.end()
            except (Failed, ValueError) as error:
                say(f"[red]{name}, row {row}: {error}[/red]")
                run.put(name, row, {"note": "failed"})
                session.end()
        if session.engine is not None:
            run.put(name, "memory", {"gb": session.engine.memory_bytes() / 1e9})
            if same := answers(session):
                run.put(name, "answer", {"ids": same})
    finally:
        session.end()


def answers(session: Session) -> list[int] | None:
    """The ids an engine gives to a prompt of plain text: that all compute the same model."""
    from tokenizers import Tokenizer

    model = resolve_model("smollm2")
    question = "What is the capital of France? Tell me about its river."
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    try:
        return list(session.generate([ids], 16)["ids"][0])
    except (Failed, TooSlow):
        return None


def print_report(run: Run) -> None:
    out = Console(width=None if sys.stdout.isatty() else 150)
    found = machine(run)
    spread = [entry["gemm_gflop_s"] for entry in run.data["floors"]]
    title = (
        f"SmolLM2-135M, {run.data['machine']}, {run.args.threads} threads; the machine reads "
        f"{found.read_gb_s:.1f} GB/s and multiplies {found.gemm_gflop_s:.0f} GFLOP/s "
        f"({min(spread):.0f} at its worst)"
    )
    engines = run.data["engines"]
    scaled = run.args.scale != 1
    out.print(report.figures_table(engines, {} if scaled else floors.bounds(found), title))
    for name in report.ENGINES:
        if about := engines.get(name, {}).get("about"):
            ids = engines[name].get("answer", {}).get("ids")
            ours = engines.get("radixkv", {}).get("answer", {}).get("ids")
            same = ""
            if ids and ours and name != "radixkv":
                count = next(
                    (i for i, (x, y) in enumerate(zip(ids, ours, strict=False)) if x != y), 16
                )
                same = f"; first {count} of 16 greedy tokens as radixkv's"
            out.print(f"{name} {about['version']}: {about['precision']}{same}", highlight=False)
    out.print(report.targets_table(engines))


def tree_grid(run: Run) -> None:
    """The grid of tree attention against flat, from the bench beside this one."""
    script = Path(__file__).with_name("bench_tree.py")
    if not script.exists() or run.args.only is not None:
        return
    limit_s = max(30.0, min(90.0, run.left_s)) if run.args.quick else 600.0
    command = [sys.executable, str(script), "--threads", str(run.args.threads)]
    command += ["--quick"] if run.args.quick else []
    say("tree attention")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        print(done.stdout if done.returncode == 0 else f"bench_tree.py failed:\n{done.stderr}")
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
        print(f"{text}\nbench_tree.py: no end after {limit_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 4 minutes, fewer rows")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--dtype", default="auto", help="radixkv's: auto, float32 or bfloat16")
    parser.add_argument("--output", type=Path, help="JSON, written after every row")
    parser.add_argument("--only", help="rows, such as a,c,w")
    parser.add_argument("--engines", default=",".join(report.ENGINES))
    parser.add_argument("--resume", action="store_true", help="keep what FILE.json already has")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try things out")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts' random tokens")
    parser.add_argument(
        "--precision",
        action="append",
        default=[],
        metavar="PEER=KIND",
        help="float32 or bfloat16 (vllm, transformers), f32 (openvino), bf16 or f16 (llamacpp)",
    )
    args = parser.parse_args()
    args.precision = dict(item.split("=", 1) for item in args.precision)
    try:
        rows.wanted(args.only)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # engines are ended on the way out
    run = Run(args)
    log = Path(tempfile.gettempdir()) / f"bench-engine-{os.getpid()}.log"
    say(f"what the engines print goes to {log}")
    for name in args.engines.split(","):
        peer = peers.PEERS.get(name)
        if peer is None and name != "radixkv":
            parser.error(f"no engine {name!r}; there are {', '.join(report.ENGINES)}")
        if peer is not None and peer.installed() is None:
            say(f"{name} is not installed: python examples/bench/peers.py setup {name}")
            continue
        if not run.todo(name):
            continue
        if run.left_s > 0:
            measure_floors(run)
        run_engine(name, run, log)
        if name == "radixkv" and args.quick:
            tree_grid(run)
    if not run.data["floors"]:
        measure_floors(run)
    if not args.quick and "radixkv" in args.engines.split(","):
        tree_grid(run)
    run.save()
    print_report(run)


if __name__ == "__main__":
    main()
