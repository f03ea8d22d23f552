"""Operators on the caller's tensors: PyTorch's, NumPy's, CuPy's, or any that speak DLPack.

Tensors lie on the host or on a CUDA device, all of a call on the same one; work is enqueued on PyTorch's or CuPy's
current stream, or on ``stream``, a cudaStream_t as an integer. On the host a call returns when the work is done.

A result is written to ``out`` where that is given, else to new memory of the kind of the first tensor. Arguments that
are wrong raise ``cpattn.InvalidError`` or ``ValueError`` with one line, and nothing is enqueued. The arithmetic, and
what is not finite, is described in the headers cpattn/ops.h and cpattn/nn.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from . import _declarations as c
from ._device import device, device_of, enqueue
from ._library import integers, lib, raise_status, sized
from ._names import dtype_of
from ._rows import as_rows, attend_batch, take_state
from ._tensors import (DTYPES, PLAIN_DTYPES, Tensor, address_of, check_writable, empty_like, heads, plain_dtype, read,
                       read_on, rows, signature, vector)
from .cache import PagedCache
from .plan import AttendPlan, shape_of
from .varlen import VarlenPlan, varlen


class ScoreRules:
    """What else is done to the scores of a layer (cpattn/score.h).

    ``softcap``: s = softcap * tanh(s / softcap). ``temperature_len``: scores of queries at p > temperature_len are
    multiplied by log2(p) / log2(temperature_len). ``alibi_slopes``, ``sink_logits``: fp32 ``[q_heads]`` on the device.
    """

    def __init__(self, *, softcap: float = 0.0, temperature_len: float = 0.0, alibi_slopes: Any = None,
                 sink_logits: Any = None):
        self._held = {"alibi_slopes": alibi_slopes, "sink_logits": sink_logits}
        self.rules = c.cpa_score_rules(
            softcap=softcap, temperature_len=temperature_len,
            alibi_slopes=None if alibi_slopes is None else vector(alibi_slopes, "alibi_slopes", "fp32"),
            sink_logits=None if sink_logits is None else vector(sink_logits, "sink_logits", "fp32"))

    def check(self, place: Any, q_heads: int) -> None:
        """ValueError for rules that are not for so many heads on the device ``place``."""
        for name, x in self._held.items():
            if x is not None:
                vector(x, name, "fp32", q_heads, place=place)


@functools.lru_cache(maxsize=256)
def mask_of(causal: bool, window: int, sinks: int, right: int = 0) -> Any:
    """The mask of a layer: a query at p sees the keys at k <= p if causal, p - k < window if that is not 0, k - p <
    right if that is not 0, and the first ``sinks`` keys whatever the window."""
    return c.cpa_mask(causal=int(causal), sinks=sinks, window=window, right=right)


def kv_write(cache: PagedCache, k: Any, v: Any, slot_mapping: Any, *, nonfinite: Any = None,
             stream: int | None = None) -> None:
    """Stores new keys ``[tokens, kv_heads, k_dim]`` and values ``[tokens, kv_heads, v_dim]`` in their pages.

    ``slot_mapping``: int64 ``[tokens]`` on the device, block * block_size + offset; -1 skips the token. Rows and heads
    may have any strides, as those of a slice or a transposed tensor. ``v`` is None for a cache of latents.
    ``nonfinite``: uint8 ``[tokens]``, becomes 1 where a written key or value is NaN or infinite.

    Keys and values ``[sequences, kv_heads, tokens, dim]`` have ``[sequences, tokens]`` slots and marks. They are
    written as they lie, sequence after sequence; all at once where tokens of a sequence contain their heads.
    """
    view, on = cache.view, cache.device
    keys = read_on(on, k, "k")
    if len(keys.shape) == 4:
        return _write_batch(cache, k, v, slot_mapping, nonfinite, stream)
    tokens = keys.shape[0]
    check_writable(cache.k, "k of the cache")
    check_writable(cache.v, "v of the cache")
    k_row, k_head = heads(keys, "k", view.kv_heads, view.k_dim)
    args = sized(c.cpa_kv_write_args, tokens=tokens, dtype=plain_dtype(keys, "k"), k=keys.address, k_row_stride=k_row,
                 k_head_stride=k_head,
                 slot_mapping=vector(slot_mapping, "slot_mapping", "i64", tokens, place=on), kv=view)
    if v is not None:
        values = read_on(on, v, "v")
        args.v = values.address
        args.v_row_stride, args.v_head_stride = heads(values, "v", view.kv_heads, view.v_dim)
        if values.dtype != keys.dtype or values.shape[0] != tokens:
            raise ValueError(f"cpattn: k is {keys.dtype} of {tokens} tokens, v {values.dtype} of {values.shape[0]}; "
                             "expected the same")
    elif not view.v_in_k:
        raise ValueError("cpattn: v is None, and the values of this cache do not lie in its keys")
    if nonfinite is not None:
        args.nonfinite = vector(nonfinite, "nonfinite", "u8", tokens, place=on, written=True)
    enqueue(lib.cpa_kv_write, args, on, stream)


def _write_batch(cache: PagedCache, k: Any, v: Any, slot_mapping: Any, nonfinite: Any, stream: int | None) -> None:
    """``kv_write`` of [sequences, heads, tokens, dim]."""
    n, _, tokens, _ = k.shape
    for what, x in (("slot_mapping", slot_mapping), ("nonfinite", nonfinite)):
        if x is not None and tuple(x.shape) != (n, tokens):
            raise ValueError(f"cpattn: {what} is {list(x.shape)}; expected [{n}, {tokens}], as k is {list(k.shape)}")
    if v is not None and (len(v.shape) != 4 or v.shape[0] != n):
        raise ValueError(f"cpattn: k is {list(k.shape)}, v {list(v.shape)}; expected the same but for the width")
    if n * tokens == 0:
        return
    both = [as_rows(x) for x in (k, v) if x is not None]
    if all(starts == list(range(0, n * tokens, tokens)) for _, starts in both):
        return kv_write(cache, both[0][0], both[1][0] if v is not None else None, slot_mapping, nonfinite=nonfinite,
                        stream=stream)
    for s in range(n):
        kv_write(cache, k[s].swapaxes(0, 1), None if v is None else v[s].swapaxes(0, 1), slot_mapping[s],
                 nonfinite=None if nonfinite is None else nonfinite[s], stream=stream)


def _blocks(pairs: Any) -> Any:
    pairs = pairs.tolist() if hasattr(pairs, "tolist") else pairs
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("cpattn: expected pairs (source block, destination block)")
    return integers(c.c_int64, [block for pair in pairs for block in pair], "blocks")


def _check_copy(src: PagedCache, dst: PagedCache) -> None:
    """ValueError for caches between which nothing can be copied."""
    if src.device is not dst.device:
        raise ValueError(f"cpattn: src lies on {src.device!r}, dst on {dst.device!r}; expected one device")
    check_writable(dst.k, "k of dst")
    check_writable(dst.v, "v of dst")


def kv_copy(src: PagedCache, dst: PagedCache, pairs: Sequence[tuple[int, int]], *, stream: int | None = None) -> None:
    """Copies whole blocks between two caches of one form: (block of ``src``, block of ``dst``) for each pair."""
    _check_copy(src, dst)
    flat = _blocks(pairs)
    args = sized(c.cpa_kv_copy_args, src=src.view, dst=dst.view, pairs=ctypes.addressof(flat), n_pairs=len(flat) // 2)
    enqueue(lib.cpa_kv_copy, args, src.device, stream)


def kv_gather(src: PagedCache, dst: PagedCache, block_tables: Sequence[Sequence[int]], lengths: Sequence[int], *,
              stream: int | None = None) -> list[int]:
    """Gathers the pages of sequences into consecutive blocks of ``dst``, a cache of the same form.

    ``block_tables[s]`` are the blocks of sequence s, of ``lengths[s]`` tokens. Returns the first block of each in
    ``dst``; sequences lie one behind the other.
    """
    _check_copy(src, dst)
    size = src.block_size
    tables = [list(table)[:-(-n // size)] for table, n in zip(block_tables, lengths)]
    flat = integers(c.c_int32, [block for table in tables for block in table], "blocks")
    ranges = (c.cpa_kv_range * len(tables))()
    firsts, block = [], 0
    for s, (table, n) in enumerate(zip(tables, lengths)):
        if len(table) * size < n or n < 0:
            raise ValueError(f"cpattn: {len(table)} blocks of {size} for the {n} tokens of sequence {s}")
        ranges[s] = c.cpa_kv_range(table=block, count=n, dst_block=block)
        firsts.append(block)
        block += len(table)
    args = sized(c.cpa_kv_pack_args, src=src.view, dst=dst.view, block_tables=ctypes.addressof(flat),
                 n_table_entries=len(flat), ranges=ctypes.addressof(ranges), n_ranges=len(tables))
    enqueue(lib.cpa_kv_pack, args, src.device, stream)
    return firsts


def kv_swap(src: PagedCache, dst: PagedCache, pairs: Sequence[tuple[int, int]], *, stream: int | None = None) -> None:
    """Copies whole blocks between a cache on a device and one in host memory of one form: (block of ``src``, block of
    ``dst``) for each pair. Page-locked host memory is read and written when the stream comes to it."""
    for name, x in (("k", dst.k), ("v", dst.v)):
        check_writable(x, f"{name} of dst")
    flat = _blocks(pairs)
    args = sized(c.cpa_kv_swap_args, src=src.view, dst=dst.view, pairs=ctypes.addressof(flat), n_pairs=len(flat) // 2)
    enqueue(lib.cpa_kv_swap, args, src.device if src.device.backend != "host" else dst.device, stream)


def gather_rows(cache: PagedCache, block_tables: Sequence[Sequence[int]], firsts: Sequence[int], counts: Sequence[int],
                *, dtype: str | None = None, stream: int | None = None) -> tuple[Any, Any]:
    """Keys ``[rows, kv_heads, k_dim]`` and values of the tokens from ``firsts[s]`` on, ``counts[s]`` of them, of each
    sequence, whose blocks are ``block_tables[s]``; sequences one behind the other. Of ``dtype``: fp32, bf16 or fp16, by
    default that of the cache, but for a quantised one, which needs it."""
    view = cache.view
    kind = view.dtype if dtype is None else dtype_of(dtype)
    name = next((name for name in PLAIN_DTYPES if DTYPES[name] == kind), None)
    if name is None:
        found = "that of a quantised cache" if dtype is None else dtype
        raise ValueError(f"cpattn: the dtype of rows is {found}; expected dtype= of {', '.join(PLAIN_DTYPES)}")
    flat = integers(c.c_int32, [block for table in block_tables for block in table], "blocks")
    spans = (c.cpa_kv_span * len(counts))()
    at = row = 0
    for s, (table, first, count) in enumerate(zip(block_tables, firsts, counts, strict=True)):
        spans[s] = c.cpa_kv_span(table=at, first=first, count=count, dst_row=row)
        if not 0 <= first <= first + count <= len(table) * view.block_size:
            raise ValueError(f"cpattn: tokens {first} to {first + count} of sequence {s}, which has {len(table)} blocks")
        at, row = at + len(table), row + count
    k, v = (empty_like(cache.k, (row, view.kv_heads, dim), name) for dim in (view.k_dim, view.v_dim))
    args = sized(c.cpa_kv_gather_args, src=view, block_tables=ctypes.addressof(flat), n_table_entries=at,
                 spans=ctypes.addressof(spans), n_spans=len(counts), k=address_of(k), v=address_of(v), dst_rows=row,
                 dst_dtype=kind)
    enqueue(lib.cpa_kv_gather, args, cache.device, stream)
    return k, v


def attend(plan: AttendPlan, q: Any, cache: PagedCache, *, out: Any = None, lse: Any = None, state: Any = None,
           resume: bool = False, causal: bool = True, window: int = 0, sinks: int = 0, right: int = 0,
           scale: float = 0.0, rules: ScoreRules | None = None, stream: int | None = None) -> Any:
    """softmax(scale q k^T) v for every row of the plan over its pages.

    ``q``: ``[rows, q_heads, k_dim]``, rows and heads of any strides; ``scale`` 0: 1 / sqrt(k_dim). The mask is that of
    ``mask_of``. Returns ``out``, ``[rows, q_heads, v_dim]`` in the dtype of q; that and what lies behind its rows are
    left alone where no sequence has them.

    ``lse``: fp32 ``[rows, q_heads]``, or of contiguous ``[q_heads, rows]`` transposed, gets ln sum exp(scores); or True,
    and ``(out, lse)`` is returned. ``state``: a pair of fp32 ``[rows, q_heads, v_dim]`` and ``[rows, q_heads]`` that
    gets the partial state, which can be resumed by ``resume=True`` and merged; then it is returned, and ``out`` only
    written where it is given.

    ``q`` may also be ``[sequences, q_heads, tokens, k_dim]``, and is attended as it lies, without a copy, by a plan
    whose sequences begin at the rows at which those of q do: ``q_starts`` of ``AttendPlan.set`` is ``as_rows(q)[1]``,
    which for tokens that contain their heads is what ``set`` takes by default. ``out`` and ``lse`` then are
    ``[sequences, q_heads, tokens, v_dim]`` and ``[sequences, q_heads, tokens]``, new ones in the order in memory that q
    has; a ``state`` is of rows.
    """
    n, widths = plan.rows, plan.widths
    address, layout = signature(q)
    if len(layout[1]) == 4:
        return attend_batch(attend, plan, q, (cache,), out, lse, state=state, resume=resume, causal=causal,
                            window=window, sinks=sinks, right=right, scale=scale, rules=rules, stream=stream)
    both = lse is True
    if both:
        lse = empty_like(q, (q.shape[0], widths[0]), "fp32")
    results = out_layout = None
    if out is not None:
        results, out_layout = signature(out)
    elif state is None:
        out = empty_like(q, (q.shape[0], widths[0], widths[2]))
        results = address_of(out)
    args = plan.args
    setting = (layout, out_layout, n, cache, causal, window, sinks, right, scale, resume, rules)
    if plan.setting != setting:
        plan.setting = None
        _set_rows(plan, q, out if out_layout is not None else None)
        if cache.device is not plan.device:
            raise ValueError(f"cpattn: the cache lies on {cache.device!r}, the plan on {plan.device!r}")
        if rules is not None:
            rules.check(plan.device, widths[0])
        args.kv, args.mask = cache.view, mask_of(causal, window, sinks, right)
        args.scale, args.resume = scale, resume
        args.rules = ctypes.addressof(rules.rules) if rules is not None else None
        plan.setting = setting
    args.q, args.out = address, results
    if lse is not None or state is not None or plan.has_partial:
        take_state(plan, lse, state)
    handle = plan.device.stream(stream)
    status = lib.cpa_attend(plan.handle, plan.args_ref, handle)
    if status:
        raise_status(status, lib.cpa_stream_error(handle))
    return (out, lse) if both else out if state is None else state


def _set_rows(plan: AttendPlan, q: Any, out: Any) -> None:
    """Sets what the plan's arguments say of queries and results, but for addresses. ValueError for those that do not
    fit."""
    (q_heads, k_dim, v_dim), n, args = plan.widths, plan.rows, plan.args
    t = read_on(plan.device, q, "q")
    args.q_row_stride, args.q_head_stride = heads(t, "q", q_heads, k_dim)
    args.out_row_stride = args.out_head_stride = 0
    if t.shape[0] < n:
        raise ValueError(f"cpattn: q has {t.shape[0]} rows; the plan has {n}")
    if out is not None:
        o = read_on(plan.device, out, "out", written=True)
        args.out_row_stride, args.out_head_stride = heads(o, "out", q_heads, v_dim)
        if o.shape[0] < n or o.dtype != t.dtype:
            raise ValueError(f"cpattn: out is {o.dtype} {list(o.shape)}; expected {t.dtype} [{n}, {q_heads}, {v_dim}]")
    args.q_dtype = plain_dtype(t, "q")


def merge(states: Sequence[tuple[Any, Any]], *, out: Any = None, out_lse: Any = None, dtype: str | None = None,
          sink_logits: Any = None, stream: int | None = None) -> tuple[Any, Any]:
    """Joins partial states of the same rows over disjoint keys, exactly (merge_attn_states).

    ``states``: up to 64 pairs of O ``[rows, heads, v_dim]`` and LSE fp32 ``[rows, heads]``; O fp32, bf16 or fp16.
    Returns ``(out, out_lse)``; ``out`` is of ``dtype``, by default that of O. Either may be memory of the first state.
    """
    if not states:
        raise ValueError("cpattn: merge of no states")
    first = read(states[0][0])
    n, heads, v_dim = first.shape
    partials = (c.cpa_partial * len(states))()
    for i, (o, lse) in enumerate(states):
        t, lses = read_on(first, o, "o"), read_on(first, lse, "lse")
        if t.shape != first.shape or t.dtype != first.dtype or lses.shape[0] != n or lses.dtype != "fp32":
            raise ValueError(f"cpattn: state {i} is {t.dtype} {list(t.shape)} with an LSE of {lses.dtype} "
                             f"{list(lses.shape)}; expected {first.dtype} {list(first.shape)} and fp32 [{n}, {heads}]")
        partials[i] = c.cpa_partial(o=t.address, o_row_stride=rows(t, "o", heads, v_dim), lse=lses.address,
                                    lse_row_stride=rows(lses, "lse", heads))
    if out is None:
        out = empty_like(states[0][0], (n, heads, v_dim), dtype)
    if out_lse is None:
        out_lse = empty_like(states[0][0], (n, heads), "fp32")
    o, result_lse = read_on(first, out, "out", written=True), read_on(first, out_lse, "out_lse", written=True)
    if o.shape != first.shape or result_lse.shape != (n, heads) or result_lse.dtype != "fp32":
        raise ValueError(f"cpattn: out is {list(o.shape)} and out_lse {result_lse.dtype} {list(result_lse.shape)}; "
                         f"expected {list(first.shape)} and fp32 [{n}, {heads}]")
    sinks = None if sink_logits is None else vector(sink_logits, "sink_logits", "fp32", heads, place=first)
    args = sized(c.cpa_merge_args, rows=n, heads=heads, v_dim=v_dim, states=ctypes.addressof(partials),
                 n_states=len(states), out_dtype=plain_dtype(o, "out"), out=o.address,
                 out_row_stride=rows(o, "out", heads, v_dim), out_lse=result_lse.address,
                 out_lse_row_stride=rows(result_lse, "out_lse", heads), state_dtype=plain_dtype(first, "o"),
                 sink_logits=sinks)
    enqueue(lib.cpa_merge, args, device_of(first), stream)
    return out, out_lse


def rmsnorm(x: Any, weight: Any, *, eps: float = 1e-6, weight_offset: float = 0.0, residual: Any = None,
            out: Any = None, stream: int | None = None) -> Any:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) for each row of ``x``, ``[rows, width]``.

    With ``residual``, ``[rows, width]``: residual += x, and the result is the norm of that. ``out`` may be x.
    """
    t, w = read(x), read(weight)
    width = t.shape[-1]
    if out is None:
        out = empty_like(x, t.shape)
    o = read_on(t, out, "out", written=True)
    r = None if residual is None else read_on(t, residual, "residual", written=True)
    if o.shape != t.shape or o.dtype != t.dtype or (r is not None and r[1:3] != t[1:3]):
        raise ValueError(f"cpattn: x is {t.dtype} {list(t.shape)}; expected out and residual like it")
    if w.dtype not in (t.dtype, "fp32"):
        raise ValueError(f"cpattn: weight is {w.dtype}; expected {t.dtype} or fp32")
    args = sized(c.cpa_rmsnorm_args, rows=t.shape[0], width=width, dtype=plain_dtype(t, "x"), x=t.address,
                 x_stride=rows(t, "x", width), weight=vector(weight, "weight", w.dtype, width, place=t),
                 weight_is_f32=int(w.dtype == "fp32"), weight_offset=weight_offset, eps=eps, out=o.address,
                 out_stride=rows(o, "out", width))
    if r is not None:
        args.residual, args.residual_stride = r.address, rows(r, "residual", width)
    enqueue(lib.cpa_rmsnorm, args, device_of(t), stream)
    return out


def _head_strides(t: Tensor, what: str) -> tuple[int, int]:
    """The strides of rows and heads of a tensor [rows, heads, dim], either outermost. ValueError for others."""
    (n, heads, dim), (row, head, element) = t.shape, t.strides
    if (dim > 1 and element != 1) or (n > 1 and row < dim) or (heads > 1 and head < dim):
        raise ValueError(f"cpattn: {what} is {list(t.shape)} with strides {list(t.strides)}; expected those of rows "
                         f"and heads to be {dim} or more, and the last 1")
    return row if n > 1 else heads * dim, head if heads > 1 else dim


def rotate(x: Any, positions: Any, table: Any, *, interleaved: bool = False, inverse: bool = False, first: int = 0,
           out: Any = None, stream: int | None = None) -> Any:
    """Rotary positions: rotates heads of ``x``, ``[rows, heads, dim]``, each by its position, int64 ``[rows]``.

    ``table``: fp32 ``[max_position, rotated dim]`` as ``rope_table`` makes it, on the device; the elements from
    ``first`` on are rotated. ``interleaved``: pairs (2i, 2i + 1) in place of (i, i + dim / 2). ``out`` may be x.
    """
    t, angles = read(x), read(table)
    if len(t.shape) != 3 or len(angles.shape) != 2:
        raise ValueError(f"cpattn: x is {list(t.shape)}, table {list(angles.shape)}; expected [rows, heads, dim] and "
                         "[max_position, rotated dim]")
    if out is None:
        out = empty_like(x, t.shape)
    o = read_on(t, out, "out", written=True)
    if o.shape != t.shape or o.dtype != t.dtype:
        raise ValueError(f"cpattn: out is {o.dtype} {list(o.shape)}; expected {t.dtype} {list(t.shape)}")
    (x_stride, x_head_stride), (out_stride, out_head_stride) = _head_strides(t, "x"), _head_strides(o, "out")
    rope = c.cpa_rope(table=vector(table, "table", "fp32", place=t), max_position=angles.shape[0], dim=angles.shape[1],
                      first=first, interleaved=int(interleaved), inverse=int(inverse))
    args = sized(c.cpa_rotate_args, rows=t.shape[0], heads=t.shape[1], dim=t.shape[2], dtype=plain_dtype(t, "x"),
                 x=t.address, x_stride=x_stride, x_head_stride=x_head_stride, rope=rope, out=o.address,
                 positions=vector(positions, "positions", "i64", t.shape[0], place=t), out_stride=out_stride,
                 out_head_stride=out_head_stride)
    enqueue(lib.cpa_rotate, args, device_of(t), stream)
    return out


def swiglu(gate_up: Any, *, out: Any = None, stream: int | None = None) -> Any:
    """gate / (1 + exp(-gate)) * up of rows ``[gate | up]``, ``[rows, 2 * width]`` contiguous; ``[rows, width]``."""
    t = read(gate_up)
    n, width = t.shape[0], t.shape[-1] // 2
    if out is None:
        out = empty_like(gate_up, (n, width))
    args = sized(c.cpa_swiglu_args, rows=n, width=width, dtype=plain_dtype(t, "gate_up"),
                 gate_up=vector(gate_up, "gate_up", t.dtype, n * 2 * width),
                 out=vector(out, "out", t.dtype, n * width, place=t, written=True))
    enqueue(lib.cpa_swiglu, args, device_of(t), stream)
    return out


def linear(x: Any, weight: Any, bias: Any = None, *, out: Any = None, dtype: str | None = None,
           stream: int | None = None) -> Any:
    """x weight^T + bias: ``x`` ``[rows, inputs]``, ``weight`` ``[outputs, inputs]``, ``bias`` ``[outputs]``; summed in
    fp32 and rounded once, to ``dtype``, which is that of x or ``"fp32"``."""
    t = read(x)
    w = read_on(t, weight, "weight")
    n, inputs, outputs = t.shape[0], t.shape[-1], w.shape[0]
    if out is None:
        out = empty_like(x, (n, outputs), dtype)
    o = read_on(t, out, "out", written=True)
    if w.dtype != t.dtype or o.shape != (n, outputs):
        raise ValueError(f"cpattn: x is {t.dtype}, weight {w.dtype}, out {list(o.shape)}; expected one dtype and "
                         f"[{n}, {outputs}]")
    args = sized(c.cpa_linear_args, rows=n, inputs=inputs, outputs=outputs, dtype=plain_dtype(t, "x"),
                 out_dtype=plain_dtype(o, "out"), x=t.address, x_stride=rows(t, "x", inputs), weight=w.address,
                 weight_stride=rows(w, "weight", inputs), out=o.address, out_stride=rows(o, "out", outputs),
                 bias=None if bias is None else vector(bias, "bias", t.dtype, outputs, place=t))
    enqueue(lib.cpa_linear, args, device_of(t), stream)
    return out


def attend_supported(q_heads: int, kv_heads: int, k_dim: int, v_dim: int, *, dtype: str = "bf16",
                     kv_dtype: str | None = None, backend: str = "host", ordinal: int = 0) -> bool:
    """Whether ``attend`` takes this shape on a device."""
    shape = shape_of(q_heads, kv_heads, k_dim, v_dim, dtype, kv_dtype, False)
    status = lib.cpa_attend_supported(device(backend, ordinal).handle, ctypes.byref(shape), None, None)
    return status == c.CPA_OK


__all__ = ["AttendPlan", "PagedCache", "ScoreRules", "VarlenPlan", "as_rows", "attend", "attend_supported",
           "gather_rows", "kv_copy", "kv_gather", "kv_swap", "kv_write", "linear", "mask_of", "merge", "rmsnorm",
           "rotate", "swiglu", "varlen"]
