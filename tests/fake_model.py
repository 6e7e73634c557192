"""A model made of arithmetic, for tests of everything around a model.

Its "KV entry" of a token is the token itself, kept in a pool of blocks; its answer depends on every
entry that it reads through the block tables. So a block that is shared wrongly, copied too late,
overwritten or never written changes the answer, and a right answer proves the bookkeeping.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache import PrefixCache
from radixkv.identity.identity import CacheIdentity
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.beams import BeamParams
from radixkv.service.engine.core import EngineCore
from radixkv.service.engine.detokenize import TokenText
from radixkv.service.engine.origin import LOCAL, Origin
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.request import Request
from radixkv.service.engine.sampling import ChoiceSampler, Prompt
from radixkv.service.engine.stopping import ChoiceStream
from radixkv.service.engine.stream import Stream
from radixkv.tokens import encode
from tests.tiny_models import build_tokenizer

VOCAB = 64
_POISON = -1
_TOKEN_TEXT = TokenText(build_tokenizer())


def logits_after(context: Sequence[int]) -> np.ndarray:
    """[VOCAB] logits that depend on each token of ``context`` and on its place."""
    state = np.uint64(1469598103934665603)
    with np.errstate(over="ignore"):
        for token in context:
            state = (state ^ np.uint64(int(token) + 2)) * np.uint64(1099511628211)
        mixed = (state ^ np.arange(1, VOCAB + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**22).astype(np.float32)


def greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model says after ``prompt``, token by token, with no cache at all."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(int(logits_after(context).argmax()))
    return context[len(prompt) :]


class FakeRunner:
    """Stands where a ModelRunner stands; its pool starts poisoned, so no unwritten entry passes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = np.full((num_blocks, block_size), _POISON, dtype=np.int64)
        self.tokens_computed = 0
        self.batches: list[StepBatch] = []
        self.now_s = 0.0
        self.token_s = 1e-3
        self.copy_s = 1e-6
        """Seconds that a token takes, and a byte that is copied: the rig's clock goes by these."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's record."""
        return int(self.pool[0].nbytes)

    def save(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Copy blocks out."""
        records = self.pool[blocks]
        self.now_s += records.nbytes * self.copy_s
        return records

    def restore(self, blocks: npt.NDArray[np.int32], records: npt.NDArray[np.int64]) -> None:
        """Copy blocks in."""
        assert records.shape == (len(blocks), self.pool.shape[1])
        self.pool[blocks] = records
        self.now_s += records.nbytes * self.copy_s

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the step's tokens through the tables, read all of them back, answer."""
        block_size = self.pool.shape[1]
        copied = [self.pool[source, :valid].copy() for source, _, valid in batch.copies]
        for (_, target, valid), data in zip(batch.copies, copied, strict=True):
            self.pool[target] = _POISON
            self.pool[target, :valid] = data
        ends = np.cumsum(batch.query_lens)
        written: set[tuple[int, int]] = set()
        for s, (length, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            for i in range(length):
                position = int(kv_len - length + i)
                block = int(batch.block_tables[s, position // block_size])
                slot = (block, position % block_size)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.pool[slot] = batch.token_ids[ends[s] - length + i]
        rows = []
        for row in batch.logit_rows:
            s = int(np.searchsorted(ends, row, side="right"))
            position = int(batch.kv_lens[s] - (ends[s] - row))
            blocks = batch.block_tables[s, : position // block_size + 1]
            context = self.pool[blocks].reshape(-1)[: position + 1]
            assert (context != _POISON).all(), "an entry is read that was never written"
            rows.append(logits_after(context.tolist()))
        self.tokens_computed += batch.num_tokens
        self.now_s += batch.num_tokens * self.token_s
        self.batches.append(batch)
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(len(rows), VOCAB))


class Rig:
    """An engine core on the fake model, turned by hand: no thread, no time."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_tokens: int = 64,
        max_num_seqs: int = 16,
        lookahead_tokens: int = 0,
        enabled: bool = True,
        force_miss: bool = False,
        swap_memory: int = 0,
        batch_share: float = 0.75,
    ) -> None:
        self.cache = PrefixCache(num_blocks, block_size, enabled=enabled, force_miss=force_miss)
        self.runner = FakeRunner(num_blocks, block_size)
        self.core = EngineCore(
            self.runner,
            self.cache,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            lookahead_tokens=lookahead_tokens,
            share=enabled and not force_miss,
            make_choice=self._make_choice,
            batch_share=batch_share,
            swap_memory=swap_memory,
            clock=lambda: self.runner.now_s,
        )
        self._arrivals = itertools.count()

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        identity: str = "fake",
        n: int = 1,
        seed: int | None = None,
        origin: Origin = LOCAL,
        beams: BeamParams | None = None,
        **sampling: Any,
    ) -> Stream:
        """Queue a request; greedy unless it has a seed. Tenants share nothing."""
        params = SamplingParams(
            max_tokens=max_tokens,
            n=n,
            seed=seed,
            temperature=0.0 if seed is None else 1.0,
            beams=beams,
            **({"ignore_eos": True} | sampling),
        )
        arrival = next(self._arrivals)
        stream = Stream(str(arrival), prompt, n, abort=self.core.abort, done=lambda _: None)
        self.core.submit(
            Request(
                id=str(arrival),
                arrival=arrival,
                prompt_ids=tuple(prompt),
                prompt_bytes=encode(prompt),
                identify=partial(self._identify, identity, origin),
                origin=origin,
                params=params,
                max_tokens=max_tokens,
                entropy=0,
                sampling_prompt=Prompt(prompt),
                stream=stream,
            )
        )
        return stream

    def _identify(self, name: str, origin: Origin) -> CacheIdentity:
        identity = CacheIdentity.local(name, self.cache.block_size)
        return identity if origin is LOCAL else replace(identity, namespace=origin.namespace)

    def turn(self, times: int = 1) -> None:
        """Make steps; after each the accounting must hold."""
        for _ in range(times):
            self.core.turn()
            assert self.core.check() == []

    def run(self, limit: int = 10_000) -> int:
        """Turn until nothing is left to do; returns the turns that took."""
        for turns in range(limit):
            self.turn()
            if self.core.scheduler.idle:
                self.assert_at_rest()
                return turns + 1
        raise AssertionError(f"still busy after {limit} turns")

    def assert_at_rest(self) -> None:
        """Nothing runs, so every block is free or cached, and no invariant was ever broken."""
        stats = self.cache.stats()
        assert stats.free_blocks + stats.evictable_blocks == stats.num_blocks
        assert self.core.counters.violations == 0

    def _make_choice(self, request: Request, index: int) -> tuple[ChoiceSampler, ChoiceStream]:
        sampler = ChoiceSampler(
            request.params,
            index=index,
            prompt_ids=request.sampling_prompt,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(),
            entropy=request.entropy,
        )
        output = ChoiceStream(
            index,
            request.params,
            _TOKEN_TEXT,
            eos_token_ids=frozenset(),
            max_tokens=request.max_tokens,
        )
        return sampler, output


def ids_of(stream: Stream) -> list[list[int]]:
    """The token ids of each choice of a finished stream."""
    assert stream.finished
    return [list(choice.token_ids) for choice in stream.result().choices]
