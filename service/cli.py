"""The ``radixkv`` command: reads flags, shows progress, says what is wrong; does no work itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import radixkv
from radixkv.errors import RadixKVError
from radixkv.service.cli_batch import batch
from radixkv.service.cli_options import (
    CACHE,
    DEFAULT_URL,
    LIMITS,
    MODEL,
    SERVER,
    ApiKey,
    BlockSize,
    ChatTemplate,
    Device,
    Dtype,
    KvMemory,
    MaxModelLen,
    Model,
    NumThreads,
    ServerUrl,
    ToolCallParser,
    option,
)
from radixkv.service.cli_serve import run_service
from radixkv.service.cli_size import simulate_app, size
from radixkv.service.cli_talk import fail
from radixkv.service.cli_tenants import tenants_app
from radixkv.service.config import load_settings

app = typer.Typer(
    help="Serve language models with an exact prefix cache, and talk to them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(tenants_app, name="tenants")
app.add_typer(simulate_app, name="simulate")
app.command()(size)
app.command()(batch)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"radixkv {radixkv.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve language models with an exact prefix cache, and talk to them."""


@app.command()
def serve(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    decoder: Annotated[
        str | None,
        option(
            MODEL,
            "auto (default), native (the compiled decoder, for Llama-like models on the CPU) or "
            "generic (transformers, for any model).",
        ),
    ] = None,
    deterministic: Annotated[
        bool | None,
        option(
            MODEL,
            "Promise answers whose bits depend on the request alone, not on what is cached or who "
            "else asks; off by default. Refused where the compiled decoder cannot run.",
            "--deterministic/--no-deterministic",
        ),
    ] = None,
    cuda_graphs: Annotated[
        str | None,
        option(
            MODEL,
            "auto (default) replays decode steps as CUDA graphs on a GPU, off launches each kernel "
            "anew.",
        ),
    ] = None,
    num_threads: NumThreads = None,
    max_model_len: MaxModelLen = None,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = None,
    adapter: Annotated[
        list[str] | None,
        option(
            MODEL,
            "LoRA adapter as NAME=DIR, a directory of PEFT; served as the model MODEL:NAME. May be "
            "given several times; default: none.",
        ),
    ] = None,
    adapter_dir: Annotated[
        str | None,
        option(
            MODEL,
            "Directory beneath which admins may load adapters over HTTP; default: none, and they "
            "may not.",
        ),
    ] = None,
    kv_memory: KvMemory = None,
    kv_dtype: Annotated[
        str | None,
        option(
            CACHE,
            "auto (default) stores what the model computes; fp8_e4m3 or int8 a byte a number, so "
            "that more tokens fit, less exactly. Generic decoder only.",
        ),
    ] = None,
    block_size: BlockSize = None,
    prefix_cache: Annotated[
        bool | None,
        option(
            CACHE,
            "Share KV between requests; on by default.",
            "--prefix-cache/--no-prefix-cache",
        ),
    ] = None,
    force_miss: Annotated[
        bool | None,
        option(
            CACHE,
            "Keep the cache but let every look-up miss, to measure against; off by default.",
            "--force-miss/--no-force-miss",
        ),
    ] = None,
    pin_budget: Annotated[
        float | None,
        option(CACHE, "Share of the KV blocks that pinned prompts may hold; default 0.25."),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        option(LIMITS, "Tokens of one forward pass; default 256 on a CPU, 512 elsewhere."),
    ] = None,
    lookahead_tokens: Annotated[
        int | None,
        option(LIMITS, "Tokens of room that admission keeps for each running choice; default 64."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, option(LIMITS, "Sequences that run at once; default 64.")
    ] = None,
    batch_share: Annotated[
        float | None,
        option(LIMITS, "Part of places and blocks that batch work may take, 0 to 1; default 0.75."),
    ] = None,
    swap_memory: Annotated[
        str | None,
        option(
            LIMITS,
            "Host memory for the KV of preempted requests, such as 1GiB; default 256MiB, 0 is off.",
        ),
    ] = None,
    max_queue: Annotated[
        int | None, option(LIMITS, "Choices that may wait; more get a 429. Default 1024.")
    ] = None,
    max_body: Annotated[
        str | None, option(LIMITS, "Size of a request body; more is a 413. Default 8MiB.")
    ] = None,
    host: Annotated[str | None, option(SERVER, "Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[
        int | None, option(SERVER, "Port to listen on; default 8000, 0 picks a free one.")
    ] = None,
    insecure_remote: Annotated[
        bool | None,
        option(
            SERVER,
            "Allow a host that other machines reach without asking for keys: anyone there may use "
            "this server. Off by default.",
            "--insecure-remote/--no-insecure-remote",
        ),
    ] = None,
    tenants: Annotated[
        str | None,
        option(
            SERVER,
            "File of those who have keys (see `radixkv tenants`); default: none, and no key is "
            "asked for. Read again when it changes, and on SIGHUP.",
        ),
    ] = None,
    public_prompts: Annotated[
        list[str] | None,
        option(
            CACHE,
            "A system prompt whose cached KV all tenants share; may be repeated. Default: none.",
        ),
    ] = None,
    open_metrics: Annotated[
        bool | None,
        option(
            SERVER,
            "Show /metrics without a key, where keys are asked for; off by default.",
            "--open-metrics/--no-open-metrics",
        ),
    ] = None,
    batch_dir: Annotated[
        str | None,
        option(
            SERVER,
            "Directory in which uploaded files and batches are kept, for /v1/files and "
            "/v1/batches; default: none, and these are off.",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        option(SERVER, "Seconds that running requests get when told to stop; default 30."),
    ] = None,
    log_format: Annotated[
        str | None, option(SERVER, "text (default) or json; one line a request, on stderr.")
    ] = None,
    metrics_compat: Annotated[
        str | None,
        option(SERVER, "none (default), or vllm: show metrics under vLLM's names too."),
    ] = None,
    vllm_metric_names: Annotated[
        bool | None,
        option(
            SERVER,
            "The same as --metrics-compat vllm; off by default.",
            "--vllm-metric-names/--no-vllm-metric-names",
        ),
    ] = None,
    inspect_text: Annotated[
        bool | None,
        option(
            SERVER,
            "Show admins the text of all tenants' cached prompts; off by default.",
            "--inspect-text/--no-inspect-text",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        option(
            SERVER,
            "TOML file whose keys are these flags, as in kv_memory = '1GiB'; default: none.",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, for OpenAI's clients.

    Flags win over the --config file, the file over the defaults.
    """
    flags = {name: value for name, value in locals().items() if name != "config" and value != []}
    try:
        settings = load_settings(config, flags)
        code = run_service(settings)
    except RadixKVError as e:
        fail(str(e))
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


@app.command()
def chat(
    url: ServerUrl = DEFAULT_URL,
    system: Annotated[
        str | None, typer.Option(help="What the model is told first.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="0 always gives the likeliest.", show_default=False),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running server in the terminal.

    Shows after each answer how much of the prompt came from the cache. /reset begins anew, /exit
    ends. Lines that are piped in are turns; then only the answers go to stdout.
    """
    from radixkv.service.chat import ChatError, ChatTerminal, Client

    try:
        client = Client(url, max_tokens=max_tokens, temperature=temperature, api_key=api_key)
        ChatTerminal(client, system=system).run(sys.stdin)
    except ChatError as e:
        fail(str(e))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def inspect(
    url: ServerUrl = DEFAULT_URL,
    window: Annotated[str, typer.Option(help="Time of the hit rates, such as 90s or 1h.")] = "5m",
    depth: Annotated[int, typer.Option(min=1, max=100, help="Levels of the tree.")] = 4,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew until Ctrl-C.", show_default=False)
    ] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    api_key: ApiKey = None,
) -> None:
    """Look into a running server's cache: pressure, hit rates, what is shared, pins, queues.

    A tenant's key shows its own part, an admin's the whole. Into a pipe it writes plain text.
    """
    from radixkv.service.cli_inspect import CacheClient, InspectError, show

    try:
        client = CacheClient(url, api_key=api_key)
        show(client, window=window, depth=depth, watch_s=every if watch else None)
    except InspectError as e:
        fail(str(e))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
