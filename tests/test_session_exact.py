"""Sessions beside transformers: through forks and rewinds, fp32 greedy ids equal ``generate``'s."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv import Engine, Session
from radixkv.service.engine.attention import own_attention
from radixkv.service.engine.loading import LoadedModel
from radixkv.service.engine.runner import ModelRunner
from tests import tiny_models

NEW = 9  # more than half a block of 16: borders are crossed by prompts and by answers
Asked = list[tuple[tuple[int, ...], tuple[int, ...]]]


def by_transformers(loaded: LoadedModel, ids: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers' own generate says, with its own attention and cache."""
    with own_attention(loaded.model, "eager") as model, torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(out[0, len(ids) :].tolist())


def talk(session: Session, asked: Asked, *texts: str) -> None:
    """Send ``texts`` one after the other; note each prompt and its answer."""
    for text in texts:
        turn = session.send(text).result()
        asked.append((session.tokens[: turn.usage.prompt_tokens], turn.token_ids))
        assert len(turn.token_ids) == NEW


def conversation(engine: Engine, asked: Asked, **sampling: Any) -> None:
    """A tree of turns, three deep: forks, forks of forks, rewinds, and sends side by side."""
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True} | sampling
    with engine.session(system="You are the user of a system.", **ask) as s:
        talk(s, asked, "hello", "and you")
        one, two, three = s.fork(3)
        talk(one, asked, "so it is", "is it")
        talk(two, asked, "the other one and the assistant " * 4)
        deep = one.branch()
        one.rewind(2)
        talk(one, asked, "so it was")
        talk(deep, asked, "in the end")
        together = [(each, each.send("at once")) for each in (one, two, three, deep, s)]
        for each, reply in together:
            turn = reply.result()
            asked.append((each.tokens[: turn.usage.prompt_tokens], turn.token_ids))
        s.rewind(1)
        talk(s, asked, "an other way")
        s.rewind(0)
        talk(s, asked, "from the beginning")
        for each in (one, two, three, deep):
            each.close()


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_every_answer_of_a_tree_of_turns_equals_transformers(arch: str) -> None:
    model, tokenizer = tiny_models.build(arch)
    loaded = LoadedModel.from_model(model, tokenizer, name=f"tiny-{arch}")
    asked: Asked = []
    settings: dict[str, Any] = {"max_model_len": 512, "pin_budget": 0.5, "max_batch_tokens": 48}
    memory = 96 * ModelRunner.bytes_per_block(loaded, 16)
    with Engine(loaded, kv_memory=memory, **settings) as engine:
        conversation(engine, asked)
        assert engine.check() == [] and engine.pins.of() == []
    for prompt, answer in asked:
        assert answer == by_transformers(loaded, prompt)


def test_preempted_and_evicted_branches_still_say_the_same() -> None:
    """A pool so small that branches asked at once take each other's blocks."""
    model, tokenizer = tiny_models.build("llama")
    loaded = LoadedModel.from_model(model, tokenizer, name="tiny")
    asked: Asked = []
    memory = 24 * ModelRunner.bytes_per_block(loaded, 16)
    with Engine(loaded, kv_memory=memory, max_model_len=320, lookahead_tokens=0) as engine:
        conversation(engine, asked)
        assert engine.stats().cache.evicted_blocks > 0
        assert engine.check() == []
    for prompt, answer in asked:
        assert answer == by_transformers(loaded, prompt)
