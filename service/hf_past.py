"""The cache that a transformers model is given: it begins with a prefix and watches what follows.

Knows which tokens were fed and whether the KV of each can be trusted; nothing of blocks. It sees
each call of the model before the model does, so what is kept is what was computed, whatever the
caller meant, and a call whose positions or mask would make wrong KV is refused.

    columns   0 ..... begin ............. declared ............ length
              | cached | fed, as declared | fed: the answer     |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from radixkv.errors import InvalidRequest
from radixkv.service.hf_facts import CacheFacts, adapters_of
from radixkv.service.hf_layers import KV, KeepingWindow, fill
from radixkv.service.hf_rows import Declared

if TYPE_CHECKING:
    from typing import Self

# Tensors that a forward may be given: what else a model takes could change what its keys mean.
_KNOWN = {"input_ids", "attention_mask", "position_ids", "cache_position", "labels"}
_KNOWN |= {"logits_to_keep"}


class CachedPast(DynamicCache):
    """A snapshot: it owns copies of the prefix's KV, and grows by what is computed in it.

    Closed on leaving its context; what was computed in it is then stored, unless an exception ends
    it. After that, and after its rows were mixed (beams), it goes on as a plain cache. A copy of it
    is a plain cache too.
    """

    def __init__(
        self,
        config: Any,
        facts: CacheFacts,
        declared: Declared,
        begin: int,
        prefix: Sequence[KV | None],
        owner: object,
        on_end: Callable[[CachedPast, bool], None],
    ) -> None:
        """Begin with ``prefix``, the KV of the first ``begin`` columns of the declared rows.

        ``on_end(past, store)`` is called once, when it is closed.
        """
        super().__init__(config=config)
        self.layers: list[Any] = [
            KeepingWindow(x.sliding_window) if type(x) is DynamicSlidingWindowLayer else x
            for x in self.layers
        ]
        if begin:
            for layer, part in zip(self.layers, prefix, strict=True):
                if part is not None:
                    fill(layer, *part, begin)
        self._facts = facts
        self._declared = declared
        self._begin = self._length = begin
        self._sound: torch.Tensor | None = None
        self._grown: list[torch.Tensor] = []
        self.owner = owner
        self._on_end = on_end
        self._spread = 1
        self.watching = True
        """Whether calls of the model are looked at, and what they compute may be stored."""
        self.cached_tokens = declared.tokens_in(0, begin)
        """Tokens of all rows whose KV was taken from the cache; padding is none."""
        self.computed_tokens = 0
        """Tokens whose KV was computed in it."""
        self.stored_tokens = 0
        """Tokens whose KV was new to the cache and stored when it ended."""
        self.not_stored: str | None = None
        """Why what was computed was not stored, or not all of it."""

    # -- its life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(store=kind is None)

    def close(self, *, store: bool = True) -> None:
        """End it, and store what was computed in it if ``store``. Idempotent."""
        if self.watching:
            self.watching = False
            if not store:
                self.not_stored = self.not_stored or "it was closed without storing"
            self._on_end(self, store)
            for layer in self.layers:
                if isinstance(layer, KeepingWindow):
                    layer.kept = None
            self._grown.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        plain = DynamicCache()
        plain.layer_class_to_replicate = None
        plain.layers = copy.deepcopy(self.layers, memo)
        for layer in plain.layers:
            if isinstance(layer, KeepingWindow):
                layer.kept = None
        return plain

    # -- what a model or generate() does with it ---------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if not self.watching:
            return
        removed = self._length - self.get_seq_length()
        self._length -= removed
        if self._length < self._begin:
            self.not_stored = "it was cropped into its prefix"
            self.close(store=False)
            return
        for layer in self.layers:
            if isinstance(layer, KeepingWindow):
                layer.forget(removed)
        excess = sum(x.shape[1] for x in self._grown)
        excess -= max(0, self._length - self._declared.num_columns)
        while excess > 0:
            last = self._grown.pop()
            if last.shape[1] > excess:
                self._grown.append(last[:, : last.shape[1] - excess])
            excess -= last.shape[1]

    def reorder_cache(self, beam_idx: Any) -> None:
        self.close()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.close()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.close()
        super().batch_select_indices(indices)

    def reset(self) -> None:
        self.close()
        super().reset()  # type: ignore[no-untyped-call]

    # -- each call of the model --------------------------------------------------------------------

    def before(self, model: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Look at the keywords of a call; return them as they are to be. Raises InvalidRequest."""
        self._refuse_odd(model, given)
        declared = self._declared
        if len(given["input_ids"]) != len(declared.ids):
            self._spread_to(len(given["input_ids"]))
        if self._begin and self._length == self._begin:
            given = self._without_prefix(given)
        ids = given["input_ids"]
        first, last = self._length, self._length + ids.shape[1]
        if declared.padded and given.get("position_ids") is None:
            given["position_ids"] = declared.positions(first, last).clamp(min=0)
        checks = {
            f"other tokens than it was opened with, from column {first} on": (
                declared.same_ids(ids, first)
            ),
            "position_ids that do not go on where the cache ends": (
                declared.same_positions(given.get("position_ids"), first, last)
            ),
            "an attention_mask that hides more, or less, than the padding it was opened with": (
                declared.same_mask(given.get("attention_mask"), last)
            ),
        }
        for what, right in checks.items():
            if right is None:
                continue
            if first >= declared.num_columns:  # an answer, token by token: asked when it ends
                self._sound = right if self._sound is None else self._sound & right
            elif not bool(right):
                raise InvalidRequest(
                    f"the model is given {what}; wanted the input_ids of open(), or what follows "
                    f"their first {self._begin} columns, with the attention_mask of all"
                )
        if len(ids) == 1 and last > declared.num_columns:
            self._grown.append(ids[:, max(0, declared.num_columns - first) :].clone())
        self.computed_tokens += self._spread * declared.tokens_in(first, last)
        self._length = last
        return given

    def _refuse_odd(self, model: Any, given: dict[str, Any]) -> None:
        odd = [k for k, v in given.items() if isinstance(v, torch.Tensor) and k not in _KNOWN]
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if given.get("input_ids") is None or odd:
            what = ", ".join(odd) or "no input_ids"
            raise InvalidRequest(f"the model is given {what}: its keys are known by tokens alone")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            raise InvalidRequest("attention_mask is not [rows, tokens]: keys would depend on it")
        if positions is not None and positions.dim() != 2:
            raise InvalidRequest("position_ids is not [rows, tokens]")
        if self._declared.padded:
            if mask is None:
                raise InvalidRequest("the handle's rows are padded; the model needs attention_mask")
            if "position_ids" not in self._facts.parameters:
                raise InvalidRequest("this model takes no position_ids, so no padded rows either")
        if model.training:
            raise InvalidRequest("the model is in training mode; wanted model.eval()")
        if torch.is_autocast_enabled(given["input_ids"].device.type):
            raise InvalidRequest("under autocast, keys are not those of the model's own type")
        if reason := adapters_of(model):
            raise InvalidRequest(f"the model has changed: {reason}")

    def _spread_to(self, num_rows: int) -> None:
        """Serve several rows for each row of ours: samples or beams of one prompt."""
        times, rest = divmod(num_rows, len(self._declared.ids))
        if rest or self._length > self._begin:
            raise InvalidRequest(
                f"the model is given {num_rows} rows; the handle has {len(self._declared.ids)}"
            )
        super().batch_repeat_interleave(times)
        self._spread *= times
        self._declared.repeat(times)

    def _without_prefix(self, given: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is in the cache, if the first call brings all tokens."""
        ids, positions = given["input_ids"], given.get("position_ids")
        if not self._declared.is_whole(ids, positions, self._begin):
            return given
        if given.get("labels") is not None or isinstance(given.get("logits_to_keep"), torch.Tensor):
            raise InvalidRequest(
                "labels and a tensor logits_to_keep speak of all tokens, but logits exist only for "
                f"those computed: pass input_ids[:, {self._begin}:] and theirs"
            )
        cut = {
            name: given[name][..., self._begin :]
            for name in ("input_ids", "position_ids", "cache_position")
            if given.get(name) is not None
        }
        return given | cut

    # -- what can be stored of it ------------------------------------------------------------------

    def trusted(self) -> int:
        """Return of how many columns the KV is known and right; see ``not_stored``."""
        lengths = {
            layer.get_seq_length()
            for layer, facts in zip(self.layers, self._facts.layers, strict=True)
            if facts is not None
        }
        if lengths != {self._length}:
            self.not_stored = "it holds more, or less, than the calls of the model that were seen"
            return 0
        prompt = min(self._length, self._declared.num_columns)
        limit = self._facts.limit
        if len(self._declared.ids) > 1 or (limit is not None and self._length > limit):
            return prompt
        if self._sound is not None and not bool(self._sound):
            self.not_stored = "positions or mask changed while it generated"
            return prompt
        return self._length

    def grown(self) -> torch.Tensor | None:
        """Return the ids fed behind the declared ones, of a single row [1, tokens]."""
        return torch.cat([x.cpu() for x in self._grown], 1) if self._grown else None

    def kv(self, row: int, first: int, last: int) -> list[KV | None]:
        """Return the KV computed for columns ``[first, last)`` of a declared row, as the layers
        have it: [heads, tokens, dim]. ``first`` is not before ``begin``.
        """
        row *= self._spread
        found: list[KV | None] = []
        for layer, facts in zip(self.layers, self._facts.layers, strict=True):
            if facts is None:
                found.append(None)
            elif isinstance(layer, KeepingWindow):
                assert layer.kept is not None
                keys, values = (
                    torch.cat([x[row] for x in parts], 1) for parts in zip(*layer.kept, strict=True)
                )
                part = slice(first - self._begin, last - self._begin)
                found.append((keys[:, part], values[:, part]))
            else:
                part = slice(first, last)
                found.append((layer.keys[row][:, part], layer.values[row][:, part]))
        return found
