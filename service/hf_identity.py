"""Who may share KV among the callers of one transformers model that lives on in their hands.

Knows the model's fingerprints and when they have to be taken anew; nothing of tokens or KV.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from radixkv.errors import InvalidRequest
from radixkv.identity.identity import CacheIdentity, Namespace
from radixkv.service.engine.fingerprints import Fingerprints
from radixkv.service.hf_facts import CacheFacts, adapters_of

TENANT = "local"

Stamp = tuple[object, ...]


class ModelIdentity:
    """The identity of what a model computes now; its weights are read when they have changed.

    A change is noticed by where the weights lie and by torch's count of in-place changes, which
    misses those made through ``.data``: after such, ``forget()``.
    """

    def __init__(self, model: Any, tokenizer: Any, facts: CacheFacts, block_size: int) -> None:
        """Read all weights, at about 1 GB/s a core."""
        self._model, self._tokenizer, self._facts = model, tokenizer, facts
        self._block_size = block_size
        self._made_for = (model.dtype, model.device)
        self._taken_at, self._fingerprints = self.stamp(), self._take()

    def stamp(self) -> Stamp:
        """Return a value that changes with what the model computes. O(parameters), not bytes."""
        parameters = self._model.parameters()
        weights = tuple(x for p in parameters for x in (p.data_ptr(), _version(p)))
        return (self._attention(), *weights)

    def of(self, salt: str | None) -> tuple[CacheIdentity, Stamp]:
        """Return the identity for a namespace, and the stamp for which it holds.

        Raises InvalidRequest if the model has become one that the cache was not made for.
        """
        if reason := adapters_of(self._model):
            raise InvalidRequest(f"the model has changed: {reason}")
        stamp = self.stamp()
        if stamp != self._taken_at:
            if (self._model.dtype, self._model.device) != self._made_for:
                raise InvalidRequest(
                    f"the model is {self._model.dtype} on {self._model.device} now; this cache was "
                    f"made for {self._made_for[0]} on {self._made_for[1]}"
                )
            self._taken_at, self._fingerprints = stamp, self._take()
        return self._fingerprints.identity(Namespace(TENANT, salt), self._block_size), stamp

    def forget(self) -> None:
        """Read the weights anew when next asked."""
        self._taken_at = ()

    def _take(self) -> Fingerprints:
        kept = [layer for layer in self._facts.layers if layer is not None]
        windows = tuple(layer.window for layer in kept)
        found = Fingerprints.of(self._model, self._tokenizer, kept[0].dtype, windows)
        # Which attention runs can be set while the model lives, and gives other low bits.
        dtype = f"{found.execution.compute_dtype} {self._attention()}"
        return replace(found, execution=replace(found.execution, compute_dtype=dtype))

    def _attention(self) -> str | None:
        return getattr(self._model.config, "_attn_implementation", None)


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version
