"""``radixkv size`` and ``radixkv simulate``: what KV memory a model needs, and how much is wasted.

Reads configs and prints tables; computes nothing itself, loads no weights and no torch.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from radixkv.config import parse_bytes
from radixkv.errors import InvalidConfig, RadixKVError
from radixkv.ledger import Ledger, ledger_of, tail_of, weight_bytes
from radixkv.service.cli_talk import fail, say
from radixkv.simulate import lengths
from radixkv.simulate.fragmentation import (
    OPT_13B_SLOTS,
    PUBLISHED,
    Fragmentation,
    fragmentation,
    plot,
)

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
simulate_app = typer.Typer(no_args_is_help=True, help="Try memory out without a model.")


def size(
    model: Annotated[
        str, typer.Option(help="smollm2, a model's directory or hub name, or a config.json.")
    ] = "smollm2",
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the device, weights included, such as 80GiB; 90 % is used."),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for KV alone, such as 1GiB; default 1GiB.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    block_size: Annotated[int, typer.Option(min=1, max=256, help="Tokens a block.")] = 16,
    kv_dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, fp8_e4m3 or int8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what the KV of a model takes: bytes a token, blocks, sequences that fit, waste.

    Reads the model's config alone; no weights are loaded.
    """
    try:
        if gpu_memory is not None and kv_memory is not None:
            raise InvalidConfig("give --gpu-memory or --kv-memory, not both")
        config = _config(model)
        ledger = ledger_of(config, kv_dtype)
        weights = weight_bytes(config)
        if gpu_memory is not None:
            whole = parse_bytes(gpu_memory, "gpu-memory")
            room = int(0.9 * whole) - (weights or 0)
            if room <= 0:
                raise InvalidConfig(
                    f"gpu-memory is {gpu_memory}: 90 % of it is less than the weights "
                    f"({_bytes(weights or 0)})"
                )
        else:
            room = parse_bytes(kv_memory or "1GiB", "kv-memory")
    except RadixKVError as e:
        fail(str(e))
    facts = _facts(ledger, room, context, block_size)
    if gpu_memory is not None:
        facts["weight_bytes_estimated"] = weights
    if as_json:
        typer.echo(json.dumps({"model": model, **facts}, indent=1))
    else:
        Console().print(_size_table(model, ledger, facts))


@simulate_app.command("fragmentation")
def simulate_fragmentation(
    workload: Annotated[
        str,
        typer.Option(
            help="sharegpt, alpaca, or a file of JSON lines with prompt_tokens and "
            "completion_tokens."
        ),
    ] = "sharegpt",
    capacity: Annotated[int, typer.Option(min=2048, help="Slots, one a token.")] = OPT_13B_SLOTS,
    block_size: Annotated[int, typer.Option(min=1, max=256, help="Tokens a block.")] = 16,
    max_tokens: Annotated[
        int, typer.Option(min=16, help="Longest prompt and answer together.")
    ] = 2048,
    requests: Annotated[int, typer.Option(min=50, help="Requests to draw.")] = 1500,
    shared: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also: paging where so many tokens more begin every prompt, unshared and shared.",
        ),
    ] = 0,
    curve: Annotated[bool, typer.Option(help="Also try other block sizes.")] = True,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw it into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Of the lengths that are drawn.")] = 0,
) -> None:
    """Compare ways to give KV memory out: in one stretch, and in blocks on demand.

    max, pow2 and oracle reserve one stretch from a buddy allocator; paged takes blocks when they
    are needed.
    """
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        fail("--plot needs matplotlib; install it with: pip install matplotlib")
    try:
        if workload in lengths.PRESETS:
            work = lengths.draw(workload, requests, max_tokens=max_tokens, seed=seed)
        else:
            path = Path(workload)
            if not path.exists():
                known = ", ".join(lengths.PRESETS)
                raise InvalidConfig(f"workload is {workload!r}; known: {known}, or a file")
            work = lengths.read(path)
        found = fragmentation(
            work,
            capacity=capacity,
            block_size=block_size,
            block_sizes=BLOCK_SIZES if curve else (),
            shared_tokens=shared,
            max_tokens=max_tokens,
        )
    except (RadixKVError, ValueError) as e:
        fail(str(e))
    if picture is not None:
        plot(found, picture)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    console = Console()
    console.print(_fragmentation_table(found))
    if found.by_block_size:
        console.print(_curve_table(found))


def _config(model: str) -> dict[str, Any]:
    """Find the config of ``model``."""
    path = Path(model)
    if path.suffix != ".json":
        from radixkv.service.engine.resolving import resolve_model

        path = resolve_model(model, progress=say) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig(f"model is {model!r}: there is no {path}") from None
    except (OSError, ValueError) as e:
        raise InvalidConfig(f"{path} cannot be read: {e}") from e
    if not isinstance(found, dict):
        raise InvalidConfig(f"{path} is no JSON object")
    return found


def _facts(ledger: Ledger, room: int, context: int, block_size: int) -> dict[str, Any]:
    blocks = room // ledger.bytes_per_block(block_size)
    tail = tail_of(context, block_size)
    return {
        "attention": ledger.kind,
        "kv_dtype": ledger.dtype,
        "layers": len(ledger.layers),
        "windowed_layers": sum(layer.window is not None for layer in ledger.layers),
        "bytes_per_token": ledger.bytes_per_token,
        "bytes_per_block": ledger.bytes_per_block(block_size),
        "kv_bytes": room,
        "block_size": block_size,
        "blocks": blocks,
        "tokens": blocks * block_size,
        "context": context,
        "sequence_bytes": tail.blocks * ledger.bytes_per_block(block_size),
        "sequence_bytes_if_windows_are_freed": ledger.sequence_bytes(context, block_size),
        "sequence_blocks": tail.blocks,
        "sequences": blocks // tail.blocks,
        "tail_tokens": tail.tail_tokens,
        "wasted_slots": tail.wasted_slots,
    }


def _size_table(model: str, ledger: Ledger, facts: dict[str, Any]) -> Table:
    table = Table(title=model, show_header=False, title_justify="left")
    layers = f"{facts['layers']} layers, {ledger.kind}, {ledger.dtype}"
    if facts["windowed_layers"]:
        layers += f", {facts['windowed_layers']} with a window"
    rows = [
        ("KV", layers),
        ("a token", f"{facts['bytes_per_token']:,} bytes"),
        (f"a block of {facts['block_size']}", _bytes(facts["bytes_per_block"])),
        ("memory for KV", _bytes(facts["kv_bytes"])),
        ("blocks", f"{facts['blocks']:,} ({facts['tokens']:,} tokens)"),
        (
            f"a sequence of {facts['context']:,}",
            f"{facts['sequence_blocks']:,} blocks, {_bytes(facts['sequence_bytes'])}; "
            f"{facts['wasted_slots']} slots of the last one stay empty",
        ),
        ("such sequences that fit", f"{facts['sequences']:,}"),
    ]
    if facts["windowed_layers"]:
        freed = _bytes(facts["sequence_bytes_if_windows_are_freed"])
        rows.insert(-1, ("if blocks behind windows were freed", freed))
    if facts.get("weight_bytes_estimated") is not None:
        rows.insert(3, ("weights (estimated)", _bytes(facts["weight_bytes_estimated"])))
    for row in rows:
        table.add_row(*row)
    return table


def _fragmentation_table(found: Fragmentation) -> Table:
    table = Table(title=f"{found.workload}, {found.capacity:,} slots", title_justify="left")
    table.add_column("% of the slots")
    for name in ("tokens", "reserved", "internal", "external", "sequences", "published"):
        table.add_column(name, justify="right")
    for usage in found.usages:
        shares = (usage.tokens, usage.reserved, usage.internal, usage.external)
        said = PUBLISHED.get(usage.strategy) if found.workload == "sharegpt" else None
        table.add_row(
            usage.strategy,
            *(f"{100 * share:.1f}" for share in shares),
            f"{usage.batch:.1f}",
            "" if said is None else " / ".join("-" if n is None else f"{n:.1f}" for n in said),
        )
    return table


def _curve_table(found: Fragmentation) -> Table:
    table = Table(title="paged, by block size", title_justify="left")
    for name in ("tokens a block", "% that holds tokens", "% empty in last blocks", "sequences"):
        table.add_column(name, justify="right")
    for block_size, usage in found.by_block_size:
        empty = usage.reserved + usage.internal
        table.add_row(
            str(block_size),
            f"{100 * usage.tokens:.1f}",
            f"{100 * empty:.1f}",
            f"{usage.batch:.1f}",
        )
    return table


def _bytes(n: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:,.2f} {unit}"
    return f"{n} bytes"
