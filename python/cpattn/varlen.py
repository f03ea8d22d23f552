"""Attention without a cache: queries, keys and values of many segments, one behind the other in tensors, as encoders
have them (cpattn/varlen.h)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from . import _declarations as c
from ._library import call, integers, lib, raise_status, sized
from ._rows import attend_batch, rows_of_batch, take_state
from ._tensors import address_of, empty_like, heads, plain_dtype, read_on, signature
from .plan import Plan


class VarlenPlan(Plan):
    """The segments of a batch, the same for every layer, on one device. Used by one thread at a time, and not set while
    an attend of it is in flight.

    ``q_heads``, ``kv_heads``, ``k_dim`` and ``v_dim`` (by default ``k_dim``) are those of what it attends.
    """

    def __init__(self, q_heads: int, kv_heads: int, k_dim: int, v_dim: int | None = None, *, backend: str = "host",
                 ordinal: int = 0):
        v_dim = k_dim if v_dim is None else v_dim
        self.kv_heads = kv_heads
        self.k_rows = 0
        self.k_spans: tuple[list[int], list[int]] = [], []
        super().__init__(c.cpa_varlen_attend_args, (q_heads, k_dim, v_dim), backend, ordinal)

    def set(self, cu_seqlens_q: Any, cu_seqlens_k: Any = None, *, q_counts: Any = None, k_counts: Any = None,
            causal: bool = False) -> None:
        """Segment s has the rows from ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` of q, and those from
        ``cu_seqlens_k[s]`` to ``cu_seqlens_k[s + 1]`` of k and v (None: as of q): ``[segments + 1]`` integers of lists
        or tensors, which are read here. Segments may be empty.

        ``q_counts``, ``k_counts``, ``[segments]``: rows of each segment, from its start on, where it does not go on to
        the next start; the starts, such as ``ops.as_rows`` has, then need no end. ``causal``: attends will be; it says
        how work is dealt, and any attend gives its result.
        """
        q_starts, q_counts = _segments("q", cu_seqlens_q, q_counts)
        if cu_seqlens_k is None and k_counts is None:
            k_starts, k_counts = q_starts, q_counts
        else:
            k_starts, k_counts = _segments("k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, k_counts)
        n = len(q_counts)
        if len(k_counts) != n:
            raise ValueError(f"cpattn: {n} segments of queries and {len(k_counts)} of keys; expected as many")
        lists = {"q_starts": q_starts, "k_starts": k_starts, "q_counts": q_counts, "k_counts": k_counts}
        held = {name: integers(c.c_int64, x, name) for name, x in lists.items()}
        q_heads, k_dim, v_dim = self.widths
        batch = sized(c.cpa_varlen_batch, q_heads=q_heads, kv_heads=self.kv_heads, k_dim=k_dim, v_dim=v_dim,
                      n_segments=n, causal=int(causal), **{name: ctypes.addressof(x) for name, x in held.items()})
        call(lib.cpa_varlen_plan_set, self.handle, ctypes.byref(batch))
        self.spans, self.k_spans = (q_starts[:n], q_counts), (k_starts[:n], k_counts)
        self.rows, self.k_rows = (max((a + m for a, m in zip(*spans) if m), default=0)
                                  for spans in (self.spans, self.k_spans))
        self.setting = None


def _listed(x: Any) -> list[int]:
    return x.tolist() if hasattr(x, "tolist") else list(x)


def _segments(of: str, starts: Any, counts: Any) -> tuple[list[int], list[int]]:
    """The starts of segments, with the end of the last, and their rows."""
    starts = _listed(starts)
    if counts is None:
        return starts, [end - begin for begin, end in itertools.pairwise(starts)]
    counts = _listed(counts)
    if len(starts) == len(counts):
        starts = [*starts, starts[-1] + counts[-1] if starts else 0]
    if len(starts) != len(counts) + 1:
        raise ValueError(f"cpattn: {len(starts)} cu_seqlens_{of} and {len(counts)} {of}_counts; expected as many, or "
                         "one more")
    return starts, counts


def varlen(plan: VarlenPlan, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, state: Any = None,
           resume: bool = False, causal: bool = False, left: int = 0, right: int = 0, scale: float = 0.0,
           softcap: float = 0.0, stream: int | None = None) -> Any:
    """softmax(scale q k^T) v for every row of the plan over the keys of its segment (flash_attn_varlen_func).

    ``q``: ``[rows, q_heads, k_dim]``, ``k`` and ``v``: ``[rows, kv_heads, dim]``, of one dtype, rows and heads of any
    strides; or each ``[segments, heads, tokens, dim]``, attended as it lies by a plan whose segments begin where its
    own do (``ops.as_rows``). ``scale`` 0: 1 / sqrt(k_dim). A row at index p of its segment's keys, the last row of
    queries being at the last key, sees the keys j <= p if causal, p - j < left and j - p < right where those are
    not 0; one that sees none gives 0, and an LSE of -inf. ``softcap``: s = softcap * tanh(s / softcap).

    ``out``, ``lse``, ``state`` and ``resume`` are those of ``ops.attend``, as is what is returned.
    """
    both = lse is True
    if len(q.shape) == 4:
        k, v = (rows_of_batch(x, what, plan.k_spans, "the plan")[0] if len(x.shape) == 4 else x
                for x, what in ((k, "k"), (v, "v")))
        return attend_batch(varlen, plan, q, (k, v), out, lse, state=state, resume=resume, causal=causal, left=left,
                            right=right, scale=scale, softcap=softcap, stream=stream)
    if both:
        lse = empty_like(q, (q.shape[0], plan.widths[0]), "fp32")
    results = out_layout = None
    if out is not None:
        results, out_layout = signature(out)
    elif state is None:
        out = empty_like(q, (q.shape[0], plan.widths[0], plan.widths[2]))
        results = address_of(out)
    (q_address, *layouts), (k_address, of_k), (v_address, of_v) = (signature(x) for x in (q, k, v))
    setting = (*layouts, of_k, of_v, out_layout, causal, left, right, scale, softcap, resume)
    args = plan.args
    if plan.setting != setting:
        plan.setting = None
        _set_tensors(plan, q, k, v, out if out_layout is not None else None)
        args.causal, args.left, args.right = causal, left, right
        args.scale, args.softcap, args.resume = scale, softcap, resume
        plan.setting = setting
    args.q, args.k, args.v, args.out = q_address, k_address, v_address, results
    if lse is not None or state is not None or plan.has_partial:
        take_state(plan, lse, state)
    handle = plan.device.stream(stream)
    status = lib.cpa_varlen_attend(plan.handle, plan.args_ref, handle)
    if status:
        raise_status(status, lib.cpa_stream_error(handle))
    return (out, lse) if both else out if state is None else state


def _set_tensors(plan: VarlenPlan, q: Any, k: Any, v: Any, out: Any) -> None:
    """Sets what the plan's arguments say of tensors, but for addresses. ValueError for those that do not fit."""
    (q_heads, k_dim, v_dim), args = plan.widths, plan.args
    first = read_on(plan.device, q, "q")
    args.dtype = plain_dtype(first, "q")
    args.out_row_stride = args.out_head_stride = 0
    tensors = {"q": (q, plan.rows, q_heads, k_dim), "k": (k, plan.k_rows, plan.kv_heads, k_dim),
               "v": (v, plan.k_rows, plan.kv_heads, v_dim)}
    if out is not None:
        tensors["out"] = out, plan.rows, q_heads, v_dim
    for what, (x, n, count, dim) in tensors.items():
        t = read_on(plan.device, x, what, written=what == "out")
        row, head = heads(t, what, count, dim)
        if t.dtype != first.dtype or t.shape[0] < n:
            raise ValueError(f"cpattn: {what} is {t.dtype} {list(t.shape)}; expected {first.dtype} of {n} rows or more")
        setattr(args, f"{what}_row_stride", row)
        setattr(args, f"{what}_head_stride", head)


__all__ = ["VarlenPlan", "varlen"]
