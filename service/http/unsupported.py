"""The request fields that we refuse, because ignoring them would change the answer.

Each is a real field of OpenAI, Anthropic, vLLM, SGLang or llama.cpp. Its neutral values are
accepted, because clients send them by default; null and empty ones always are. A field in no table
is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from radixkv.errors import InvalidRequest

_COMMON: dict[str, tuple[object, ...]] = {
    # answers of another form (those that we know are in structured.py)
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    # other ways to draw tokens
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "vllm_xargs": (),
    "thinking_token_budget": (),
    "mirostat": (0,),
    "typical_p": (1, 1.0),
    "typ_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "repeat_penalty": (1, 1.0),
    "n_predict": (),
    "samplers": (),
    # other text in or out
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "prompt_embeds": (),
    "input_embeds": (),
    "mm_processor_kwargs": (),
    "lora_path": (),
    "lora_request": (),
    "lora": (),
    # promises that we would not keep
    "store": (False,),
    "background": (False,),
}

CHAT: dict[str, tuple[object, ...]] = _COMMON | {
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "thinking": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "documents": (),
    "chat_template": (),
    "add_special_tokens": (False,),
    "echo": (False,),
    "suffix": (),
    "input_ids": (),
    "image_data": (),
}

COMPLETION: dict[str, tuple[object, ...]] = _COMMON | {
    "suffix": (),
    "tools": (),
    "input_prefix": (),
    "input_suffix": (),
    "input_extra": (),
}

ANTHROPIC: dict[str, tuple[object, ...]] = {
    "thinking": (),
    "mcp_servers": (),
    "container": (),
    "context_management": (),
    "output_format": (),
    "output_config": (),
    "fallbacks": (),
}

STRUCTURED: dict[str, tuple[object, ...]] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}

MESSAGE: dict[str, tuple[object, ...]] = {
    "function_call": (),
    "audio": (),
    "prefix": (False,),
}


def refuse_unsupported(
    extra: Mapping[str, Any] | None, table: Mapping[str, tuple[object, ...]], at: str = ""
) -> None:
    """Raise Unsupported for the first field that ``table`` lists, unless its value is neutral."""
    for name, value in (extra or {}).items():
        if name not in table or value is None or value in ("", [], {}):
            continue
        # Compared by type too, for True == 1 in Python and not on the wire.
        if any(type(value) is type(neutral) and value == neutral for neutral in table[name]):
            continue
        raise Unsupported(f"{at}{name}")


def refuse_kind(value: object, known: Collection[str], at: str, why: str) -> None:
    """Raise Unsupported for an object whose ``type`` is a word that is not ``known``."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known:
        raise Unsupported(f"{at}.type", f"{at} is of type {kind[:40]!r}; {why}")


class Unsupported(InvalidRequest):
    """The request asks for something that this server does not do."""

    code = "unsupported_parameter"

    def __init__(self, param: str, why: str = "") -> None:
        super().__init__(
            why
            or f"{param} is not supported by this server, and ignoring it would change the "
            "answer; leave it out",
            param=param,
        )
