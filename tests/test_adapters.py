"""Adapters give what PEFT gives, alone and mixed, and share cached KV with none but themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import Engine
from radixkv.errors import AdapterNotFound, InvalidAdapter, NotFound
from radixkv.kernels.native import unavailable_reason
from radixkv.service.engine.adapters import Adapters, by_adapter, fit, runs_of, split_setting
from radixkv.service.engine.fusing import merge_projections, use_kernels
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.peft import read_peft
from radixkv.service.engine.runner import ModelRunner
from radixkv.service.engine.stream import Stream
from tests.adapter_cases import (
    BLOCK,
    Steps,
    edit_config,
    own_answer,
    own_logits,
    random_ids,
    save_adapter,
)
from tests.tiny_models import build

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 5, "use_rslora": True},
    "patterns": {
        "target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(o|k|gate|down)_proj",
        "rank_pattern": {"o_proj": 9, r"layers\.0\.mlp\.down_proj": 3},
        "alpha_pattern": {"k_proj": 3},
    },
    "one layer": {"layers_to_transform": [1], "exclude_modules": ["gate_proj"]},
}


class World:
    """A tiny model, the adapters of CONFIGS in their directories, and PEFT's models of them."""

    def __init__(self, folder: Path, arch: str, decoder: str) -> None:
        model, tokenizer = build(arch)
        if decoder == "merged":
            assert merge_projections(model) and use_kernels(model)
        self.loaded = LoadedModel.from_model(
            model, tokenizer, name="tiny", decoder="native" if decoder == "native" else "generic"
        )
        self.own: dict[str | None, Any] = {None: build(arch)[0]}
        self.folders = {name: folder / name.replace(" ", "-") for name in CONFIGS}
        for seed, (name, config) in enumerate(CONFIGS.items()):
            self.own[name] = save_adapter(self.folders[name], arch, seed=seed, **config)


@pytest.fixture(
    scope="module",
    params=[(a, d) for a in ("llama", "qwen2") for d in ("native", "generic", "merged")],
    ids=lambda p: "-".join(p),
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    arch, decoder = request.param
    if decoder == "native" and (reason := unavailable_reason()):
        pytest.skip(reason)
    return World(tmp_path_factory.mktemp("adapters"), arch, decoder)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_peft_in_prefill_chunks_and_decoding(world: World, name: str) -> None:
    adapter = fit(read_peft(world.folders[name]), world.loaded, name="a")
    steps, ids = Steps(ModelRunner(world.loaded, 64, BLOCK)), random_ids(75, 1)
    cuts = [0, 50, 72, 73, 74, 75]
    parts = [steps.run((0, ids, a, b, adapter))[0] for a, b in zip(cuts, cuts[1:], strict=False)]
    wanted = own_logits(world.own[name], ids)
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted, own_logits(world.own[None], ids), atol=0.5)


def test_a_mixed_step_gives_each_row_what_its_own_adapter_gives(world: World) -> None:
    """Prefills and decodes of the model alone and of every adapter, in an order that mixes them."""
    fitted = {n: fit(read_peft(f), world.loaded, name=n) for n, f in world.folders.items()}
    names = ["all", None, "some", "all", None, "patterns", "one layer", "some"]
    lens = [40, 30, 1, 1, 1, 60, 1, 20]
    steps = Steps(ModelRunner(world.loaded, 16 * len(names), BLOCK))
    prompts = [random_ids(90, seed) for seed in range(len(names))]
    adapters = [None if name is None else fitted[name] for name in names]
    before = [(i, prompts[i], 0, 90 - n, adapters[i]) for i, n in enumerate(lens)]
    steps.run(*before)
    work = [(i, prompts[i], 90 - n, 90, adapters[i]) for i, n in enumerate(lens)]
    for got, name, ids, n in zip(steps.run(*work), names, prompts, lens, strict=True):
        wanted = own_logits(world.own[name], ids)[-n:]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    last = [sum(lens[: i + 1]) - 1 for i in range(len(lens))]
    (got,) = steps.run(*work, logit_rows=last)  # the last layer computes these rows alone
    wanted = torch.stack(
        [own_logits(world.own[n], p)[-1] for n, p in zip(names, prompts, strict=True)]
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_greedy_answers_equal_peft_cold_and_warm_in_a_mixed_batch(world: World) -> None:
    """IDENTITY-1: one prompt under every adapter and none; each hits its own and no other's."""
    with Engine(world.loaded, kv_memory="2MiB", max_batch_tokens=48) as engine:
        for name, folder in world.folders.items():
            engine.load_adapter(name.replace(" ", "-"), folder)
        names = [None, *CONFIGS, None, "all"]
        prompts = [random_ids(70, 5)] * (1 + len(CONFIGS)) + [random_ids(33, 6)] * 2
        expected = [
            own_answer(world.own[name], ids, 8) for name, ids in zip(names, prompts, strict=True)
        ]
        assert len(set(map(tuple, expected))) == len(expected), "the adapters make no difference"
        for hit in (0, 1):
            streams = [
                engine.stream_generate(ids, adapter=name and name.replace(" ", "-"), **GREEDY)
                for name, ids in zip(names, prompts, strict=True)
            ]
            results = [stream.result() for stream in streams]
            assert [list(r.token_ids) for r in results] == expected
            cached = [r.usage.cached_tokens for r in results]
            assert cached == [hit * (len(ids) - 1) for ids in prompts]
        assert engine.check() == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("llama"), "llama", "auto")


@pytest.fixture
def engine(llama: World) -> Iterator[Engine]:
    with Engine(llama.loaded, kv_memory="2MiB") as engine:
        engine.load_adapter("a", llama.folders["all"])
        yield engine
        assert engine.drain(10.0)
        assert engine.check() == []


def _ask(engine: Engine, ids: list[int], **origin: Any) -> tuple[int, list[int]]:
    result = engine.generate(ids, **GREEDY, **origin)
    return result.usage.cached_tokens, list(result.token_ids)


def test_another_adapter_under_the_same_name_finds_nothing(engine: Engine, llama: World) -> None:
    """IDENTITY-2: the name stays, the weights change; and going back finds the old KV."""
    ids = random_ids(60, 2)
    first = _ask(engine, ids, adapter="a")
    assert first == (0, own_answer(llama.own["all"], ids, 8))
    assert _ask(engine, ids, adapter="a")[0] == 59
    engine.load_adapter("a", llama.folders["some"])
    assert _ask(engine, ids, adapter="a") == (0, own_answer(llama.own["some"], ids, 8))
    engine.load_adapter("b", llama.folders["all"])
    assert _ask(engine, ids, adapter="b") == (59, first[1])


def test_another_scale_finds_nothing(engine: Engine, llama: World, tmp_path: Path) -> None:
    """IDENTITY-1: by the config's alpha, and by what the caller asks for."""
    ids = random_ids(60, 3)
    _ask(engine, ids, adapter="a")
    louder = save_adapter(tmp_path, seed=0, lora_alpha=16)
    engine.load_adapter("a", tmp_path)
    assert _ask(engine, ids, adapter="a") == (0, own_answer(louder, ids, 8))
    engine.load_adapter("a", llama.folders["all"], scale=2.0)
    assert _ask(engine, ids, adapter="a") == (0, own_answer(louder, ids, 8))
    engine.load_adapter("a", llama.folders["all"], scale=0.0)  # adds nothing, and shares nothing
    assert _ask(engine, ids, adapter="a") == (0, own_answer(llama.own[None], ids, 8))
    assert _ask(engine, ids)[0] == 0


def test_names_salts_and_digests_are_never_taken_for_one_another(engine: Engine) -> None:
    """HASH-4, SECURITY-3: a salt, a label or a tenant that spells an adapter's name or digest."""
    ids = random_ids(60, 4)
    (adapter,) = engine.adapters.all()
    assert _ask(engine, ids, adapter="a")[0] == 0
    for forged in ("a", adapter.digest, f"tiny:{adapter.name}", str(adapter.path)):
        assert _ask(engine, ids, salt=forged)[0] == 0
        assert _ask(engine, ids, salt=forged, adapter="a")[0] == 0
        assert _ask(engine, ids, tenant=forged)[0] == 0
    assert _ask(engine, ids, cache_key="a")[0] == 0, "the base model's first use of the prompt"
    assert _ask(engine, ids, adapter="a", cache_key="x")[0] == 59


def test_a_running_request_ends_with_the_adapter_it_began_with(
    engine: Engine, llama: World
) -> None:
    """ADMIN-2: reload and unload while it runs; its KV stays its own."""
    ids = random_ids(40, 7)
    ask = GREEDY | {"max_tokens": 900}
    expected = engine.generate(ids, adapter="a", **ask).token_ids
    assert list(expected[:8]) == own_answer(llama.own["all"], ids, 8)
    for change in ("reload", "unload"):
        engine.load_adapter("a", llama.folders["all"])
        stream = engine.stream_generate(ids, adapter="a", salt=change, **ask)
        deltas = iter(stream)  # letting go of it would give the request up
        next(deltas)

        def between_two_steps(change: str = change, stream: Stream = stream) -> bool:
            if change == "reload":
                engine.load_adapter("a", llama.folders["some"])
            else:
                engine.unload_adapter("a")
            return not stream.finished

        assert engine._core.call(between_two_steps).result()
        if change == "reload":
            other = engine.generate(ids, adapter="a", salt=change, **GREEDY)
            assert list(other.token_ids) == own_answer(llama.own["some"], ids, 8)
        else:
            with pytest.raises(AdapterNotFound):
                engine.generate(ids, adapter="a", salt=change, **GREEDY)
        assert stream.result().token_ids == expected


def test_the_models_new_weights_are_under_the_adapter_too(tmp_path: Path) -> None:
    """ADMIN-1: base weights replaced in place; the adapter's KV of before is not used."""
    model, tokenizer = build("llama")
    own = save_adapter(tmp_path)
    with Engine(LoadedModel.from_model(model, tokenizer, name="t"), kv_memory="1MiB") as engine:
        engine.load_adapter("a", tmp_path)
        ids = random_ids(50, 8)
        assert _ask(engine, ids, adapter="a")[1] == own_answer(own, ids, 8)
        name = "model.layers.0.self_attn.q_proj"
        changed = model.get_submodule(name).weight.detach() * 0.5
        engine.update_weights({f"{name}.weight": changed})
        with torch.no_grad():
            own.base_model.model.get_submodule(name).base_layer.weight.copy_(changed)
        assert _ask(engine, ids, adapter="a") == (0, own_answer(own, ids, 8))


def test_an_adapter_that_is_not_loaded_is_named(engine: Engine) -> None:
    for name in ("b", "", "A", "a "):
        with pytest.raises(AdapterNotFound) as error:
            engine.generate([5, 6, 7], adapter=name, **GREEDY)
        assert (error.value.status, error.value.code) == (404, "model_not_found")
    with pytest.raises(AdapterNotFound):
        engine.unload_adapter("b")
    assert engine.stats().num_waiting == 0


def test_a_failed_load_leaves_what_was_loaded(engine: Engine, tmp_path: Path) -> None:
    save_adapter(tmp_path, "qwen2", r=3, target_modules=["q_proj"])
    edit_config(tmp_path, r=2)
    before = engine.adapters.all()
    with pytest.raises(InvalidAdapter):
        engine.load_adapter("a", tmp_path)
    assert engine.adapters.all() == before
    for name in ("", "a/b", "../a", "a:b", "-a", "a b", "x" * 129):
        with pytest.raises(InvalidAdapter, match="cannot name an adapter"):
            engine.load_adapter(name, tmp_path)


def test_an_adapter_of_another_model_is_refused_by_the_layer_at_fault(
    llama: World, tmp_path: Path
) -> None:
    def refused(words: str, **config: Any) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        save_adapter(folder, **config)
        with pytest.raises(InvalidAdapter) as error:
            fit(read_peft(folder), llama.loaded, name="x")
        assert words in str(error.value)

    refused("128 outputs", arch="qwen3", target_modules=["q_proj"])
    refused("changes model.layers.2.", arch="gemma3", target_modules=["gate_proj"])
    refused("changes lm_head", target_modules=["q_proj", "lm_head"])
    folder = tmp_path / "more"
    save_adapter(folder, target_modules=["q_proj"])
    edit_config(folder, target_modules=["k_proj"])
    with pytest.raises(InvalidAdapter, match="q_proj, which its config leaves out"):
        fit(read_peft(folder), llama.loaded, name="x")
    edit_config(folder, target_modules=["q_proj", "k_proj"])
    with pytest.raises(InvalidAdapter, match="k_proj and 1 more, of which it has no weights"):
        fit(read_peft(folder), llama.loaded, name="x")


def test_rows_of_one_adapter_are_brought_together_and_none_is_moved_without_need(
    llama: World,
) -> None:
    adapters = Adapters(llama.loaded)
    a, b = (adapters.load(name, llama.folders["some"]) for name in "ab")
    assert a.digest == b.digest and adapters.all() == (a, b)
    works = [(None, 0), (a, 1), (b, 2), (a, 3), (None, 4), (b, 5)]
    found = by_adapter(works, lambda work: work[0])
    assert [i for _, i in found] == [0, 4, 1, 3, 2, 5]
    runs = runs_of([adapter for adapter, _ in found], [3, 1, 1, 2, 1, 1])
    assert [(run.adapter.name, run.start, run.stop) for run in runs] == [("a", 4, 7), ("b", 7, 9)]
    same = [(a, 0), (a, 1)]
    assert by_adapter(same, lambda work: work[0]) is same


def test_what_one_adapter_left_in_host_memory_is_no_hit_of_another(tmp_path: Path) -> None:
    """IDENTITY-3: the same prompts under two adapters, swapped out and in; each answers its own."""
    model, tokenizer = build("llama")
    own = {name: save_adapter(tmp_path / name, seed=i) for i, name in enumerate("ab")}
    loaded = LoadedModel.from_model(model, tokenizer, name="t")
    prompts = [random_ids(40, i) for i in range(2)]
    with Engine(loaded, kv_memory="1MiB") as roomy:
        per_block = 2**20 // roomy.stats().num_blocks
    with Engine(loaded, kv_memory=16 * per_block, lookahead_tokens=0) as engine:
        for name in own:
            engine.load_adapter(name, tmp_path / name)
        asked = [(name, ids) for ids in prompts for name in own]
        ask = GREEDY | {"max_tokens": 60}
        submit = [partial(engine.stream_generate, ids, adapter=name, **ask) for name, ids in asked]
        # All between the same two steps, so that they run at once.
        streams = engine._core.call(lambda: [ask_one() for ask_one in submit]).result()
        results = [stream.result() for stream in streams]
        stats = engine.stats()
        assert stats.preemptions["swap"] > 0 and stats.swapped_in_tokens_total > 0
        assert [result.usage.cached_tokens for result in results] == [0] * len(asked)
        for (name, ids), result in zip(asked, results, strict=True):
            assert list(result.token_ids) == own_answer(own[name], ids, 60)
        assert engine.check() == []


def test_a_setting_names_an_adapter_and_its_directory() -> None:
    assert split_setting("sql=/a/b=c") == ("sql", Path("/a/b=c"))
    for wrong in ("sql", "sql=", "=/a", "a:b=/a"):
        with pytest.raises(InvalidAdapter):
            split_setting(wrong)


def test_an_adapter_that_is_not_there_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no adapter in .*nowhere"):
        Engine("a model that is nowhere either", adapter=(f"a={tmp_path / 'nowhere'}",))
