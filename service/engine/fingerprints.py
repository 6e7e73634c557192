"""Gathers from a model in memory what its cache identity is made of; knows tensors and tokenizers.

The weights are read where they are used, after every cast and in-place change, so the digest speaks
of what the model computes with and not of the file it once came from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from radixkv.identity.fingerprint import DIGEST_BYTES, digest_text, digest_value, model_digest
from radixkv.identity.identity import CacheIdentity, Execution, Namespace
from radixkv.kernels.layout import LAYOUT_VERSION, NUMERICS_VERSION
from radixkv.kernels.native_decoder import DECODER_NUMERICS_VERSION
from radixkv.kernels.quant import LIMIT, SCALES

_CHUNK_BYTES = 64 * 2**20
# Keys of a config that choose what a forward pass returns, or how and where it was saved or loaded.
_NOT_CONTENT = {
    "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "_attn_implementation", "attn_implementation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Everything in a model's identity but the block size and the namespace."""

    architecture: str
    config: str
    weights: str
    tokenizer: str
    template: str | None
    execution: Execution

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, kv_dtype: torch.dtype, windows: tuple[int | None, ...]
    ) -> Fingerprints:
        """Take the fingerprints of a model. Reads all its weights, about 1 GB/s a core."""
        config = model.config.to_dict()
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        return cls(
            architecture=type(model).__name__,
            config=digest_config(config),
            weights=digest_weights(model.state_dict()),
            tokenizer="none" if tokenizer is None else digest_tokenizer(tokenizer),
            template=digest_template(getattr(tokenizer, "chat_template", None)),
            execution=Execution(
                compute_dtype=_name(model.dtype),
                kv_dtype=_name(kv_dtype),
                block_size=1,
                layout_version=LAYOUT_VERSION,
                numerics_version=NUMERICS_VERSION,
                rope_scaling=json.dumps(rope, sort_keys=True) if rope else None,
                # Layers with other windows, or with none, are told apart by the config.
                sliding_window=next((window for window in windows if window is not None), None),
            ),
        )

    def with_weights(self, model: Any) -> Fingerprints:
        """Return the fingerprints after the model's weights have changed in place."""
        return replace(self, weights=digest_weights(model.state_dict()))

    def of_native_decoder(self) -> Fingerprints:
        """Return the fingerprints of the same model run by the compiled decoder: other low bits."""
        execution = replace(
            self.execution, compute_dtype="float32", numerics_version=DECODER_NUMERICS_VERSION
        )
        return replace(self, execution=execution)

    def of_pool(self, kv_dtype: torch.dtype) -> Fingerprints:
        """Return the fingerprints of the same model over a pool that stores ``kv_dtype``."""
        scales = SCALES if kv_dtype in LIMIT else None
        execution = replace(self.execution, kv_dtype=_name(kv_dtype), kv_scales=scales)
        return replace(self, execution=execution)

    def identity(
        self,
        namespace: Namespace,
        block_size: int,
        *,
        deterministic: bool = False,
        adapter: str | None = None,
    ) -> CacheIdentity:
        """Return the identity of what this model computes for a namespace.

        ``deterministic`` KV is shared only with its like, whoever else could have computed it.
        ``adapter`` is the digest of an adapter's weights and scale; None is the model alone.
        """
        return CacheIdentity(
            model=model_digest(self.architecture, self.config, self.weights),
            tokenizer=self.tokenizer,
            template=self.template,
            adapter=adapter,
            execution=replace(self.execution, block_size=block_size, deterministic=deterministic),
            namespace=namespace,
        )


def digest_config(config: Mapping[str, Any]) -> str:
    """Return the digest of what a config says about the computation."""
    kept = {key: value for key, value in config.items() if key not in _NOT_CONTENT}
    return digest_text(json.dumps(kept, sort_keys=True, default=str))


def digest_tokenizer(tokenizer: Any) -> str:
    """Return the digest of a tokenizer as it would be saved: vocabulary, rules, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest_value([digest_text(rules), special])


def digest_template(template: str | Mapping[str, str] | None) -> str | None:
    """Return the digest of a chat template's text, or of several named ones."""
    if template is None:
        return None
    return digest_text(template if isinstance(template, str) else json.dumps(dict(template)))


def digest_weights(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of tensors: their names, dtypes, shapes and bytes, in the names' order.

    Tensors are hashed on all cores; those on a GPU are copied over one piece at a time.
    """
    names = sorted(weights)
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _digest_tensor(weights[name]), names))
    described = [
        [name, _name(weights[name].dtype), list(weights[name].shape), digest]
        for name, digest in zip(names, digests, strict=True)
    ]
    return digest_value(described)


@torch.inference_mode()
def _digest_tensor(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for piece in torch.split(flat, _CHUNK_BYTES):
        digest.update(piece.cpu().numpy().data)
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
