"""Loads a model to serve from a name: its weights, its tokenizer and the few facts of it in use.

Knows transformers and where models lie; knows nothing of blocks, requests or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from radixkv.config import DECODERS, DTYPES
from radixkv.errors import InvalidConfig, NotFound, UnsupportedModel
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.kernels.native_decoder import NativeDecoder
from radixkv.service.engine.attention import (
    IMPLEMENTATION,
    attention_of,
    use_paged_attention,
)
from radixkv.service.engine.fingerprints import Fingerprints
from radixkv.service.engine.fusing import join_norms, merge_projections, use_kernels
from radixkv.service.engine.models.llama import build_decoder, reason_against
from radixkv.service.engine.probe import refuse_if_inexact
from radixkv.service.engine.proofs import is_proven, note_proven
from radixkv.service.engine.resolving import resolve_model
from radixkv.service.engine.support import inspect_model

__all__ = ["LoadedModel", "load_model", "resolve_model"]

_MAX_REMEMBERED_IDENTITIES = 1024


@dataclass(eq=False)
class LoadedModel:
    """A causal language model and its tokenizer, on one device, in one dtype.

    The model's attention is switched to the paged one, so it answers only through a ModelRunner;
    ``attention.own_attention`` gives it back for a while.
    """

    model: Any
    tokenizer: Any
    name: str
    path: Path | None
    """Where it was loaded from; None when it was built in memory."""
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    max_model_len: int
    """Tokens of context that the model was made for."""
    vocab_size: int
    """Logits a row, at least the tokenizer's size; every sampled id is below it."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    windows: tuple[int | None, ...]
    """The sliding window of each layer."""
    fingerprints: Fingerprints
    decoder: NativeDecoder | None = None
    """The compiled decoder that runs this model in transformers' place; None: transformers does."""
    generic_reason: str | None = None
    """Why there is no compiled decoder; None where there is one."""
    _identities: dict[tuple[object, ...], CacheIdentity] = field(default_factory=dict)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        path: Path | None = None,
        decoder: str = "auto",
        remember: bool = False,
    ) -> LoadedModel:
        """Take a model that is already in memory; it stays on its device and in its dtype.

        Its attention is switched in place. ``decoder`` as in EngineConfig. ``remember``: a model
        that was proven exact on this machine is not proven again. Raises UnsupportedModel,
        with the reason, for a model that cannot be served exactly, or not by that decoder.
        """
        reason = _reason_against(model, decoder)
        facts = inspect_model(model.eval())
        if len(tokenizer) > facts.vocab_size:
            raise UnsupportedModel(
                f"the tokenizer of {name} has {len(tokenizer)} tokens and the model knows "
                f"{facts.vocab_size}: they do not belong together"
            )
        loaded = cls(
            model=model,
            tokenizer=tokenizer,
            name=name,
            path=path,
            dtype=model.dtype,
            device=next(model.parameters()).device,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            num_layers=facts.num_layers,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            kv_dtype=facts.kv_dtype,
            windows=facts.windows,
            fingerprints=Fingerprints.of(model, tokenizer, facts.kv_dtype, facts.windows),
            generic_reason=reason,
        )
        if reason is None:
            loaded.decoder = build_decoder(model, facts.windows, facts.max_model_len)
            loaded.fingerprints = loaded.fingerprints.of_native_decoder()
        if not (remember and is_proven(loaded)):
            with attention_of(model, IMPLEMENTATION):  # a model that is refused stays as it was
                refuse_if_inexact(loaded)
            if remember:
                note_proven(loaded)
        use_paged_attention(model)
        return loaded

    def identity(
        self,
        namespace: Namespace,
        block_size: int,
        *,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        adapter: str | None = None,
    ) -> CacheIdentity:
        """Return what KV of this model may be shared under; the same object for the same question.

        ``kv_dtype`` is what the pool stores, None: what the model computes; ``adapter`` the digest
        of one that is applied. Any thread may ask.
        """
        fingerprints = self.fingerprints
        if kv_dtype is not None:
            fingerprints = fingerprints.of_pool(kv_dtype)
        key = (namespace, block_size, deterministic, kv_dtype, adapter, fingerprints.weights)
        found = self._identities.get(key)
        if found is None:
            if len(self._identities) >= _MAX_REMEMBERED_IDENTITIES:
                self._identities.clear()
            found = self._identities[key] = fingerprints.identity(
                namespace, block_size, deterministic=deterministic, adapter=adapter
            )
        return found

    def weights_changed(self) -> None:
        """Take the weights' fingerprint anew, after they were written in place (ADMIN-1).

        The identity follows their contents, so going back to old weights finds old blocks again.
        """
        self.fingerprints = self.fingerprints.with_weights(self.model)
        if self.decoder is not None:
            self.decoder = build_decoder(self.model, self.windows, self.max_model_len)


def load_model(
    path: Path | str,
    *,
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    decoder: str = "auto",
) -> LoadedModel:
    """Load a directory of safetensors, config and tokenizer, as ``resolve_model`` returns it.

    Runs no code from the directory and unpickles nothing. Raises InvalidConfig, NotFound or
    UnsupportedModel naming the path and what is wrong with it.
    """
    path = Path(path)
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    tokenizer = _load_tokenizer(path)
    model = _load_weights(path, precision, where)
    if _reason_against(model, decoder) is not None:
        merge_projections(model)
        use_kernels(model)
        join_norms(model)
    return LoadedModel.from_model(
        model, tokenizer, name=name, path=path, decoder=decoder, remember=True
    )


def _reason_against(model: Any, decoder: str) -> str | None:
    """Say why the compiled decoder will not run ``model``; None if it will."""
    if decoder not in DECODERS:
        raise InvalidConfig(f"decoder is {decoder!r}; accepted: {', '.join(DECODERS)}")
    if decoder == "generic":
        return "the generic decoder was asked for"
    reason = reason_against(model)
    if reason is not None and decoder == "native":
        raise UnsupportedModel(f"the compiled decoder cannot run this model: {reason}")
    return reason


def choose_device(device: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` into a device that is there."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise InvalidConfig(f"device is {device!r}; accepted: auto, cpu, cuda, cuda:INDEX")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidConfig(f"device is {device!r}, but torch {torch.__version__} sees no CUDA GPU")
    if int(index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(
            f"device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", int(index or 0))


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Turn ``auto``, ``bfloat16`` or ``float32`` into a torch dtype.

    ``auto`` is bfloat16 where matrices multiply in it by hardware; elsewhere float32 is faster.
    """
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
    if dtype != "auto":
        return torch.bfloat16 if dtype == "bfloat16" else torch.float32
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    else:
        fast = _cpu_multiplies_bf16()
    return torch.bfloat16 if fast else torch.float32


def _cpu_multiplies_bf16() -> bool:
    if hasattr(torch.cpu, "get_capabilities"):
        units = torch.cpu.get_capabilities()
        return any(units.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    if not any((path / name).is_file() for name in known):
        raise NotFound(f"{path} has no tokenizer (looked for {', '.join(known)})")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # tokenizers raises bare Exception on a damaged file
        raise InvalidConfig(f"the tokenizer in {path} cannot be loaded: {e}") from e


def _load_weights(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as e:
        raise UnsupportedModel(f"the config in {path} is of no model that we know: {e}") from e
    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"{path} holds a model of type {config.model_type!r}, which is no causal language model"
        )
    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            device_map={"": device} if device.type == "cuda" else None,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, ImportError) as e:
        raise InvalidConfig(f"the weights in {path} cannot be loaded: {e}") from e
    # transformers would go on with random numbers in the place of what is missing.
    wrong = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if wrong:
        raise InvalidConfig(
            f"{path} lacks {len(wrong)} weights of {type(model).__name__}, or has them in another "
            f"shape, such as {', '.join(wrong[:3])}"
        )
    return model


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return frozenset(found)
