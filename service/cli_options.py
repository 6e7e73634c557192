"""The flags that several commands have, each said once; knows no settings' meaning."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL, CACHE, LIMITS, SERVER = "Model", "Cache", "Limits", "Server"
DEFAULT_URL = "http://127.0.0.1:8000"


def option(panel: str, text: str, *names: str) -> typer.models.OptionInfo:
    """Return a flag of a panel of the help; its default is told by ``text``."""
    found: typer.models.OptionInfo = typer.Option(
        *names, help=text, rich_help_panel=panel, show_default=False
    )
    return found


# Of commands that have an engine.
Model = Annotated[
    str | None, option(MODEL, "smollm2 (default), a directory, a hub name, or a .gguf file.")
]
Dtype = Annotated[str | None, option(MODEL, "auto (default), bfloat16 or float32.")]
Device = Annotated[str | None, option(MODEL, "auto (default), cpu, cuda or cuda:N.")]
NumThreads = Annotated[
    int | None, option(MODEL, "Compute threads on the CPU; default: torch's choice.")
]
MaxModelLen = Annotated[int | None, option(MODEL, "Tokens of context; default: the model's own.")]
KvMemory = Annotated[
    str | None, option(CACHE, "Memory for KV blocks, such as 512MiB; default 1GiB.")
]
BlockSize = Annotated[int | None, option(CACHE, "Tokens a block; default 16.")]
ChatTemplate = Annotated[
    str | None,
    option(MODEL, "File of the Jinja template that writes chats out; default: the model's own."),
]
ToolCallParser = Annotated[
    str | None,
    option(
        MODEL,
        "How the model writes calls of functions: auto (default) tells by the chat template; "
        "hermes (Qwen too), llama3_json or mistral.",
    ),
]

# Of commands that ask a running server.
ServerUrl = Annotated[str, typer.Option(help="Where the server is.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="RADIXKV_API_KEY", help="For a server that asks for one.", show_default=False
    ),
]
