"""The arithmetic that all attention kernels share, as functions for Triton: rows, keys, softmax.

Knows tiles of M rows (queries x heads of one key head) and of keys behind a block table; nothing of
who asked for them. A softmax under way is three things a row: ``peak``, the largest score so far in
units of log 2; ``total``, the sum of 2 ** (score - peak); ``sums``, the same weights times values.
"""

import triton
import triton.language as tl

from radixkv.kernels.triton_quant import to_values

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(
    q, row, head, live, row_stride, head_stride,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load [M, HEAD_PAD]: head ``head[m]`` of row ``row[m]`` of q, zeros where not ``live[m]``."""
    d = tl.arange(0, HEAD_PAD)
    at = row.to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + d[None, :]
    queries = tl.load(q + at, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    return queries


@triton.jit
def load_slots(
    table, tile, live, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Say where the tokens tile .. tile + TILE of a sequence lie: slots, int64 [TILE].

    ``tile`` is a multiple of TILE. If MASKED, entries of the table are read for live tokens only.
    """
    offset = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + tile // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + tile % BLOCK_SIZE + offset
    t = tile + offset
    if MASKED:
        block = tl.load(table + t // BLOCK_SIZE, mask=live, other=0)
    else:
        block = tl.load(table + t // BLOCK_SIZE)
    return block.to(tl.int64) * BLOCK_SIZE + t % BLOCK_SIZE


@triton.jit
def load_scales(scales, entry, live, MASKED: tl.constexpr):
    """Load the scales of the vectors that ``load_vectors`` loads: float32 [TILE]."""
    if MASKED:
        return tl.load(scales + entry, mask=live, other=0.0)
    return tl.load(scales + entry)


@triton.jit
def load_vectors(
    pool, entry, live, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load [TILE, HEAD_PAD] of ``dtype``: the vectors ``entry`` = slot * heads + head of a pool.

    What is not live comes as 0: whatever lies there must not reach a product, not even x 0.
    """
    d = tl.arange(0, HEAD_PAD)
    at = pool + entry[:, None] * HEAD_DIM + d[None, :]
    if MASKED and HEAD_DIM != HEAD_PAD:
        raw = tl.load(at, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0)
    elif MASKED:
        raw = tl.load(at, mask=live[:, None], other=0)
    elif HEAD_DIM != HEAD_PAD:
        raw = tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0)
    else:
        raw = tl.load(at)
    return to_values(raw, dtype)


@triton.jit
def attend_keys(
    queries,  # [M, HEAD_PAD]
    position,  # [M] of each query
    slope,  # [M] of ALiBi
    peak,  # [M] float32, as are total and sums [M, HEAD_PAD]
    total,
    sums,
    k_pool,
    v_pool,
    k_scales,  # float32 [slots, num_kv_heads], read only if QUANTISED
    v_scales,
    table,  # of the sequence whose keys these are
    kv_head,
    num_kv_heads,
    start,  # keys start .. stop are attended
    stop,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    QUANTISED: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKED: tl.constexpr,  # else start and stop are multiples of TILE and every row sees all keys
):
    """Go on with the softmax of each row over the keys start .. stop; return peak, total, sums."""
    key_type: tl.constexpr = queries.dtype
    # Scales may be far below what fp16 holds; one byte's worth of value loses nothing in bf16.
    # Codes are exact in tf32; that queries and weights are not is far less than the codes' error.
    PRECISION: tl.constexpr = "tf32" if QUANTISED and queries.dtype == tl.float32 else "ieee"
    narrow: tl.constexpr = QUANTISED and queries.dtype == tl.float16
    value_type: tl.constexpr = tl.bfloat16 if narrow else queries.dtype
    for tile in range(start // TILE * TILE, stop, TILE):
        t = tile + tl.arange(0, TILE)
        live = (t >= start) & (t < stop)
        slot = load_slots(table, tile, live, BLOCK_SIZE, TILE, MASKED)
        entry = slot * num_kv_heads + kv_head
        keys = load_vectors(k_pool, entry, live, key_type, HEAD_DIM, HEAD_PAD, TILE, MASKED)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if QUANTISED:
            scores *= load_scales(k_scales, entry, live, MASKED)[None, :]
        if HAS_SOFT_CAP:
            scores = 2.0 * scale * LOG2_E / soft_cap * scores
            scores = soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        else:
            scores *= scale * LOG2_E
        if HAS_SLOPES or MASKED:
            distance = position[:, None] - t[None, :]
        if HAS_SLOPES:
            scores -= (slope * LOG2_E)[:, None] * distance
        if MASKED:
            visible = (distance >= 0) & live[None, :]
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet keeps its peak at -inf; -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        if QUANTISED:
            weights *= load_scales(v_scales, entry, live, MASKED)[None, :]
        values = load_vectors(v_pool, entry, live, value_type, HEAD_DIM, HEAD_PAD, TILE, MASKED)
        sums = tl.dot(weights.to(value_type), values, sums, input_precision=PRECISION)
        peak = higher
    return peak, total, sums


@triton.jit
def finish(peak, total, sums, sinks, head, live, HAS_SINKS: tl.constexpr):
    """Divide the sums by the total, which a sink is part of; a row that saw no key gives 0."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2_E
        higher = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.exp2(sink - higher)
        sums = sums * shrink[:, None]
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def store_result(
    out, row, head, live, result, num_heads, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr
):
    """Store [M, HEAD_PAD] into out [T, num_heads, HEAD_DIM], contiguous, in its type."""
    d = tl.arange(0, HEAD_PAD)
    at = (row.to(tl.int64)[:, None] * num_heads + head[:, None]) * HEAD_DIM + d[None, :]
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_partial(
    part_sums, part_peaks, part_totals, slot, head, live, peak, total, sums, num_heads,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Store a softmax under way at ``slot[m]`` of the partial results.

    The sums of a row that saw no key are not written: its peak of -inf tells not to read them.
    """
    d = tl.arange(0, HEAD_PAD)
    at = slot.to(tl.int64) * num_heads + head
    tl.store(part_peaks + at, peak, mask=live)
    tl.store(part_totals + at, total, mask=live)
    seen = live & (peak > float("-inf"))
    mask = seen[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(part_sums + at[:, None] * HEAD_DIM + d[None, :], sums, mask=mask)
