"""The runner gives, over scattered blocks and ragged batches, what the model gives by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.kernels.native import unavailable_reason
from radixkv.service.engine.attention import attention_of
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.runner import ModelRunner
from tests.tiny_models import ARCHITECTURES, build

BLOCK = 16
NUM_BLOCKS = 64
GENERIC = [(arch, torch.float32, "generic") for arch in ARCHITECTURES]
GENERIC += [(arch, torch.bfloat16, "generic") for arch in ("llama", "gemma3")]
NATIVE = [(arch, torch.float32, "native") for arch in ARCHITECTURES if arch != "gemma3"]
NATIVE += [("qwen3", torch.bfloat16, "native")]


@dataclass
class Sequence:
    """A prompt, where its blocks lie, and how many of its tokens have KV."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    table: list[int]
    done: int = 0


class Bench:
    """A model, its runner, and blocks handed out in a shuffled order."""

    def __init__(self, loaded: LoadedModel, *, seed: int = 0, num_blocks: int = NUM_BLOCKS) -> None:
        self.loaded = loaded
        self.runner = ModelRunner(loaded, num_blocks, BLOCK)
        self.rng = np.random.default_rng(seed)
        self.free = [int(b) for b in self.rng.permutation(num_blocks)]
        # What lies in a block before it is written must never matter.
        self.runner.pool.data.fill_(float("nan"))

    def ids(self, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.rng.integers(3, 300, size=n)

    def sequence(
        self,
        ids: np.ndarray[Any, np.dtype[np.int64]],
        *,
        prefix: Sequence | None = None,
        of: int = 0,
    ) -> Sequence:
        """A sequence of ``ids``; its first ``of`` tokens (whole blocks) are those of ``prefix``."""
        shared = prefix.table[: of // BLOCK] if prefix else []
        need = -(-len(ids) // BLOCK) - len(shared)
        table = shared + [self.free.pop() for _ in range(need)]
        return Sequence(ids, table, done=of)

    def step(self, *work: tuple[Sequence, int]) -> list[torch.Tensor]:
        """Compute the next n tokens of each sequence; return the logits of all its new rows."""
        parts = [s.ids[s.done : s.done + n] for s, n in work]
        width = max(len(s.table) for s, _ in work)
        for s, n in work:
            s.done += n
        tokens = np.concatenate(parts)
        logits = self.runner.forward(
            StepBatch(
                token_ids=tokens,
                query_lens=np.array([len(p) for p in parts], np.int32),
                kv_lens=np.array([s.done for s, _ in work], np.int32),
                block_tables=np.array(
                    [s.table + [0] * (width - len(s.table)) for s, _ in work], np.int32
                ),
                logit_rows=np.arange(len(tokens)),
            )
        )
        return list(torch.split(logits, [len(p) for p in parts]))

    def chunks(self, s: Sequence, size: int) -> torch.Tensor:
        """Compute the rest of a sequence alone, in chunks."""
        found = []
        while s.done < len(s.ids):
            found += self.step((s, min(size, len(s.ids) - s.done)))
        return torch.cat(found)

    def own(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The logits that the model's own attention gives for a prompt."""
        with torch.inference_mode(), attention_of(self.loaded.model, "eager") as model:
            prompt = torch.from_numpy(ids)[None].to(self.loaded.device)
            logits: torch.Tensor = model(prompt, use_cache=False).logits
        return logits[0].float()

    def assert_close(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert torch.isfinite(got).all()
        assert got.dtype == torch.float32 and got.shape == wanted.shape
        if self.loaded.dtype == torch.float32:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
        else:
            assert float((got - wanted).norm() / wanted.norm()) < 0.05


@pytest.fixture(
    scope="module", params=GENERIC + NATIVE, ids=lambda p: f"{p[0]}-{str(p[1])[6:]}-{p[2]}"
)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    arch, dtype, decoder = request.param
    if decoder == "native" and (reason := unavailable_reason()):
        pytest.skip(reason)
    model, tokenizer = build(arch, dtype=dtype)
    return LoadedModel.from_model(model, tokenizer, name=arch, decoder=decoder)


@pytest.fixture
def bench(loaded: LoadedModel) -> Bench:
    return Bench(loaded)


def test_a_cold_prompt_gives_the_models_own_logits(bench: Bench) -> None:
    ids = bench.ids(75)
    (got,) = bench.step((bench.sequence(ids), 75))
    bench.assert_close(got, bench.own(ids))


@pytest.mark.parametrize("size", [1, 7, 16, 50])
def test_chunks_of_any_size_give_the_same(bench: Bench, size: int) -> None:
    """Chunks of 1 are decoding; windows of 16 and 24 are crossed inside and between chunks."""
    ids = bench.ids(75)
    bench.assert_close(bench.chunks(bench.sequence(ids), size), bench.own(ids))


def test_a_prefix_computed_in_chunks_serves_any_longer_prompt(bench: Bench) -> None:
    """CORRECT-4: prefill in two chunks, then share 96, 112 and 192 tokens of it."""
    first = bench.sequence(bench.ids(200))
    bench.chunks(first, 110)
    for shared in (96, 112, 192):
        ids = np.concatenate([first.ids[:shared], bench.ids(21)])
        s = bench.sequence(ids, prefix=first, of=shared)
        bench.assert_close(bench.chunks(s, 50), bench.own(ids)[shared:])


def test_a_short_hit_beside_a_long_cold_prompt_reads_its_prefix(bench: Bench) -> None:
    """CORRECT-2: fresh prefill, hit with new tokens, decodes, all in one step."""
    cached = bench.sequence(bench.ids(160))
    bench.chunks(cached, 160)
    decoding = bench.sequence(bench.ids(41))
    bench.step((decoding, 40))

    fresh = bench.sequence(bench.ids(300))
    hit = bench.sequence(np.concatenate([cached.ids, bench.ids(30)]), prefix=cached, of=160)
    work = [(decoding, 1), (fresh, 300), (hit, 30)]
    got = bench.step(*work)
    for (s, n), logits in zip(work, got, strict=True):
        bench.assert_close(logits, bench.own(s.ids)[-n:])


def test_many_sequences_decode_together_over_one_prefix(bench: Bench) -> None:
    shared = bench.sequence(bench.ids(64))
    bench.chunks(shared, 64)
    tails = [np.concatenate([shared.ids, bench.ids(4 + i)]) for i in range(8)]
    seqs = [bench.sequence(ids, prefix=shared, of=64) for ids in tails]
    bench.step(*[(s, len(s.ids) - 65) for s in seqs])
    for s, logits in zip(seqs, bench.step(*[(s, 1) for s in seqs]), strict=True):
        bench.assert_close(logits, bench.own(s.ids)[-1:])


@pytest.mark.parametrize("length", [48, 49, 1])
def test_the_last_token_of_a_full_hit_is_computed_once(bench: Bench, length: int) -> None:
    """CORRECT-8: block multiple, one more, a single token; again gives the cold logits."""
    s = bench.sequence(bench.ids(length))
    (cold,) = bench.step((s, length))
    s.done = length - 1
    (warm,) = bench.step((s, 1))
    bench.assert_close(warm, cold[-1:])


def test_several_tokens_across_scattered_blocks_equal_a_contiguous_run(bench: Bench) -> None:
    """CORRECT-5: appends of 3 over block borders whose slots do not follow one another."""
    ids = bench.ids(70)
    scattered = bench.sequence(ids)
    assert np.diff(scattered.table).tolist() != [1] * (len(scattered.table) - 1)
    straight = Sequence(ids, list(range(20, 25)))
    wanted = Bench(bench.loaded).chunks(straight, 3)
    bench.assert_close(bench.chunks(scattered, 3), wanted)


def test_a_copied_block_is_continued_privately(bench: Bench) -> None:
    """COW-1: 10 tokens of a block go to two branches; the source stays as it was."""
    parent = bench.sequence(bench.ids(42))
    bench.chunks(parent, 42)
    before = bench.runner.pool.data[:, :, parent.table[2]].clone()
    for _ in range(2):
        ids = np.concatenate([parent.ids, bench.ids(5)])
        branch = bench.sequence(ids, prefix=parent, of=32)
        batch = StepBatch(
            token_ids=ids[42:],
            query_lens=np.array([5], np.int32),
            kv_lens=np.array([47], np.int32),
            block_tables=np.array([branch.table], np.int32),
            copies=[(parent.table[2], branch.table[2], 10)],
            logit_rows=np.arange(5),
        )
        bench.assert_close(bench.runner.forward(batch), bench.own(ids)[42:])
    after = bench.runner.pool.data[:, :, parent.table[2]]
    assert torch.equal(after[:, :, :10], before[:, :, :10])


def test_only_the_slots_of_the_new_tokens_are_written(tiny_llama: LoadedModel) -> None:
    bench = Bench(tiny_llama)
    s = bench.sequence(bench.ids(20))
    bench.step((s, 20))
    written = ~torch.isnan(bench.runner.pool.data).all(-1).all(-1)
    slots = written.flatten(2)[0, 0].nonzero().flatten().tolist()
    assert slots == sorted(s.table[i // BLOCK] * BLOCK + i % BLOCK for i in range(20))
    assert bool((written == written[0, 0]).all())


def test_logits_come_for_the_wanted_rows_in_the_wanted_order(tiny_llama: LoadedModel) -> None:
    bench = Bench(tiny_llama)
    ids = bench.ids(20)
    s = bench.sequence(ids)

    def ask(rows: list[int]) -> torch.Tensor:
        return bench.runner.forward(
            StepBatch(
                token_ids=ids,
                query_lens=np.array([20], np.int32),
                kv_lens=np.array([20], np.int32),
                block_tables=np.array([s.table], np.int32),
                logit_rows=np.array(rows, np.int64),
            )
        )

    everything = ask(list(range(20)))
    torch.testing.assert_close(ask([19, 3]), everything[[19, 3]])
    assert ask([]).shape == (0, tiny_llama.vocab_size)


def test_random_load_in_a_full_pool_gives_finite_logits_of_the_right_ids(
    tiny_llama: LoadedModel,
) -> None:
    """CORRECT-1: 32 sequences over shared prefixes fill the pool; each equals itself alone."""
    bench = Bench(tiny_llama, num_blocks=160)
    prefixes = [bench.sequence(bench.ids(48)) for _ in range(4)]
    bench.step(*[(p, 48) for p in prefixes])
    seqs = []
    for i in range(32):
        prefix = prefixes[i % 4]
        ids = np.concatenate([prefix.ids, bench.ids(int(bench.rng.integers(2, 60)))])
        seqs.append(bench.sequence(ids, prefix=prefix, of=48))
    while waiting := [s for s in seqs if s.done < len(s.ids)]:
        work = [(s, min(int(bench.rng.integers(1, 9)), len(s.ids) - s.done)) for s in waiting]
        for (s, n), logits in zip(work, bench.step(*work), strict=True):
            assert torch.isfinite(logits).all()
            assert int(logits.argmax(-1).max()) < tiny_llama.vocab_size
            if s.done == len(s.ids):
                bench.assert_close(logits, bench.own(s.ids)[-n:])


def test_bytes_per_block_is_what_the_pool_takes(tiny_llama: LoadedModel) -> None:
    pool = ModelRunner(tiny_llama, 10, BLOCK).pool.data
    assert ModelRunner.bytes_per_block(tiny_llama, BLOCK) * 10 == pool.numel() * pool.itemsize


def test_greedy_answers_of_smollm2_equal_transformers_generate(
    smollm2: LoadedModel, smollm2_reference: Any
) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,"]
    bench = Bench(smollm2)
    seqs, starts = [], []
    for prompt in prompts:
        ids = smollm2.tokenizer(prompt, return_tensors="pt")
        out = smollm2_reference.generate(**ids, max_new_tokens=16, do_sample=False)
        seqs.append(bench.sequence(out[0].numpy()))
        starts.append(ids.input_ids.shape[1])
    # The whole answers in one ragged batch: each row must choose the token that follows it.
    work = [(s, len(s.ids) - 1) for s in seqs]
    for s, start, logits in zip(seqs, starts, bench.step(*work), strict=True):
        assert logits.argmax(-1)[start - 1 :].tolist() == s.ids[start:].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gpu_gives_the_models_own_logits(arch: str, dtype: torch.dtype) -> None:
    """Chunks, a shared prefix and decodes in one ragged step, after the probe at loading."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, tokenizer = build(arch, dtype=dtype)
    bench = Bench(LoadedModel.from_model(model.to("cuda"), tokenizer, name=arch))
    first = bench.sequence(bench.ids(160))
    bench.assert_close(bench.chunks(first, 50), bench.own(first.ids))
    hit = bench.sequence(np.concatenate([first.ids, bench.ids(30)]), prefix=first, of=160)
    fresh, decoding = bench.sequence(bench.ids(300)), bench.sequence(bench.ids(41))
    bench.step((decoding, 40))
    work = [(decoding, 1), (fresh, 300), (hit, 30)]
    for (s, n), logits in zip(work, bench.step(*work), strict=True):
        bench.assert_close(logits, bench.own(s.ids)[-n:])
