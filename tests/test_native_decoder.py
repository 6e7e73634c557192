"""The compiled decoder: the logits of transformers, and bits that depend on the row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels.layout import KVPool
from radixkv.kernels.native import unavailable_reason
from radixkv.kernels.native_decoder import NativeDecoder
from radixkv.kernels.plan import AttentionPlan
from radixkv.service.engine.models.llama import FAMILIES, build_decoder, reason_against
from tests.tiny_models import build

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no C compiler")

BLOCK = 16
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama of odd sizes": ("llama", {"hidden_size": 52, "intermediate_size": 75}),
    "llama of many heads": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "llama, long rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}  # fmt: skip


def _decoder(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, NativeDecoder]:
    arch, fields = FIELDS[name]
    model, _ = build(arch, dtype=dtype, **fields)
    with torch.no_grad():  # biases begin as zeros, and norms as ones: neither would be seen
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    windows = [getattr(model.config, "sliding_window", None) if arch == "mistral" else None] * 2
    assert reason_against(model) is None
    return model, build_decoder(model, windows, 512)


class Device:
    """A pool, and the tables of sequences whose blocks lie in it in a shuffled order."""

    def __init__(self, decoder: NativeDecoder, dtype: torch.dtype = torch.float32) -> None:
        w = decoder.weights
        self.decoder = decoder
        self.pool = KVPool.allocate(len(w.layers), 128, BLOCK, w.kv_heads, w.head_dim, dtype)
        self.pool.data.fill_(torch.nan)
        self.order = np.random.default_rng(3).permutation(128).reshape(4, 32).astype(np.int32)

    def run(self, *work: tuple[int, torch.Tensor, int, int]) -> list[torch.Tensor]:
        """Compute tokens [start, stop) of each (place, ids, start, stop); all rows' logits."""
        plan = AttentionPlan.build(
            [stop - start for _, _, start, stop in work],
            [stop for _, _, _, stop in work],
            self.order[[place for place, _, _, _ in work]],
            BLOCK,
        )
        tokens = torch.cat([ids[start:stop] for _, ids, start, stop in work])
        logits = self.decoder.forward(tokens, plan, self.pool, torch.arange(len(tokens)))
        return list(torch.split(logits, [stop - start for _, _, start, stop in work]))


def _ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 300, n))


@pytest.mark.parametrize("name", FIELDS)
def test_its_logits_are_those_of_transformers(name: str) -> None:
    model, decoder = _decoder(name)
    ids = _ids(83)
    with torch.inference_mode():
        wanted = model(ids[None]).logits[0]
    (got,) = Device(decoder).run((0, ids, 0, 83))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_weights_are_multiplied_exactly(name: str) -> None:
    """Closer to the float32 model of the same weights than transformers is in bfloat16."""
    model, decoder = _decoder(name, torch.bfloat16)
    ids = _ids(60)
    with torch.inference_mode():
        rounded = model(ids[None]).logits[0].float()
        wanted = model.float()(ids[None]).logits[0]
    (exact,) = Device(decoder).run((0, ids, 0, 60))
    torch.testing.assert_close(exact, wanted, rtol=1e-3, atol=1e-3)
    (got,) = Device(decoder, torch.bfloat16).run((0, ids, 0, 60))
    error = float((got - wanted).norm() / wanted.norm())
    assert error < 0.02 and error < float((rounded - wanted).norm() / wanted.norm())


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(("llama", "mistral", "llama with biases")),
    cuts=st.lists(st.integers(1, 299), max_size=6, unique=True),
    company=st.integers(0, 3),
    threads=st.sampled_from((1, 2)),
)
def test_a_tokens_bits_are_the_same_in_any_chunk_and_company(
    name: str, cuts: list[int], company: int, threads: int
) -> None:
    """DETERM-1, DETERM-2: all at once and alone, or in pieces beside others on more threads."""
    _, decoder = _decoder(name)
    ids = _ids(300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (wanted,) = Device(decoder).run((0, ids, 0, 300))
        torch.set_num_threads(threads)
        device, found = Device(decoder), []
        stops = [*sorted(cuts), 300]
        for start, stop in zip([0, *stops], stops, strict=False):
            others = [(i, _ids(300, i), start, stop) for i in range(1, 1 + company)]
            found.append(device.run(*others, (0, ids, start, stop))[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(found), wanted)


def test_only_the_rows_asked_for_get_logits() -> None:
    _, decoder = _decoder("llama")
    device, ids = Device(decoder), _ids(40)
    (wanted,) = device.run((0, ids, 0, 40))
    plan = AttentionPlan.build([40], [40], device.order[:1], BLOCK)
    got = decoder.forward(ids, plan, device.pool, torch.tensor([39, 3]))
    assert torch.equal(got, wanted[[39, 3]])
    assert decoder.forward(ids, plan, device.pool, torch.tensor([], dtype=torch.int64)).numel() == 0


def test_what_would_read_outside_is_refused() -> None:
    _, decoder = _decoder("llama")
    device, ids = Device(decoder), _ids(5)
    plan = AttentionPlan.build([5], [5], device.order[:1], BLOCK)
    rows = torch.arange(5)
    with pytest.raises(IndexError, match="tokens must lie in 0..309"):
        decoder.forward(ids + 400, plan, device.pool, rows)
    with pytest.raises(IndexError, match="logit_rows must lie in 0..4"):
        decoder.forward(ids, plan, device.pool, rows + 1)
    far = AttentionPlan.build([5], [5], device.order[:1] + 128, BLOCK)
    with pytest.raises(IndexError, match="block_tables"):
        decoder.forward(ids, far, device.pool, rows)
    long = AttentionPlan.build([5], [600], np.zeros((1, 38), np.int32), BLOCK)
    with pytest.raises(ValueError, match="kv_lens must be at most 512"):
        decoder.forward(ids, long, device.pool, rows)
    other = KVPool.allocate(3, 8, BLOCK, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="pool must be of this model"):
        decoder.forward(ids, plan, other, rows)


def test_what_it_does_not_compute_is_left_to_transformers() -> None:
    """CORRECT-7: a model that is unlike its family in anything is not taken for one of it."""
    gemma, _ = build("gemma3")
    assert "is not one of" in str(reason_against(gemma))
    assert "activation" in str(reason_against(build("llama", hidden_act="gelu")[0]))
    assert "multiple of 16" in str(reason_against(build("llama", head_dim=8)[0]))
    hooked, _ = build("llama")
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "model.layers.1.mlp has a forward hook" in str(reason_against(hooked))
    more, _ = build("llama")
    more.model.layers[0].register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
    assert "model.layers.N.gain" in str(reason_against(more))
    layer, _ = build("llama")
    layer.model.layers[0].mlp.up_proj.__class__ = type("Adapted", (torch.nn.Linear,), {})
    assert "layers of type Adapted" in str(reason_against(layer))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "rotary" in str(reason_against(build("llama", rope_parameters=rope)[0]))
    assert len(FAMILIES) == 4
