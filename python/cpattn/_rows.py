"""Tensors [sequences, heads, tokens, dim] as the rows that the library attends, and partial states of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ._tensors import NAMES, Tensor, read, read_on, rows, torch


def as_rows(x: Any) -> tuple[Any, list[int]]:
    """A tensor ``[sequences, heads, tokens, dim]`` of PyTorch, NumPy or CuPy as rows ``[rows, heads, dim]``, without a
    copy, and the row at which each sequence begins, for ``q_starts`` of a plan. Other rows among them are not
    sequences'.

    ValueError where sequences are not whole rows apart, which those of contiguous tensors and their transposes are.
    """
    t = read(x)
    if len(t.shape) != 4:
        raise ValueError(f"cpattn: {list(t.shape)}; expected [sequences, heads, tokens, dim]")
    (n, heads, tokens, dim), (_, head, _, _) = t.shape, t.strides
    row, between = _spacing(t.shape, t.strides)
    shape, strides = ((n - 1) * between + tokens if n else 0, heads, dim), (row, head, 1)
    return _strided(x, shape, strides), [s * between for s in range(n)]


def _spacing(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Elements from token to token of [sequences, heads, tokens, dim], and rows of that length from sequence to
    sequence."""
    (n, heads, tokens, dim), (apart, _, row, last) = shape, strides
    row = row if tokens > 1 else max(heads * dim, 1) if n == 1 else apart
    if (dim > 1 and last != 1) or row <= 0 or (n > 1 and (apart % row or apart < row)):
        raise ValueError(f"cpattn: strides {list(strides)} of {list(shape)}; expected sequences of whole rows")
    return row, apart // row if n > 1 else tokens


def _module_of(x: Any) -> Any:
    """NumPy or CuPy, whose array x is. TypeError for another tensor."""
    module = sys.modules.get(type(x).__module__.partition(".")[0])
    if module is None or module.__name__ not in ("numpy", "cupy"):
        raise TypeError(f"cpattn: a {type(x).__module__}.{type(x).__name__} of 4 dimensions; expected a tensor of "
                        "PyTorch, NumPy or CuPy, or rows [rows, heads, dim]")
    return module


def _strided(x: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if hasattr(x, "as_strided"):
        return x.as_strided(shape, strides)
    return _module_of(x).lib.stride_tricks.as_strided(x, shape, [s * x.itemsize for s in strides])


def strides_like(shape: Sequence[int], strides: Sequence[int], dim: int) -> tuple[int, int, int, int]:
    """The strides of a tensor [sequences, heads, tokens, dim] of another width, dense within a sequence, whose rows
    and heads are ordered as in one of this shape and these strides, and whose sequences are as many rows apart."""
    n, heads, tokens, _ = shape
    row, between = _spacing(shape, strides)
    if heads == 1 or strides[1] < row:
        return between * heads * dim, dim, heads * dim, 1
    every = max(n - 1, 0) * between + tokens
    within = n == 1 or between >= heads * tokens  # a sequence holds its heads, not a head all sequences
    return between * dim, (tokens if within else every) * dim, dim, 1


def batch_like(x: Any, dim: int, dtype: str | None = None) -> Any:
    """New memory for ``[sequences, heads, tokens, dim]`` whose sequences begin at the rows at which those of x do; of
    ``dtype``, such as "fp32", or that of x."""
    t = read(x)
    strides, shape = strides_like(t.shape, t.strides, dim), (*t.shape[:3], dim)
    framework = torch()
    if framework is not None and isinstance(x, framework.Tensor):
        kind = x.dtype if dtype is None else getattr(framework, NAMES[dtype])
        return framework.empty_strided(shape, strides, dtype=kind, device=x.device)
    length = 1 + sum((n - 1) * step for n, step in zip(shape, strides)) if min(shape) else 0
    return _strided(_module_of(x).empty(length, x.dtype if dtype is None else NAMES[dtype]), shape, strides)


def rows_of_batch(x: Any, what: str, spans: Any, of: str) -> tuple[Any, Any]:
    """The rows of a tensor ``[sequences, heads, tokens, dim]``, and its spans: where sequences begin, and how many rows
    each has. ValueError where those are not the spans ``of`` something."""
    found, starts = as_rows(x)
    n, tokens = len(starts), read(x).shape[2]
    wanted, counts = spans
    if len(wanted) != n or max(counts, default=0) > tokens:
        raise ValueError(f"cpattn: {what} has {n} sequences of {tokens} rows; {of} has {len(wanted)} of at most "
                         f"{max(counts, default=0)}")
    for s, (begin, expected) in enumerate(zip(starts, wanted)):
        if begin != expected:
            raise ValueError(f"cpattn: sequence {s} of {what} begins at row {begin}, that of {of} at row {expected}; "
                             "expected the same (ops.as_rows says where those of a tensor begin)")
    return found, (starts, [tokens] * n)


def attend_batch(attend: Any, plan: Any, q: Any, keys: tuple[Any, ...], out: Any, lse: Any, **options: Any) -> Any:
    """What ``attend(plan, rows, *keys, out=, lse=, **options)`` is for q [sequences, heads, tokens, dim]."""
    both, state = lse is True, options["state"]
    n, _, tokens, _ = read(q).shape
    dense = [s * tokens for s in range(n)], [tokens] * n  # of a reserved plan, whose rows lie one behind the other
    rows_of_q, spans = rows_of_batch(q, "q", dense if plan.spans is None else plan.spans, "the plan")
    if out is None and state is None:
        out = batch_like(q, plan.widths[2])
    if both:
        lse = batch_like(q, 1, "fp32")[..., 0]
    attend(plan, rows_of_q, *keys, out=None if out is None else rows_of_batch(out, "out", spans, "q")[0],
           lse=None if lse is None else rows_of_batch(lse[..., None], "lse", spans, "q")[0][..., 0], **options)
    return (out, lse) if both else out if state is None else state


def take_state(plan: Any, lse: Any, state: Any) -> None:
    """Sets the plan's partial state: an LSE alone, or O and LSE, or none."""
    o, row_lse = (None, lse) if state is None else state
    plan.has_partial = True  # also where one of them is refused: the next call takes the other away
    _take_part(plan, "o", o, plan.widths[0], plan.widths[2])
    _take_part(plan, "lse", row_lse, plan.widths[0])
    plan.has_partial = o is not None or row_lse is not None


def _take_part(plan: Any, part: str, x: Any, *inner: int) -> None:
    """Sets o or lse of the plan's partial state from a tensor [rows of the plan or more, *inner] of fp32, or None."""
    partial, n = plan.partial, plan.rows
    address, stride, head_stride = None, 0, 0
    if x is not None:
        t = read_on(plan.device, x, part, written=True)
        address = t.address
        if part == "lse" and t.shape[1:] == inner and t.shape[0] > 1 and t.strides[0] == 1 and t.strides[1] > 1:
            head_stride = t.strides[1]
            t, inner = Tensor(address, t.dtype, (t.shape[0], 1), (1, 1), t.backend, t.ordinal), (1,)
        stride = rows(t, part, *inner)
        if t.dtype != "fp32" or t.shape[0] < n:
            raise ValueError(f"cpattn: {part} is {t.dtype} of {t.shape[0]} rows; expected fp32 of {n}")
    setattr(partial, part, address)
    setattr(partial, f"{part}_row_stride", stride)
    if part == "lse":
        plan.args.lse_head_stride = head_stride
