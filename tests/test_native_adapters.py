"""Under adapters too, the compiled decoder's bits depend on the row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.native import unavailable_reason
from radixkv.kernels.native_adapters import AdapterRun, pack_adapter
from radixkv.service.engine.adapters import Adapter, fit
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.peft import read_peft
from radixkv.service.engine.runner import ModelRunner
from tests.adapter_cases import BLOCK, Steps, random_ids, save_adapter
from tests.tiny_models import build

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no C compiler")
LENGTH = 120


class World:
    """A model, three adapters and none, and the logits of each alone in one piece."""

    def __init__(self, folder: Path) -> None:
        model, tokenizer = build("llama")
        self.loaded = LoadedModel.from_model(model, tokenizer, name="tiny")
        configs: tuple[dict[str, Any], ...] = (
            {},
            {"target_modules": ["q_proj", "down_proj"], "r": 3},
            {"r": 17},
        )
        self.adapters: list[Adapter | None] = [None]
        for i, config in enumerate(configs):
            save_adapter(folder / str(i), seed=i, **config)
            self.adapters.append(fit(read_peft(folder / str(i)), self.loaded, name=str(i)))
        self.prompts = [random_ids(LENGTH, seed) for seed in range(5)]
        self.alone = [
            [self.steps().run((0, ids, 0, LENGTH, adapter))[0] for adapter in self.adapters]
            for ids in self.prompts
        ]

    def steps(self) -> Steps:
        return Steps(ModelRunner(self.loaded, 80, BLOCK))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True),
    company=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    threads=st.sampled_from((1, 2)),
)
def test_a_tokens_bits_are_the_same_whatever_adapters_are_beside_it(
    world: World, cuts: list[int], company: list[int], threads: int
) -> None:
    """DETERM-1, DETERM-2: any chunks, any mixture; the model alone has the bits it always has."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        steps = world.steps()
        stops = sorted([*cuts, LENGTH])
        parts: list[list[torch.Tensor]] = [[] for _ in company]
        for start, stop in zip([0, *stops], stops, strict=False):
            work = [
                (i, world.prompts[i], start, stop, world.adapters[kind])
                for i, kind in enumerate(company)
            ]
            for part, logits in zip(parts, steps.run(*work), strict=True):
                part.append(logits)
    finally:
        torch.set_num_threads(before)
    for i, (part, kind) in enumerate(zip(parts, company, strict=True)):
        assert torch.equal(torch.cat(part), world.alone[i][kind])


def test_the_rows_that_get_logits_are_adapted_wherever_they_lie(world: World) -> None:
    ids, (none, first, _, third) = world.prompts, world.adapters
    work = [(0, ids[0], 0, 90, first), (1, ids[1], 0, 5, none), (2, ids[2], 0, 30, third)]
    (got,) = world.steps().run(*work, logit_rows=[124, 3, 92, 89])
    alone = world.alone
    wanted = [alone[2][3][29], alone[0][1][3], alone[1][0][2], alone[0][1][89]]
    assert torch.equal(got, torch.stack(wanted))
    (nothing,) = world.steps().run(*work, logit_rows=[])
    assert nothing.shape[0] == 0


def test_what_does_not_fit_is_refused(world: World) -> None:
    factors = (torch.zeros(2, 64), torch.zeros(64, 3))
    with pytest.raises(ValueError, match="b must be"):
        pack_adapter([{"q_proj": factors}], padded_features=96)
    with pytest.raises(ValueError, match="part must be one of q_proj"):
        pack_adapter([{"lm_head": factors}], padded_features=96)
    adapter = world.adapters[1]
    assert adapter is not None and adapter.native is not None
    decoder = world.loaded.decoder
    assert decoder is not None
    from radixkv.kernels.native_adapters import AdaptedRows

    for runs in ([(0, 3), (2, 5)], [(0, 9)], [(3, 3)]):
        with pytest.raises(ValueError, match="runs must be apart"):
            AdaptedRows([AdapterRun(adapter.native, *run) for run in runs], 5, torch.arange(5))
