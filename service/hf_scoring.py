"""Log-probabilities of many suffixes behind one prefix, whose KV they share.

Knows a model, a handle that begins with the prefix, and batches; nothing of what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from radixkv.service.hf_facts import CacheFacts
from radixkv.service.hf_layers import KV, fill
from radixkv.service.hf_past import CachedPast

_BATCH_BYTES = 256 * 2**20
_MOST_ROWS = 64


@dataclass(slots=True)
class Scores:
    """The scores, and what they cost. Tokens that lie in padding count nowhere."""

    of_tokens: list[list[float]]
    """By suffix and token, in the order they were asked for."""
    prompt_tokens: int
    """Tokens that had to be run if each were scored alone: all but the last of each."""
    shared_tokens: int
    """Those of them that were run once, for the first suffix, and served the others too."""
    computed_tokens: int
    """Tokens of suffixes that were run."""


@torch.no_grad()
def score(
    model: Any,
    facts: CacheFacts,
    past: CachedPast,
    prefix: torch.Tensor,
    suffixes: list[torch.Tensor],
    batch_size: int | None,
) -> Scores:
    """Score each of ``suffixes`` ([tokens] int64) behind ``prefix`` [1, tokens] on its own.

    Rows are padded on the right, where causal attention lets no token see the padding.
    """
    length, device = prefix.shape[1], model.device
    only_last = {"logits_to_keep": 1} if "logits_to_keep" in facts.parameters else {}
    ids = prefix[:, past.cached_tokens :].to(device)
    first = model(input_ids=ids, **{facts.keyword: past}, **only_last).logits[:, -1:].float()
    first = torch.log_softmax(first[0, 0], -1)
    shared: list[KV | None] = [
        None if kept is None else (layer.keys, layer.values)
        for layer, kept in zip(past.layers, facts.layers, strict=True)
    ]
    found: list[list[float]] = [[] for _ in suffixes]
    computed = 0
    for batch in _batches(suffixes, length * facts.token_bytes, facts.token_bytes, batch_size):
        longest = max(len(suffixes[i]) for i in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens[row, : len(suffixes[i])] = suffixes[i]
        tokens = tokens.to(device)
        picked = first[tokens[:, :1]]
        if longest > 1:
            cache = _begin(model.config, shared, len(batch), length)
            logits = model(input_ids=tokens[:, :-1], **{facts.keyword: cache}).logits.float()
            wanted = tokens[:, 1:].to(logits.device).unsqueeze(-1)
            rest = logits.gather(-1, wanted).squeeze(-1) - logits.logsumexp(-1)
            picked = torch.cat([picked, rest.to(device)], 1)
        for i, row in zip(batch, picked.tolist(), strict=True):
            found[i] = row[: len(suffixes[i])]
            computed += len(suffixes[i]) - 1
    prompts = length * len(suffixes) + computed
    return Scores(found, prompts, length * max(0, len(suffixes) - 1), computed)


def _batches(
    suffixes: list[torch.Tensor], prefix_bytes: int, token_bytes: int, batch_size: int | None
) -> Iterator[list[int]]:
    """Yield the indices of suffixes that are not empty, those of like length together."""
    order = sorted((i for i, x in enumerate(suffixes) if len(x)), key=lambda i: -len(suffixes[i]))
    at = 0
    while at < len(order):
        row_bytes = prefix_bytes + len(suffixes[order[at]]) * token_bytes
        rows = batch_size or min(_MOST_ROWS, max(1, _BATCH_BYTES // row_bytes))
        yield order[at : at + rows]
        at += rows


def _begin(config: Any, shared: list[KV | None], num_rows: int, length: int) -> DynamicCache:
    """Return a cache whose rows all begin with the prefix; nothing is copied before it grows."""
    cache = DynamicCache(config=config)
    for layer, part in zip(cache.layers, shared, strict=True):
        if part is not None:
            keys, values = (x.expand(num_rows, -1, -1, -1) for x in part)
            fill(layer, keys, values, length)
    return cache
