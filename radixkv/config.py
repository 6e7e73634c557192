"""The settings of an engine and of a server: names, units, defaults and what is refused.

Knows nothing of files or flags: ``service/config.py`` reads those, once, into these records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixkv.errors import InvalidConfig

DTYPES = ("auto", "bfloat16", "float32")
DECODERS = ("auto", "native", "generic")
KV_DTYPES = ("auto", "fp8_e4m3", "int8")
CUDA_GRAPHS = ("auto", "off")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Read ``"1GiB"``, ``"512 MB"`` or a number of bytes; raise InvalidConfig naming ``name``."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if m is None or m[2].lower() not in _UNITS:
        raise InvalidConfig(
            f"{name} is {text!r}; wanted a number of bytes or a size such as 512MiB, 1GiB or 2GB"
        )
    return int(float(m[1]) * _UNITS[m[2].lower()])


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is built from. Each field is also a flag and a TOML key."""

    model: str = "smollm2"
    """``smollm2``, a directory, a hub name, or a ``.gguf`` file."""
    kv_memory: int = 2**30
    """Bytes of device memory for KV blocks."""
    block_size: int = 16
    """Tokens a block; small blocks share more finely, large ones cost less bookkeeping."""
    max_batch_tokens: int | None = None
    """Tokens of one forward pass; longer prefills are cut into chunks of at most this. Whoever
    comes waits for the pass that is being computed. None is 256 on a CPU, 512 elsewhere."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_queue: int = 1024
    """Choices (``n`` of each request) that may wait; one more is refused with 429."""
    lookahead_tokens: int = 64
    """Growth of each running sequence that an admission leaves room for; fewer packs the memory
    more tightly and preempts more often."""
    batch_share: float = 0.75
    """Part of the places and of the blocks that batch work may take, 0 to 1; the rest is kept free
    for whoever waits for an answer."""
    swap_memory: int = 256 * 2**20
    """Bytes of host memory for the KV of preempted sequences, where copying it back takes less time
    than computing it again; 0 always computes again."""
    dtype: str = "auto"
    """``auto`` is bfloat16 where the device has bf16 matrix units, float32 elsewhere."""
    max_model_len: int | None = None
    """Tokens of context; None is the model's own, both capped by what the KV memory holds."""
    prefix_cache: bool = True
    """False: blocks are never shared between requests and are freed when a request ends."""
    force_miss: bool = False
    """True: the cache runs in full but every look-up misses (a control for measurements)."""
    pin_budget: float = 0.25
    """Share of the KV blocks that pinned prefixes may hold, all owners together, 0 to 0.9. Never
    so much that a request of the longest context would not fit beside them."""
    device: str = "auto"
    """``auto`` is cuda where there is one, else cpu."""
    decoder: str = "auto"
    """``native`` is the compiled decoder for Llama-like models on the CPU, ``generic`` runs any
    model by transformers, ``auto`` is native where it can be."""
    deterministic: bool = False
    """Promise answers whose bits depend on the request alone: not on hits, chunks, batch, threads.
    Only the compiled decoder keeps that promise, at no cost; without it the engine refuses to be
    built."""
    kv_dtype: str = "auto"
    """What the pool stores: ``auto`` is what the model computes; ``fp8_e4m3`` and ``int8`` are a
    byte a number and a scale a head, so that about twice as many tokens of bfloat16 fit, less
    exactly. Only by the generic decoder."""
    cuda_graphs: str = "auto"
    """``auto`` replays decode steps as CUDA graphs on a GPU, ``off`` launches each kernel anew."""
    num_threads: int | None = None
    """Compute threads on the CPU; None leaves torch's own choice."""
    adapter: tuple[str, ...] = ()
    """LoRA adapters as ``NAME=DIR``, directories of PEFT; asked for as the model ``MODEL:NAME``."""

    chat_template: str | None = None
    """File of the template (Jinja) that writes chats out, in place of the model's own. Part of the
    cache's identity, as that is."""
    tool_call_parser: str = "auto"
    """How the model writes calls of functions; ``auto`` tells by the chat template."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("kv_memory", 1, 2**50),
            ("block_size", 1, 256),
            ("max_num_seqs", 1, 4096),
            ("max_queue", 0, 2**20),
            ("lookahead_tokens", 0, 2**20),
            ("swap_memory", 0, 2**50),
        ):
            _expect_int(name, getattr(self, name), low, high)
        if not 0 <= self.batch_share <= 1:
            raise InvalidConfig(f"batch_share is {self.batch_share!r}; wanted 0 to 1")
        if self.max_batch_tokens is not None:
            _expect_int("max_batch_tokens", self.max_batch_tokens, 1, 2**20)
        if self.max_model_len is not None:
            _expect_int("max_model_len", self.max_model_len, 2, 2**24)
        if self.num_threads is not None:
            _expect_int("num_threads", self.num_threads, 1, 1024)
        if not _is_number(self.pin_budget) or not 0 <= self.pin_budget <= 0.9:
            raise InvalidConfig(f"pin_budget is {self.pin_budget!r}; wanted a share of 0 to 0.9")
        for name, accepted in (
            ("dtype", DTYPES),
            ("decoder", DECODERS),
            ("kv_dtype", KV_DTYPES),
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("cuda_graphs", CUDA_GRAPHS),
        ):
            if getattr(self, name) not in accepted:
                raise InvalidConfig(
                    f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}"
                )
        if self.kv_dtype != "auto" and (self.decoder == "native" or self.deterministic):
            asked = "deterministic is on" if self.deterministic else "decoder is 'native'"
            raise InvalidConfig(
                f"kv_dtype is {self.kv_dtype!r} and {asked}; the compiled decoder stores what it "
                "computes and knows no codes: use the generic decoder, or kv_dtype auto"
            )
        if self.deterministic and self.decoder == "generic":
            raise InvalidConfig(
                "deterministic needs the compiled decoder, and decoder is 'generic', whose sums "
                "change with the batch and with what was cached; use auto or native, or leave out "
                "deterministic"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise InvalidConfig(f"device is {self.device!r}; accepted: auto, cpu, cuda, cuda:INDEX")
        if not self.model:
            raise InvalidConfig(
                "model is empty; wanted smollm2, a directory, a hub name or a .gguf file"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP server is built from, beside the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body: int = 8 * 2**20
    """Bytes of one request body; a larger one is a 413."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""
    log_format: str = "text"
    """``text`` for people, ``json`` for machines."""

    def __post_init__(self) -> None:
        _expect_int("port", self.port, 0, 65535)
        _expect_int("max_body", self.max_body, 1024, 2**31)
        if self.log_format not in ("text", "json"):
            raise InvalidConfig(f"log_format is {self.log_format!r}; accepted: text, json")
        if not 0 <= self.shutdown_timeout <= 3600:
            raise InvalidConfig(
                f"shutdown_timeout is {self.shutdown_timeout!r}; wanted 0 to 3600 seconds"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expect_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidConfig(f"{name} is {value!r}; wanted a whole number from {low} to {high}")
