"""The promise of deterministic mode, bit for bit: what a request gets depends on itself alone.

A probe of 600 tokens is asked under every hit length, in company, in chunks, on other threads; what
is compared are the logits that its tokens are drawn from. Tiny models, and SmolLM2 for a few.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from radixkv import Engine, Generation
from radixkv.config import EngineConfig
from radixkv.errors import InvalidConfig
from radixkv.identity.identity import Namespace
from radixkv.kernels.native import unavailable_reason
from radixkv.service.engine.batch import StepBatch
from radixkv.service.engine.drawing import log_total
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.models.llama import FAMILIES
from radixkv.service.engine.params import SamplingParams
from radixkv.service.engine.preflight import NATIVE_FAMILIES
from radixkv.service.engine.sampling import ChoiceSampler, sample
from tests import tiny_models
from tests.http_server import running_server

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no compiled decoder: {unavailable_reason()}"
)
BLOCK = 16
LENGTH = 600
BUDGETS = (32, 128, 512)
HITS = range(LENGTH // BLOCK + 1)
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "logprobs": 3}
Ask = tuple[list[int], dict[str, Any]]


def tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


PROBE = tokens(LENGTH, 0)


def load(arch: str = "llama", *, decoder: str = "auto", **overrides: Any) -> LoadedModel:
    model, tokenizer = tiny_models.build(arch, **overrides)
    return LoadedModel.from_model(model, tokenizer, name=f"tiny-{arch}", decoder=decoder)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load()


def _params(how: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**({"ignore_eos": True} | how))


class Watched:
    """A deterministic engine that keeps the logits which the probe's tokens are drawn from."""

    def __init__(self, loaded: LoadedModel, probe: list[int] = PROBE, **settings: Any) -> None:
        defaults: dict[str, Any] = {"kv_memory": "4MiB", "deterministic": True}
        self.engine = Engine(loaded, **(defaults | settings))
        self.probe = probe
        self.seen: list[torch.Tensor] = []
        self._forward = self.engine._core.runner.forward
        self.engine._core.runner = self  # type: ignore[assignment]  # only forward is called

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run the step; note rows of sequences as long as the probe, and as nobody else."""
        logits = self._forward(batch)
        ends = batch.query_lens.cumsum() - 1
        for i, row in enumerate(batch.logit_rows.tolist()):
            seq = int(ends.searchsorted(row))
            at = int(batch.kv_lens[seq]) - int(ends[seq] - row)
            if at >= len(self.probe):
                self.seen.append(logits[i].clone())
        return logits

    def ask_together(self, *asks: Ask) -> list[Generation]:
        """Let all of ``asks`` arrive between the same two steps."""

        def submit() -> list[Any]:
            return [self.engine.submit(ids, _params(how)) for ids, how in asks]

        streams = self.engine._core.call(submit).result()
        return [stream.result() for stream in streams]

    def seed(self, length: int) -> None:
        """Forget everything, then cache the first ``length`` tokens of the probe."""
        self.engine.cache.reset()
        if length:
            self.ask_together((self.probe[:length], {"max_tokens": 1, "temperature": 0.0}))
        self.seen.clear()

    def logits(self, hit: int, batch: int = 1, *, num_tokens: int = 1, place: int = 0) -> Any:
        """Return the probe's logits with ``hit`` tokens cached, as one of ``batch`` requests.

        place  how many of the others came before it
        """
        self.seed(hit)
        others = [
            (tokens(17 + 23 * i, 100 + i), {"max_tokens": 9, "temperature": 0.0})
            for i in range(batch - 1)
        ]
        mine = (self.probe, {"max_tokens": num_tokens, "temperature": 0.0})
        answers = self.ask_together(*others[:place], mine, *others[place:])
        assert answers[place].usage.cached_tokens == min(hit, len(self.probe) - 1)
        assert answers[place].deterministic and answers[place].given_up_tokens == 0
        assert len(self.seen) == num_tokens
        return torch.stack(self.seen)


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    """Make watched engines, and close them."""
    made: list[Watched] = []

    def make(*args: Any, **settings: Any) -> Watched:
        made.append(Watched(*args, **settings))
        return made[-1]

    yield make
    for watched in made:
        assert watched.engine.check() == []
        watched.engine.close()


@pytest.mark.parametrize("budget", BUDGETS)
def test_logits_are_the_same_bits_for_every_hit_batch_and_budget(
    llama: LoadedModel, watch: Callable[..., Watched], budget: int
) -> None:
    """DETERM-1, DETERM-3: hits of 0, 1, ..., all blocks, alone and in batches of 2 to 8."""
    cold = watch(llama, max_batch_tokens=1024).logits(0)
    engine = watch(llama, max_batch_tokens=budget)
    for blocks in HITS:
        for batch in (1, 2 + blocks % 7):
            found = engine.logits(blocks * BLOCK, batch, place=blocks % batch)
            assert torch.equal(found, cold), (blocks, batch)
    for hit in (0, 7 * BLOCK + 5, 256, 592):
        for batch in range(1, 9):
            assert torch.equal(engine.logits(hit, batch), cold), (hit, batch)


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {"dtype": torch.bfloat16}),
        ("llama", {"hidden_size": 288, "intermediate_size": 640, "num_attention_heads": 9,
                   "num_key_value_heads": 3, "head_dim": 64}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {}),
    ],
)  # fmt: skip
def test_every_family_keeps_its_bits_while_it_answers(
    watch: Callable[..., Watched], arch: str, overrides: dict[str, Any]
) -> None:
    """DETERM-1: also those of the tokens that follow, which are computed one by one."""
    loaded = load(arch, **overrides)
    cold = watch(loaded, max_batch_tokens=1024, kv_memory="32MiB").logits(0, num_tokens=5)
    for budget in BUDGETS:
        engine = watch(loaded, max_batch_tokens=budget, kv_memory="32MiB")
        for hit, batch in ((0, 5), (BLOCK, 1), (300, 3), (592, 8), (LENGTH, 2)):
            found = engine.logits(hit, batch, num_tokens=5, place=batch // 2)
            assert torch.equal(found, cold), (budget, hit, batch)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_block_size_do_not_show(
    watch: Callable[..., Watched], llama: LoadedModel, threads: int
) -> None:
    before = torch.get_num_threads()
    try:
        alone = watch(llama, num_threads=1, max_batch_tokens=1024).logits(0, num_tokens=4)
        engine = watch(llama, num_threads=threads, block_size=8, max_batch_tokens=96)
        assert torch.equal(engine.logits(0, 4, num_tokens=4), alone)
        assert torch.equal(engine.logits(40, 2, num_tokens=4), alone)
    finally:
        torch.set_num_threads(before)


def test_siblings_that_share_the_prefix_change_nothing(
    llama: LoadedModel, watch: Callable[..., Watched]
) -> None:
    """DETERM-1: attention reads what they have in common once for all of them."""
    alone = watch(llama).logits(0, num_tokens=6)
    engine = watch(llama, max_batch_tokens=128)
    for seeded in (0, 560):
        engine.seed(seeded)
        asks: list[Ask] = [
            (PROBE[: 512 - 8 * i] + tokens(9, i), {"max_tokens": 12, "temperature": 0.0})
            for i in range(7)
        ]
        asks.insert(3, (PROBE, {"max_tokens": 6, "temperature": 0.0}))
        engine.ask_together(*asks)
        assert torch.equal(torch.stack(engine.seen), alone), seeded


def test_five_greedy_answers_are_one_though_the_first_was_cold(llama: LoadedModel) -> None:
    """DETERM-2"""
    with Engine(llama, deterministic=True, kv_memory="4MiB") as engine:
        answers = [engine.generate(PROBE, max_tokens=64, temperature=0) for _ in range(5)]
    assert len({answer.token_ids for answer in answers}) == 1
    assert answers[0].usage.cached_tokens == 0
    assert all(answer.usage.cached_tokens > 0 for answer in answers[1:])


def test_drawn_tokens_and_their_logprobs_are_the_same_alone_and_in_company(
    llama: LoadedModel, watch: Callable[..., Watched]
) -> None:
    """DETERM-4: unrelated traffic of every kind around a fixed probe, in batches of 1 to 8."""
    engine = watch(llama, probe=PROBE[:70], max_batch_tokens=64)
    mine = (PROBE[:70], {"max_tokens": 12} | DRAWN)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "logprobs": 5},
        {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "n": 2, "logprobs": 0},
    ]
    (wanted,) = engine.ask_together(mine)
    assert wanted.deterministic
    for batch in range(2, 9):
        others = [
            (tokens(5 + 11 * i, batch * 10 + i), {"max_tokens": 10, **kinds[(batch + i) % 4]})
            for i in range(batch - 1)
        ]
        (*_, found) = engine.ask_together(*others, mine)
        assert found.choices == wanted.choices, batch  # ids, text and every logprob
    again = engine.ask_together(*[mine] * 8)
    assert {answer.choices for answer in again} == {wanted.choices}


def test_prompt_logprobs_do_not_depend_on_the_chunks(
    llama: LoadedModel, watch: Callable[..., Watched]
) -> None:
    how = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}
    wanted = None
    for budget in (1024, 100, 7):
        (found,) = watch(llama, max_batch_tokens=budget).ask_together((PROBE[:200], how))
        wanted = wanted or found.prompt_logprobs
        assert found.prompt_logprobs == wanted


def test_a_preempted_answer_is_the_one_it_would_have_been(
    llama: LoadedModel, watch: Callable[..., Watched]
) -> None:
    """DETERM-4, across preemption and resumption."""
    asks: list[Ask] = [
        (tokens(40, 50 + i), {"max_tokens": 40} | DRAWN | {"seed": i}) for i in range(8)
    ]
    roomy = watch(llama)
    alone = [roomy.ask_together(ask)[0] for ask in asks]
    tight = watch(llama, kv_memory="80KiB", lookahead_tokens=0, max_num_seqs=4)
    crowded = tight.ask_together(*asks)
    assert tight.engine.stats().preemptions_total > 0
    assert [answer.choices for answer in crowded] == [answer.choices for answer in alone]


def test_another_start_with_the_same_weights_gives_the_same_answers() -> None:
    """DETERM-2: nothing of the process that answered first is needed to repeat it."""
    answers = []
    for earlier in (0, 3):
        with Engine(load(), deterministic=True, kv_memory="2MiB") as engine:
            for i in range(earlier):
                engine.generate(tokens(30, 70 + i), max_tokens=5)
            answers.append(engine.generate(PROBE[:90], max_tokens=16, n=3, **DRAWN).choices)
    assert answers[0] == answers[1]


def test_smollm2_keeps_its_bits(smollm2: LoadedModel, watch: Callable[..., Watched]) -> None:
    """DETERM-1, DETERM-3: weights as real as they come; with more than one thread."""
    before = torch.get_num_threads()
    try:
        engine = watch(smollm2, kv_memory="256MiB", num_threads=2, max_batch_tokens=512)
        cold = engine.logits(0, num_tokens=3)
        engine.seen.clear()
        others: list[Ask] = [
            (PROBE[:555] + tokens(5, i), {"max_tokens": 4, **DRAWN}) for i in range(3)
        ]
        engine.ask_together(*others, (PROBE, {"max_tokens": 3, "temperature": 0.0}))
        assert torch.equal(torch.stack(engine.seen), cold)
        chunked = watch(smollm2, kv_memory="256MiB", num_threads=1, max_batch_tokens=100)
        assert torch.equal(chunked.logits(437, 2, num_tokens=3), cold)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_sums_and_draws_know_nothing_of_the_other_rows(threads: int) -> None:
    """DETERM-3: torch splits the sum of one long row among threads, and of several rows not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(9, 50_257, generator=torch.Generator().manual_seed(1)) * 6
        totals = log_total(logits)
        torch.testing.assert_close(totals, logits.double().logsumexp(1, keepdim=True).float())
        for r in range(9):
            assert torch.equal(log_total(logits[r : r + 1].clone()), totals[r : r + 1])

        def samplers() -> list[ChoiceSampler]:
            ways: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 40}]
            return [
                ChoiceSampler(
                    SamplingParams(temperature=0.8, seed=r, logprobs=r % 4, **ways[r % 3]),
                    index=0,
                    prompt_ids=[r],
                    vocab_size=50_257,
                    eos_token_ids=[],
                    entropy=0,
                )
                for r in range(9)
            ]

        together = sample(logits, samplers())
        alone = [sample(logits[r : r + 1].clone(), [s])[0] for r, s in enumerate(samplers())]
        assert together == alone
    finally:
        torch.set_num_threads(before)


def test_equal_logits_are_listed_in_the_same_order_whatever_others_ask_for() -> None:
    logits = torch.zeros(2, 5000)

    def listed(*ks: int) -> Any:
        samplers = [
            ChoiceSampler(
                SamplingParams(temperature=0, logprobs=k),
                index=0,
                prompt_ids=[1],
                vocab_size=5000,
                eos_token_ids=[],
                entropy=0,
            )
            for k in ks
        ]
        return sample(logits[: len(ks)], samplers)[0]

    assert listed(2) == listed(2, 20)


# ---- where the promise is not given --------------------------------------------------------------


def test_it_is_refused_with_the_reason_where_the_compiled_decoder_cannot_run() -> None:
    for loaded, reason in (
        (load("gemma3"), "Gemma3ForCausalLM is not one of LlamaForCausalLM"),
        (load(decoder="generic"), "the generic decoder was asked for"),
    ):
        with pytest.raises(InvalidConfig, match="deterministic is on") as e:
            Engine(loaded, deterministic=True)
        assert reason in str(e.value)
    with pytest.raises(InvalidConfig, match="deterministic needs the compiled decoder"):
        EngineConfig(deterministic=True, decoder="generic")


def test_a_loaded_model_with_another_decoder_than_asked_for_is_refused(llama: LoadedModel) -> None:
    with pytest.raises(InvalidConfig, match="loaded for the compiled decoder"):
        Engine(llama, decoder="generic")
    with pytest.raises(InvalidConfig, match="decoder is 'native'.*Gemma3ForCausalLM"):
        Engine(load("gemma3"), decoder="native")
    assert NATIVE_FAMILIES == FAMILIES


def test_fast_mode_promises_nothing_and_shares_nothing_with_the_other(llama: LoadedModel) -> None:
    for loaded, decoder in ((llama, "native"), (load(decoder="generic"), "generic")):
        with Engine(loaded, kv_memory="1MiB", decoder=decoder) as engine:
            answer = engine.generate(PROBE[:20], max_tokens=2)
            assert (engine.decoder, answer.deterministic, answer.given_up_tokens) == (
                decoder,
                False,
                0,
            )
    here = Namespace("local")
    fast, kept = (llama.identity(here, 16, deterministic=d) for d in (False, True))
    assert fast.difference(kept) == ("execution.deterministic",)


def test_answers_over_http_say_whether_the_promise_holds() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    usage = {"stream_options": {"include_usage": True}}
    for deterministic in (False, True):
        said = {"deterministic": deterministic, "given_up_tokens": 0}
        with running_server(deterministic=deterministic) as server:
            for path, asked in (
                ("/v1/chat/completions", body),
                ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 2}),
            ):
                assert server.ask("POST", path, asked)[2]["radixkv"] == said
                *before, last, _ = server.events(path, asked | usage)
                assert last["usage"]["completion_tokens"] and last["radixkv"] == said
                assert not any("radixkv" in event for event in before)
            stats = server.ask("GET", "/v1/cache/stats")[2]
            assert (stats["deterministic"], stats["decoder"]) == (deterministic, "native")
            assert f'decoder="native",deterministic="{deterministic}"' in server.ask(
                "GET", "/metrics"
            )[2]  # fmt: skip
