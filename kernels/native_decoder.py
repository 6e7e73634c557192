"""Calls the compiled decoder: all layers of a Llama-like model over one step's rows, in one call.

Knows packed weights, plans and pools; nothing of transformers, sequences or requests.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.kernels.checks import expect
from radixkv.kernels.layout import KVPool
from radixkv.kernels.native import load_library
from radixkv.kernels.native_adapters import AdaptedRows, AdaptedRowsStruct, AdapterRun
from radixkv.kernels.native_attention import TYPES, prepare
from radixkv.kernels.packing import PackedLinear, PackedStruct
from radixkv.kernels.plan import AttentionPlan

DECODER_NUMERICS_VERSION = 1003
"""Changes when this decoder gives other low bits; apart from ``layout.NUMERICS_VERSION``."""

_INT, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, PackedStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("before", "after", "q_norm", "k_norm", "k", "v")),
        ("windowed", _INT),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", _POINTER),
        *((name, _INT) for name in ("num_layers", "hidden", "q_heads", "kv_heads", "head_dim")),
        *((name, _INT) for name in ("pool_type", "embeddings_type", "vocab")),
        *((name, _POINTER) for name in ("embeddings", "norm", "head", "cosines", "sines")),
        *((name, _FLOAT) for name in ("epsilon", "scale")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("rows", "num_logits", "num_threads")),
        *((name, _POINTER) for name in ("tokens", "positions", "slots", "logit_rows")),
        *((name, _POINTER) for name in ("whole", "windowed")),
        *((name, _POINTER) for name in ("hidden", "normed", "attended", "qkv", "gated", "logits")),
        *((name, AdaptedRowsStruct) for name in ("adapted", "wanted_adapted")),
        *((name, _POINTER) for name in ("low", "deltas")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer; norms in float32."""

    qkv: PackedLinear  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    out: PackedLinear  # [hidden, q_heads * head_dim]
    gate_up: PackedLinear  # by pack_gated
    down: PackedLinear  # [hidden, intermediate], padded as gate_up is
    before: torch.Tensor  # [hidden]
    after: torch.Tensor  # [hidden]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A Llama-like decoder: RMS norms, rotary positions, grouped heads, gated SiLU."""

    layers: Sequence[DecoderLayer]
    embeddings: torch.Tensor  # [vocab, hidden] float32 or bfloat16
    norm: torch.Tensor  # [hidden] float32
    head: PackedLinear  # [vocab, hidden]
    cosines: torch.Tensor  # [positions, head_dim / 2] float32
    sines: torch.Tensor
    q_heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    scale: float  # of q . k


class NativeDecoder:
    """A decoder ready to run over pools of one shape. For one thread at a time.

    Activations are float32 whatever the weights and the pool are. The bits of a row's logits depend
    on its tokens, positions and adapter alone: not on the batch, the chunks, or what was found in
    the cache.
    """

    def __init__(self, weights: DecoderWeights) -> None:
        self.weights = weights
        windows = {layer.window for layer in weights.layers} - {None}
        expect(len(windows) <= 1, "the layers' windows", "of one size", windows)
        self._window = next(iter(windows), None)
        self._layers = (_DecoderLayer * len(weights.layers))()
        for to, layer in zip(self._layers, weights.layers, strict=True):
            to.qkv, to.out = layer.qkv.struct, layer.out.struct
            to.gate_up, to.down = layer.gate_up.struct, layer.down.struct
            to.before, to.after = layer.before.data_ptr(), layer.after.data_ptr()
            to.q_norm = None if layer.q_norm is None else layer.q_norm.data_ptr()
            to.k_norm = None if layer.k_norm is None else layer.k_norm.data_ptr()
            to.windowed = layer.window is not None
        self._decoder = _Decoder(
            layers=ctypes.addressof(self._layers),
            num_layers=len(weights.layers),
            hidden=len(weights.norm),
            q_heads=weights.q_heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            embeddings_type=TYPES[weights.embeddings.dtype],
            vocab=weights.head.out_features,
            embeddings=weights.embeddings.data_ptr(),
            norm=weights.norm.data_ptr(),
            head=ctypes.addressof(weights.head.struct),
            cosines=weights.cosines.data_ptr(),
            sines=weights.sines.data_ptr(),
            epsilon=weights.epsilon,
            scale=weights.scale,
        )
        self._pool: KVPool | None = None
        self._scratch = torch.empty(0)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        plan: AttentionPlan,
        pool: KVPool,
        logit_rows: torch.Tensor,
        adapters: Sequence[AdapterRun] = (),
    ) -> torch.Tensor:
        """Compute the new tokens, write their keys and values, and return [R, vocab] float32.

        tokens      [T] int64, T = plan.num_tokens
        logit_rows  [R] int64, rows of T whose logits are wanted
        adapters    runs of rows under an adapter, none overlapping; few long ones are fastest
        """
        w, rows = self.weights, len(tokens)
        expect(
            tokens.dtype == torch.int64 and rows == plan.num_tokens, "tokens", "int64 [T]", tokens
        )
        expect(logit_rows.dtype == torch.int64, "logit_rows", "int64", logit_rows)
        expect(
            plan.max_kv_len <= len(w.cosines),
            "kv_lens",
            f"at most {len(w.cosines)}",
            plan.max_kv_len,
        )
        vocab = len(w.embeddings)
        for name, ids, end in (("tokens", tokens, vocab), ("logit_rows", logit_rows, rows)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < end:
                raise IndexError(f"{name} must lie in 0..{end - 1}")
        self._use(pool)
        shape = (w.q_heads, w.kv_heads, w.head_dim, torch.float32, pool.dtype)
        whole = prepare(plan, *shape, None, num_blocks=pool.num_blocks)
        windowed = None
        if self._window is not None:
            windowed = prepare(plan, *shape, self._window, num_blocks=pool.num_blocks)
        adapted = AdaptedRows(adapters, rows, logit_rows)
        num_threads = torch.get_num_threads()
        first, most_rows = w.layers[0], max(rows, len(logit_rows))
        hidden, attended = len(w.norm), w.q_heads * w.head_dim
        widths = (hidden, hidden, attended, first.qkv.out_features, first.down.in_features)
        sizes = [most_rows * width for width in widths]
        if adapters:
            sizes.append(adapted.scratch(num_threads))
            sizes.append(most_rows * 2 * first.down.in_features if adapted.gated else 0)
        if sum(sizes) > len(self._scratch):
            self._scratch = torch.empty(sum(sizes))
        starts = [self._scratch.data_ptr()]
        for size in sizes[:-1]:
            starts.append(starts[-1] + 4 * size)
        logits = torch.empty(len(logit_rows), w.head.out_features)
        call = _Pass(
            rows,
            len(logit_rows),
            num_threads,
            tokens.data_ptr(),
            plan.positions.data_ptr(),
            plan.slots.data_ptr(),
            logit_rows.data_ptr(),
            whole.step,
            None if windowed is None else windowed.step,
            *starts[: len(widths)],
            logits.data_ptr(),
            adapted.all,
            adapted.wanted,
            *starts[len(widths) :],
        )
        load_library().radixkv_decoder(ctypes.byref(self._decoder), ctypes.byref(call))
        return logits

    def _use(self, pool: KVPool) -> None:
        if pool is self._pool:
            return
        w = self.weights
        shape = (pool.num_layers, pool.num_kv_heads, pool.head_dim)
        expect(shape == (len(w.layers), w.kv_heads, w.head_dim), "pool", "of this model", pool.data)
        expect(pool.device.type == "cpu" and pool.dtype in TYPES, "pool", "on the CPU", pool.data)
        for layer, k, v in zip(self._layers, pool.k, pool.v, strict=True):
            layer.k, layer.v = k.data_ptr(), v.data_ptr()
        self._decoder.pool_type = TYPES[pool.dtype]
        self._pool = pool
