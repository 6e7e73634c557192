"""radixkv.service.hf_cache and what it is made of: any transformers model, exact or refused."""

from __future__ import annotations

import copy
import threading
from functools import cache as once
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from radixkv import TransformersPrefixCache
from radixkv.errors import CacheBusy, InvalidConfig, InvalidRequest, UnsupportedModel
from radixkv.service.hf_past import CachedPast
from tests.tiny_models import ARCHITECTURES, build, build_tokenizer

ALL = (*ARCHITECTURES, "gpt2")
VOCAB = 300
# The forward's keyword for a cache has changed its name between versions of transformers.
KEYWORD = "cache" if "cache" in signature(GPT2LMHeadModel.forward).parameters else "past_key_values"


@once
def model_of(arch: str) -> Any:
    if arch != "gpt2":
        return build(arch)[0]
    config = GPT2Config(
        vocab_size=len(build_tokenizer()),
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(config)
    return model.eval()


def new(model: Any, **settings: Any) -> TransformersPrefixCache:
    given: dict[str, Any] = {"memory": "2MiB", "block_size": 4} | settings
    return TransformersPrefixCache(model, **given)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, length), generator=generator)


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, 1)


def generate(model: Any, ids: torch.Tensor, past: Any = None, **settings: Any) -> torch.Tensor:
    if past is not None:
        settings[KEYWORD] = past
    settings = {"max_new_tokens": 12, "do_sample": False} | settings
    found: torch.Tensor = model.generate(ids, **settings)
    return found


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, past: Any = None, **settings: Any) -> torch.Tensor:
    if past is not None:
        settings[KEYWORD] = past
    found: torch.Tensor = model(input_ids=ids, **settings).logits
    return found


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-3, rtol=1e-3)


def stored(cache: TransformersPrefixCache, ids: torch.Tensor) -> int:
    """Return how many of ``ids`` the cache has, and hold their KV to what the model computes."""
    with cache.open(join(ids, torch.tensor([[1]]))) as past:
        length = past.cached_tokens
        if length:
            plain: Any = DynamicCache(config=cache.model.config)
            logits(cache.model, ids[:, :length], plain)
            for mine, right in zip(past.layers, plain.layers, strict=True):
                assert close(mine.keys, right.keys) and close(mine.values, right.values)
        past.close(store=False)
    assert cache.check() == []
    return length


# -- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
def test_ids_are_those_of_plain_generate_however_much_is_cached(arch: str) -> None:
    model = model_of(arch)
    cache = new(model)
    ids = tokens(50)
    plain = generate(model, ids)
    for hit in (0, 49, 49):
        with cache.open(ids) as past:
            assert torch.equal(generate(model, ids, past), plain)
        assert past.cached_tokens == hit
        assert past.computed_tokens == plain.shape[1] - 1 - hit
    assert stored(cache, plain) == plain.shape[1] - 1  # the answer too; its last was never fed

    for cut in (1, 15, 16, 33, 48):  # inside of blocks, at their ends, before and behind windows
        other = join(ids[:, :cut], tokens(20, seed=cut))
        with cache.open(other) as past:
            assert torch.equal(generate(model, other, past), generate(model, other))
        assert past.cached_tokens == cut

    chat = join(plain, tokens(9, seed=99))
    with cache.open(chat) as past:
        assert torch.equal(generate(model, chat, past), generate(model, chat))
    assert past.cached_tokens == plain.shape[1] - 1


@pytest.mark.parametrize("arch", ALL)
def test_answers_stay_right_while_a_small_memory_evicts(arch: str) -> None:
    model = model_of(arch)
    block_bytes = 4 * new(model).facts.token_bytes
    cache = new(model, memory=24 * block_bytes)
    for turn in range(10):
        ids = join(tokens(30, seed=turn % 3), tokens(11, seed=100 + turn))
        with cache.open(ids) as past:
            out = generate(model, ids, past, max_new_tokens=6)
        assert torch.equal(out, generate(model, ids, max_new_tokens=6))
        stored(cache, out)
    stats = cache.stats()
    assert stats.evicted_blocks > 0 and stats.cached_tokens > 0
    assert stats.cached_blocks <= stats.num_blocks == 24


def test_what_does_not_fit_is_left_out_and_said() -> None:
    model = model_of("llama")
    cache = new(model, memory=6 * 4 * new(model).facts.token_bytes)
    ids = tokens(50)
    with cache.open(ids) as past:
        assert torch.equal(generate(model, ids, past), generate(model, ids))
    assert past.not_stored == "the cache's memory has no more room"
    assert stored(cache, ids) == 24
    with pytest.raises(InvalidConfig, match="one block of 4 tokens takes"):
        new(model, memory=100)


# -- handles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_handle_is_a_snapshot(arch: str) -> None:
    """LIBRARY-1: two suffixes, then the first again, with two handles open at once."""
    model = model_of(arch)
    cache = new(model)
    prefix, a, b = tokens(40), tokens(7, seed=1), tokens(9, seed=2)
    with cache.open(prefix) as past:
        logits(model, prefix, past)
    with cache.open(join(prefix, a)) as first, cache.open(join(prefix, b)) as second:
        assert first.cached_tokens == second.cached_tokens == 40
        one = logits(model, a, first, use_cache=False)
        two = logits(model, b, second)
        assert second.get_seq_length() == 49
    with cache.open(join(prefix, a)) as third:
        assert third.cached_tokens == 46
    with cache.open(join(prefix, a, b)) as fourth:
        assert fourth.cached_tokens == 47 and first.get_seq_length() == 47
    with cache.open(join(prefix, a), salt="again") as fresh:
        again = logits(model, join(prefix, a), fresh)[:, 40:]
    assert close(one, again)
    assert close(two, logits(model, join(prefix, b))[:, 40:])


@pytest.mark.parametrize("arch", ALL)
def test_all_ids_and_the_suffix_alone_give_the_same_logits(arch: str) -> None:
    """LIBRARY-2."""
    model = model_of(arch)
    cache = new(model)
    prefix, suffix = tokens(35), tokens(6, seed=1)
    ids = join(prefix, suffix)
    with cache.open(prefix) as past:
        logits(model, prefix, past)
    right = logits(model, ids)[:, 35:]
    for given, mask in (
        (suffix, None),
        (ids, None),
        (ids, torch.ones_like(ids)),
        (suffix, torch.ones_like(ids)),
    ):
        with cache.open(ids) as past:
            assert past.cached_tokens == 35
            assert close(logits(model, given, past, attention_mask=mask), right)
            past.close(store=False)
    with cache.open(ids) as past:
        assert torch.equal(generate(model, ids, past), generate(model, ids))
    at = list(cache.facts.parameters).index(KEYWORD)
    with cache.open(ids) as past, torch.no_grad():
        assert close(model(ids, *[None] * (at - 1), past).logits, right[:, -1:])


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_a_padded_batch_equals_single_runs(arch: str) -> None:
    """LIBRARY-3: left padding is exact, right padding is refused."""
    model = model_of(arch)
    cache = new(model)
    prefix = tokens(30)
    rows = [join(prefix, tokens(n, seed=n)) for n in (4, 9, 2)] + [tokens(3, seed=77)]
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row
        mask[i, width - row.shape[1] :] = 1
    singles = [generate(model, row)[0, row.shape[1] :] for row in rows]
    for begun in (False, True):  # first with nothing cached, then with what that stored
        with cache.open(ids, mask) as past:
            out = generate(model, ids, past, attention_mask=mask, pad_token_id=0)[:, width:]
        assert (past.cached_tokens > 0) is begun
        for got, single in zip(out, singles, strict=True):
            assert torch.equal(got[: len(single)], single)
    for row in rows:
        assert stored(cache, row) == row.shape[1]
    with cache.open(ids, mask) as past:
        last = logits(model, ids, past, attention_mask=mask)[:, -1]
    for got, row in zip(last, rows, strict=True):
        assert close(got, logits(model, row)[0, -1])

    with pytest.raises(InvalidRequest, match="pads on the right"):
        cache.open(ids, mask.flip(1))
    with cache.open(ids, mask) as past, pytest.raises(InvalidRequest, match="attention_mask"):
        logits(model, ids, past)


def test_one_shot_prompts_compute_only_what_they_do_not_share() -> None:
    """LIBRARY-4: 200 prompts of 190 shared and 7 new tokens."""
    model = model_of("llama")
    cache = new(model, memory="4MiB")
    shared = tokens(190)
    for turn in range(200):
        ids = join(shared, torch.tensor([[turn + 3]]), tokens(6, seed=turn))
        with cache.open(ids) as past:
            last = logits(model, ids, past)[0, -1]
        assert past.computed_tokens == (7 if turn else 197)
        if turn % 50 == 3:
            assert close(last, logits(model, ids)[0, -1])
    stats = cache.stats()
    assert stats.prompt_tokens == 200 * 197
    assert stats.computed_tokens == 190 + 200 * 7
    assert stats.cached_tokens == 199 * 190


@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_return_sequences": 3, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 8},
    ],
    ids=["beams", "samples", "drafts", "chunks"],
)
def test_other_ways_to_generate_are_exact_and_store_what_was_computed(
    arch: str, settings: dict[str, Any]
) -> None:
    if KEYWORD != "cache" and settings.keys() & {"prompt_lookup_num_tokens", "prefill_chunk_size"}:
        pytest.skip("older transformers do not go on from a cache, or crop windows, in these ways")
    model = model_of(arch)
    cache = new(model)
    ids = join(tokens(20), tokens(20))  # repeats itself, so that drafts are found
    for hit in (0, 39):
        torch.manual_seed(5)
        plain = generate(model, ids, **settings)
        torch.manual_seed(5)
        with cache.open(ids) as past:
            out = generate(model, ids, past, **settings)
        assert torch.equal(out, plain)
        assert past.cached_tokens == hit
    alone = len(out) == 1 and "num_beams" not in settings
    assert stored(cache, out[:1]) >= (out.shape[1] - 1 if alone else 40)


def test_several_threads_share_a_cache() -> None:
    model = model_of("qwen2")
    cache = new(model)
    prompts = [join(tokens(24), tokens(5, seed=n)) for n in range(4)]
    right = [generate(model, ids) for ids in prompts]
    wrong = []

    def work(n: int) -> None:
        for turn in range(4):
            at = (n + turn) % 4
            with cache.open(prompts[at]) as past:
                if not torch.equal(generate(model, prompts[at], past), right[at]):
                    wrong.append((n, turn))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and cache.check() == []
    assert stored(cache, right[0]) == right[0].shape[1] - 1


def test_a_copy_is_a_plain_cache() -> None:
    model = model_of("gemma3")
    cache = new(model)
    ids = tokens(30)
    with cache.open(ids) as past:
        logits(model, ids, past)
        twin = copy.deepcopy(past)
        logits(model, tokens(5, seed=1), twin)
        assert not isinstance(twin, CachedPast)
        assert (past.get_seq_length(), twin.get_seq_length()) == (30, 35)
    assert past.computed_tokens == 30
    assert stored(cache, join(ids, tokens(5, seed=1))) == 30


def test_a_closed_handle_goes_on_as_a_plain_cache() -> None:
    model = model_of("mistral")
    cache = new(model)
    ids, more = tokens(40), tokens(5, seed=1)
    with cache.open(ids) as past:
        logits(model, ids, past)
    assert close(logits(model, more, past), logits(model, join(ids, more))[:, 40:])
    assert stored(cache, join(ids, more)) == 40


# -- nothing wrong is stored ---------------------------------------------------------------------


def test_leaving_by_an_exception_stores_nothing() -> None:
    model = model_of("llama")
    cache = new(model)
    ids = tokens(30)
    with pytest.raises(KeyError), cache.open(ids) as past:
        logits(model, ids, past)
        raise KeyError
    assert past.not_stored == "it was closed without storing"
    assert stored(cache, ids) == 0


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_call_that_failed_half_way_stores_nothing(arch: str) -> None:
    model = model_of(arch)
    cache = new(model)
    ids = tokens(30)

    def fail(*_: object) -> None:
        raise MemoryError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with cache.open(ids) as past:
        with pytest.raises(MemoryError):
            logits(model, ids, past)
        hook.remove()
    assert past.not_stored is not None and "more, or less" in past.not_stored
    assert stored(cache, ids) == 0


def test_what_the_model_was_given_unseen_is_not_stored() -> None:
    model = model_of("llama")
    cache = new(model)
    ids = tokens(30)
    with cache.open(ids) as past, torch.no_grad():
        model.model(input_ids=ids, **{KEYWORD: past})
    assert stored(cache, ids) == 0 and past.not_stored is not None


def test_calls_that_would_make_wrong_kv_are_refused() -> None:
    model = model_of("llama")
    cache = new(model)
    ids, other = tokens(30), tokens(30, seed=1)
    with cache.open(ids) as past:
        logits(model, ids, past)
    embedded = model.get_input_embeddings()(ids)
    holed = torch.ones_like(ids)
    holed[0, 3] = 0
    cases: list[tuple[str, dict[str, Any]]] = [
        ("other tokens than it was opened with", {"input_ids": other}),
        ("other tokens", {"input_ids": ids[:, 20:]}),
        ("inputs_embeds", {"inputs_embeds": embedded}),
        ("hides more", {"input_ids": ids, "attention_mask": holed}),
        ("wanted a column for each", {"input_ids": ids, "attention_mask": holed[:, :5]}),
        ("not \\[rows, tokens\\]", {"input_ids": ids, "attention_mask": holed[None, None]}),
        ("position_ids", {"input_ids": ids[:, 29:], "position_ids": torch.tensor([[3]])}),
        ("labels", {"input_ids": ids, "labels": ids}),
        ("2 rows; the handle has", {"input_ids": ids[:, 29:].repeat(2, 1)}),
    ]
    for reason, given in cases:
        with cache.open(ids) as past:
            if "rows; the" in reason:
                logits(model, ids, past)
            with pytest.raises(InvalidRequest, match=reason):
                model(**given, **{KEYWORD: past})
    model.train()
    try:
        with cache.open(ids) as past, pytest.raises(InvalidRequest, match="training mode"):
            logits(model, ids, past)
    finally:
        model.eval()
    with (
        cache.open(ids) as past,
        torch.autocast("cpu"),
        pytest.raises(InvalidRequest, match="autocast"),
    ):
        logits(model, ids, past)
    assert stored(cache, ids) == 30
    for wrong in ([], [[1.5]], [[[1]]]):
        with pytest.raises(InvalidRequest, match="wanted whole numbers"):
            cache.open(wrong)


def test_positions_that_jump_in_an_answer_keep_it_from_being_stored() -> None:
    model = model_of("llama")
    cache = new(model)
    ids = tokens(10)
    with cache.open(ids) as past:
        logits(model, ids, past)
        logits(model, torch.tensor([[5]]), past, position_ids=torch.tensor([[77]]))
    assert past.not_stored == "positions or mask changed while it generated"
    assert stored(cache, join(ids, torch.tensor([[5]]))) == 10


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_what_was_cropped_is_not_stored(arch: str) -> None:
    model = model_of(arch)
    cache = new(model)
    ids, a, b = tokens(12), tokens(5, seed=1), tokens(4, seed=2)
    with cache.open(ids) as past:
        past.activate_past_recording()  # type: ignore[no-untyped-call]
        logits(model, ids, past)
        logits(model, a, past)
        past.crop(-3)
        logits(model, b, past)
    assert stored(cache, join(ids, a)) == 14
    assert stored(cache, join(ids, a[:, :2], b)) == 18
    with cache.open(join(ids, a)) as past:
        past.activate_past_recording()  # type: ignore[no-untyped-call]
        past.crop(-5)
    assert past.not_stored == "it was cropped into its prefix"


# -- who shares ----------------------------------------------------------------------------------


def test_changed_weights_find_nothing_of_the_old_ones() -> None:
    model = copy.deepcopy(model_of("llama"))
    cache = new(model)
    ids = tokens(30)
    with cache.open(ids) as past:
        logits(model, ids, past)
    assert stored(cache, ids) == 30
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert stored(cache, ids) == 0
    with cache.open(ids) as past:
        assert torch.equal(generate(model, ids, past), generate(model, ids))
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    assert past.not_stored == "the model changed while it was open"
    assert stored(cache, ids) == 0
    with cache.open(ids) as past:
        logits(model, ids, past)
    model.lm_head.weight.data.copy_(before)  # unseen by torch's counts
    cache.clear()
    assert stored(cache, ids) == 0
    model.to(torch.bfloat16)
    with pytest.raises(InvalidRequest, match="was made for torch.float32"):
        cache.open(ids)


def test_a_salt_shares_nothing() -> None:
    model = model_of("llama")
    cache = new(model, tokenizer=build_tokenizer())
    ids = tokens(30)
    for salt in (None, "a", "b"):
        for hit in (0, 29):
            with cache.open(ids, salt=salt) as past:
                logits(model, ids, past)
            assert past.cached_tokens == hit


def test_clearing_waits_for_open_handles_but_not_for_dropped_ones() -> None:
    model = model_of("llama")
    cache = new(model)
    ids = tokens(30)
    with cache.open(ids) as past:
        logits(model, ids, past)
    with cache.open(ids), pytest.raises(CacheBusy):
        cache.clear()
    dropped = cache.open(ids)
    assert dropped.cached_tokens == 29
    del dropped
    cache.clear()
    assert stored(cache, ids) == 0 and cache.stats().cached_blocks == 0


def test_a_dropped_cache_lets_its_model_go() -> None:
    model = model_of("llama")
    hooks = len(model._forward_pre_hooks)
    cache = new(model)
    assert len(model._forward_pre_hooks) == hooks + 1
    del cache
    assert len(model._forward_pre_hooks) == hooks


# -- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ALL)
def test_scores_are_those_of_each_suffix_alone(arch: str) -> None:
    model = model_of(arch)
    cache = new(model)
    prefix = tokens(40)
    suffixes = [tokens(n, seed=n)[0] for n in (5, 1, 12, 3, 3, 8)] + [
        torch.tensor([], dtype=torch.long)
    ]
    right = []
    for suffix in suffixes:
        rows = logits(model, join(prefix, suffix[None])).log_softmax(-1)[0, 39:-1]
        right.append([float(row[token]) for row, token in zip(rows, suffix, strict=True)])
    for batch_size in (None, 2, 1):
        found = cache.score(prefix, suffixes, per_token=True, batch_size=batch_size)
        assert [len(row) for row in found] == [len(row) for row in right]
        for got, wanted in zip(found, right, strict=True):
            assert got == pytest.approx(wanted, abs=1e-3)
    sums = cache.score(prefix[0].tolist(), [suffix.tolist() for suffix in suffixes])
    assert sums == pytest.approx([sum(row) for row in right], abs=1e-2)
    assert cache.score(prefix, []) == []

    of_suffixes = sum(max(0, len(suffix) - 1) for suffix in suffixes)
    stats = cache.stats()
    assert stats.computed_tokens == 40 + 3 + 4 * of_suffixes  # of a resident prefix its last token
    assert stats.prompt_tokens == 4 * (7 * 40 + of_suffixes)
    assert stats.prompt_tokens == stats.cached_tokens + stats.computed_tokens
    assert stored(cache, prefix) == 40


# -- refused -------------------------------------------------------------------------------------


def test_models_whose_past_is_more_than_keys_and_values_are_refused_with_the_reason() -> None:
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        LlamaConfig,
        LlamaForCausalLM,
        Mamba2Config,
        Mamba2ForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    mamba = Mamba2ForCausalLM(
        Mamba2Config(**small, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)
    )
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        new(mamba)
    bart = BartForConditionalGeneration(
        BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1)
    )
    with pytest.raises(UnsupportedModel, match="attends to an encoder"):
        new(bart)
    hybrid = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **small,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    )
    with pytest.raises(UnsupportedModel, match=r"recurrent layers|LinearAttentionLayer"):
        new(hybrid)

    class Secretive(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        """Its answer depends on how many tokens one call brings: on more than keys and values."""

        def forward(self, input_ids: Any = None, cache: Any = None, **rest: Any) -> Any:
            found = super().forward(input_ids=input_ids, **{KEYWORD: cache}, **rest)
            found.logits = found.logits * input_ids.shape[1]
            return found

    config = LlamaConfig(**small, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(UnsupportedModel, match="it keeps more than those"):
        new(Secretive(config))


def test_a_rope_that_turns_earlier_keys_has_its_limit() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=64)[0]
    cache = new(model)
    assert cache.facts.limit == 64
    ids = tokens(60)
    with cache.open(ids) as past:
        assert torch.equal(generate(model, ids, past), generate(model, ids))
    assert stored(cache, ids) == 60
    with pytest.raises(InvalidRequest, match="beyond 64"):
        cache.open(tokens(65))
