"""``radixkv batch``: answers a file of requests in this process, and writes a file of results.

Reads flags, shows progress, says what is wrong; the work is done in ``batch``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from radixkv.config import EngineConfig
from radixkv.errors import InvalidConfig, RadixKVError
from radixkv.service.cli_options import (
    CACHE,
    MODEL,
    BlockSize,
    ChatTemplate,
    Device,
    Dtype,
    KvMemory,
    MaxModelLen,
    Model,
    NumThreads,
    ToolCallParser,
    option,
)
from radixkv.service.cli_talk import fail, say
from radixkv.service.config import load_settings

if TYPE_CHECKING:
    from radixkv.service.batch.results import Done
    from radixkv.service.batch.tally import Tally

_OWN = ("source", "output", "errors", "resume", "plan_memory")
"""Flags that are no settings of an engine."""


def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line, as OpenAI has them.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where answers go.")
    ],
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where refused lines go; default: between the answers.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where a run before ended.", show_default=False),
    ] = False,
    plan_memory: Annotated[
        str,
        typer.Option(help="Memory for the plan; what is more lies on disk meanwhile."),
    ] = "256MiB",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    decoder: Annotated[
        str | None, option(MODEL, "auto (default), native or generic; as for serve.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        option(
            MODEL,
            "Promise answers whose bits depend on the request alone; off by default.",
            "--deterministic/--no-deterministic",
        ),
    ] = None,
    num_threads: NumThreads = None,
    max_model_len: MaxModelLen = None,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = None,
    adapter: Annotated[
        list[str] | None,
        option(MODEL, "LoRA adapter as NAME=DIR; may be given several times. Default: none."),
    ] = None,
    kv_memory: KvMemory = None,
    kv_dtype: Annotated[
        str | None, option(CACHE, "auto (default), fp8_e4m3 or int8; as for serve.")
    ] = None,
    block_size: BlockSize = None,
    max_batch_tokens: Annotated[
        int | None, option(CACHE, "Tokens of one step; default 256 on a CPU, 512 elsewhere.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, option(CACHE, "Sequences that run at once; default 64.")
    ] = None,
) -> None:
    """Answer a file of requests (chats, completions, scores), each shared prefix computed once.

    A run that was interrupted, in whatever way, goes on with --resume: each line is answered
    exactly once. Exits with 1 if lines were refused, and 130 after Ctrl-C.
    """
    flags = {name: value for name, value in locals().items() if name not in _OWN and value != []}
    try:
        settings = load_settings(None, {"batch_share": 1.0, **flags})
        done, before = _prepare(source, output, errors, resume=resume)
        code = _answer(settings.engine, source, output, errors, done, before, plan_memory)
    except (RadixKVError, OSError) as e:
        fail(str(e))
    except KeyboardInterrupt:
        fail("stopped; what was answered is kept, --resume goes on", code=130)
    raise typer.Exit(code)


def _prepare(source: Path, output: Path, errors: Path | None, *, resume: bool) -> tuple[Done, int]:
    """Look at the files before the model is loaded; what is done already, and how many lines."""
    from radixkv.service.batch.results import Done, recover

    if not source.is_file():
        raise InvalidConfig(f"{source} is no file")
    done, num = Done(), 0
    for path in (output, errors):
        if path is None:
            continue
        if path.exists() and source.samefile(path):
            raise InvalidConfig(f"{path} is the file of requests; name another for the results")
        if not path.parent.is_dir():
            raise InvalidConfig(f"{path.parent} is no directory")
        if resume:
            num += sum(recover(path, done))
        elif path.exists() and path.stat().st_size:
            raise InvalidConfig(f"{path} exists; go on with --resume, or name another file")
    return done, num


def _answer(
    config: EngineConfig,
    source: Path,
    output: Path,
    errors: Path | None,
    done: Done,
    before: int,
    plan_memory: str,
) -> int:
    """Load, run, sum up; returns the exit code."""
    from radixkv.config import parse_bytes
    from radixkv.service.batch.asks import Asks
    from radixkv.service.batch.progress import show_progress, summary
    from radixkv.service.batch.results import ResultFile
    from radixkv.service.batch.run import BatchRun
    from radixkv.service.http.serving import Serving

    memory_bytes = parse_bytes(plan_memory, "--plan-memory")
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from radixkv.service.engine.preflight import check_settings
    from radixkv.service.engine.resolving import resolve_model

    path = resolve_model(config.model, progress=say)
    check_settings(path, config)
    from radixkv.service.engine.engine import Engine

    if before:
        say(f"going on: {before} lines are done")

    async def main(engine: Any) -> Tally:
        serving = Serving()
        serving.start(engine)
        with contextlib.ExitStack() as files:
            run = BatchRun(
                engine,
                Asks(serving),
                source,
                answers=files.enter_context(ResultFile(output)),
                errors=files.enter_context(ResultFile(errors)) if errors is not None else None,
                done=done,
                memory_bytes=memory_bytes,
            )
            drawing = asyncio.create_task(show_progress(run.tally, console))
            try:
                return await run.run()
            finally:
                drawing.cancel()
                await asyncio.wait([drawing])
                serving.stop()

    with Engine(config=config, path=path, progress=say) as engine:
        engine.warm_up()
        tally = asyncio.run(main(engine))
    for line in summary(tally):
        say(line)
    sys.stderr.flush()
    return 1 if tally.refused else 0
