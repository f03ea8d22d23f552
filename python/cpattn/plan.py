"""Plans of attention: the work of a step, split once and used for every layer."""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

from . import _declarations as c
from ._device import Device, device, enqueue
from ._library import call, create, integers, lib, sized
from ._names import dtype_of
from ._tensors import read, read_on, vector


def _int32s(values: Any, what: str) -> Any:
    """A host array of integers from a sequence or a host tensor."""
    return integers(c.c_int32, values, what)


def update_args(place: Device, lengths: Any, block_tables: Any, qo_indptr: Any, first_ranks: Any = None) -> Any:
    """The arguments of an update by tensors on the device. ValueError for others."""
    t, tables = read(lengths), read_on(place, block_tables, "block_tables")
    if tables.shape[0] != t.shape[0] or t.dtype not in ("i32", "i64"):
        raise ValueError(f"cpattn: lengths are {t.dtype} {list(t.shape)}, tables {list(tables.shape)}; expected "
                         "i32 or i64 [sequences] and [sequences, entries]")
    n = t.shape[0]
    firsts, indptr = (None if x is None else vector(x, what, "i32", length, place=place) for x, what, length in
                      ((first_ranks, "first_ranks", n), (qo_indptr, "qo_indptr", n + 1)))
    return sized(c.cpa_attend_update_args, sequences=n, length_bytes=4 if t.dtype == "i32" else 8,
                 lengths=vector(lengths, "lengths", t.dtype, place=place),
                 block_tables=vector(block_tables, "block_tables", "i32"), table_stride=tables.shape[1],
                 first_ranks=firsts, qo_indptr=indptr)


def shape_of(q_heads: int, kv_heads: int, k_dim: int, v_dim: int | None, dtype: str, kv_dtype: str | None,
             v_in_k: bool) -> Any:
    """The shape of an attention; ``kv_dtype`` None or "auto": that of ``dtype``."""
    if kv_dtype is None or kv_dtype == "auto":
        kv_dtype = dtype
    return c.cpa_attention_shape(q_heads=q_heads, kv_heads=kv_heads, k_dim=k_dim,
                                 v_dim=k_dim if v_dim is None else v_dim, v_in_k=int(v_in_k), dtype=dtype_of(dtype),
                                 kv_dtype=dtype_of(kv_dtype))


_plans: dict[int, weakref.ref[Plan]] = {}
_numbers = itertools.count()


def plan_numbered(number: int, kind: type[AnyPlan]) -> AnyPlan:
    """The plan of that kind whose ``number`` this is. ValueError where it is gone, or of another kind."""
    found = _plans.get(number)
    plan = found() if found is not None else None
    if plan is None:
        raise ValueError(f"cpattn: there is no plan of number {number}, or not any more")
    if not isinstance(plan, kind):
        raise ValueError(f"cpattn: plan {number} is of {type(plan).__name__}; expected {kind.__name__}")
    return plan


class Plan:
    """What all plans have: the library's plan on a device, a number that names it where only numbers go, as in
    operators of PyTorch, and what is passed to the library with it, kept from call to call."""

    def __init__(self, args: Any, widths: tuple[int, int, int], backend: str, ordinal: int):
        self.device: Device = device(backend, ordinal)
        self.widths = widths  # q_heads, k_dim, v_dim
        self.rows = 0
        self.spans: tuple[list[int], list[int]] | None = None  # first rows and rows of sequences, where the host knows
        self.handle = create(lib.cpa_attend_plan_create, self.device.handle)
        self.number = next(_numbers)
        _plans[self.number] = weakref.ref(self)
        self.args = sized(args)
        self.args_ref = ctypes.byref(self.args)
        self.partial = self.args.state
        self.has_partial = False
        self.setting: Any = None  # what of args was set last beside addresses

    def __del__(self) -> None:
        if hasattr(self, "handle") and not sys.is_finalizing():
            del _plans[self.number]
            lib.cpa_attend_plan_destroy(self.handle)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


class AttendPlan(Plan):
    """The plan of a step on one device. Used by one thread at a time, and not set while an attend of it is in flight.

    ``q_heads``, ``kv_heads``, ``k_dim`` and ``v_dim`` (by default ``k_dim``) are those of what it attends; ``dtype`` of
    queries and ``kv_dtype`` of the cache are names such as ``"bf16"`` and ``"fp8_e4m3"``.

    Either ``set`` (or ``set_indices``) once a step, or ``reserve`` once and ``update`` for every step, which CUDA
    graphs capture; see cpattn/ops.h.
    """

    def __init__(self, q_heads: int, kv_heads: int, k_dim: int, v_dim: int | None = None, *, block_size: int,
                 dtype: str = "fp32", kv_dtype: str | None = None, v_in_k: bool = False, backend: str = "host",
                 ordinal: int = 0):
        self.shape = shape_of(q_heads, kv_heads, k_dim, v_dim, dtype, kv_dtype, v_in_k)
        self.block_size = block_size
        self.order: list[int] | None = None  # of set: which row of the batch each row is, None: the same
        super().__init__(c.cpa_attend_args, (q_heads, k_dim, self.shape.v_dim), backend, ordinal)

    def set(self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Any, *, cascade: bool = True,
            q_starts: Sequence[int] | None = None, num_blocks: int = 0,
            shard: tuple[int, int, int] | None = None) -> None:
        """Plans the last ``query_lens[s]`` of the ``seq_lens[s]`` tokens of every sequence.

        ``block_tables``: int32 ``[sequences, blocks]``, on the host (a tensor or lists) or on the device of the plan,
        where it must hold until the attends are done, over caches of at least ``num_blocks`` blocks. Entry j of a row
        is the block of the tokens from ``j * block_size`` on. Rows of q are those of the sequences one behind the
        other, or begin at ``q_starts[s]``.

        ``shard``: (rank, ranks, interleave): the tables are of the tokens t of each sequence alone that have
        (t / interleave) mod ranks = rank. All rows attend those, by what they are in the whole sequence: states that
        ``ops.merge`` joins with those of the other ranks. Rows of a sequence are then sorted by the ranks of their
        tokens: ``order`` says which row of the batch each of them is, None: they are as they were. Not with
        ``q_starts``.
        """
        n = len(seq_lens)
        tables = block_tables
        if not hasattr(tables, "shape"):
            width = max((len(row) for row in tables), default=0)
            tables = integers(c.c_int32, [b for row in tables for b in [*row, *[-1] * (width - len(row))]], "blocks")
            address, entries, on_device = ctypes.addressof(tables), n * width, False
        else:
            t = read(tables)
            width = t.shape[1]
            address, entries = vector(tables, "block_tables", "i32"), t.shape[0] * t.shape[1]
            on_device = t.backend != "host"
            if t.shape[0] < n or (on_device and (t.backend, t.ordinal) != (self.device.backend, self.device.ordinal)):
                raise ValueError(f"cpattn: block_tables is {list(t.shape)} on {t.backend}:{t.ordinal} for {n} "
                                 f"sequences on {self.device!r}; expected [sequences, blocks] there or on the host")
        if len(query_lens) != n or (q_starts is not None and len(q_starts) != n):
            raise ValueError(f"cpattn: {len(query_lens)} query lengths for {n} sequences"
                             + (f" and {len(q_starts)} starts" if q_starts is not None else ""))
        if shard is not None and q_starts is not None:
            raise ValueError("cpattn: q_starts of a plan of a shard; expected rows one behind the other")
        items, n_items = self._items(query_lens, seq_lens, width, q_starts, shard)
        owners = c.cpa_owner_map(*shard[1:]) if shard is not None else c.cpa_owner_map(1, 1)
        batch = sized(c.cpa_attend_batch, map=owners, shape=self.shape, block_size=self.block_size,
                      items=ctypes.addressof(items), n_items=n_items, block_tables=address, n_table_entries=entries,
                      cascade_attention=c.CPA_CASCADE_AUTO if cascade else c.CPA_CASCADE_OFF,
                      block_tables_on_device=int(on_device), num_blocks=num_blocks if on_device else 0)
        call(lib.cpa_attend_plan_set, self.handle, ctypes.byref(batch))
        self.rows = sum(query_lens) if q_starts is None else max(map(operator.add, q_starts, query_lens), default=0)
        starts = itertools.accumulate(query_lens[:-1], initial=0) if q_starts is None else q_starts
        self.spans = list(starts)[:n], list(query_lens)
        self._held = tables if on_device else None

    def _items(self, query_lens: Sequence[int], seq_lens: Sequence[int], width: int, q_starts: Sequence[int] | None,
               shard: tuple[int, int, int] | None) -> tuple[Any, int]:
        """The items of ``set`` and how many there are; sets ``order``."""
        rank, ranks, interleave = shard or (0, 1, 1)
        owners = c.cpa_owner_map(ranks, interleave)
        sets = [c.cpa_token_set(c.CPA_TOKENS_SHARD if shard else c.CPA_TOKENS_ALL, r) for r in range(ranks)]
        before = functools.partial(lib.cpa_tokens_before, owners) if shard else lambda _, tokens: tokens
        items = (c.cpa_attend_item * (len(seq_lens) * ranks))()
        n = row = 0
        order: list[int] = []
        for s, (queries, tokens) in enumerate(zip(query_lens, seq_lens)):
            held = before(sets[rank], max(tokens, 0))
            if not 0 <= queries <= tokens or held > width * self.block_size:
                raise ValueError(f"cpattn: {queries} queries of sequence {s} of {tokens} tokens with {width} blocks of "
                                 f"{self.block_size}; expected 0 <= queries <= tokens <= those of the blocks")
            start = tokens - queries
            row = row if q_starts is None else q_starts[s]
            if shard is not None:
                order += sorted(range(row, row + queries), key=lambda i: (start + i - row) // interleave % ranks)
            for q_set in sets:
                first, end = (before(q_set, t) for t in (start, tokens))
                if end > first:
                    items[n] = c.cpa_attend_item(q_row=row, q_count=end - first, q_first=first, k_count=held,
                                                 table=s * width, q_set=q_set, k_set=sets[rank])
                    n += 1
                row += end - first
        self.order = order if order != list(range(len(order))) else None
        return items, n

    def set_indices(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, last_page_len: Any = None, *,
                    k_first: Any = None) -> None:
        """The same from FlashInfer's arrays, all on the host: sequence s has the rows ``qo_indptr[s]`` to
        ``qo_indptr[s + 1]``, its last tokens, and the pages ``kv_indices[kv_indptr[s]:kv_indptr[s + 1]]``, of which
        the last holds ``last_page_len[s]`` tokens (None: all pages are full). ``k_first[s]`` (None: 0), a multiple of
        the block size: index of the first token of its first page, where pages before that are gone."""
        q, kv = _int32s(qo_indptr, "qo_indptr"), _int32s(kv_indptr, "kv_indptr")
        pages = _int32s(kv_indices, "kv_indices")
        last = None if last_page_len is None else _int32s(last_page_len, "last_page_len")
        first = None if k_first is None else integers(c.c_int64, k_first, "k_first")
        n = len(q) - 1
        if n < 0 or len(kv) != n + 1 or len(pages) < kv[n]:
            raise ValueError(f"cpattn: {len(q)} qo_indptr, {len(kv)} kv_indptr and {len(pages)} kv_indices; expected "
                             "n + 1, n + 1 and kv_indptr[n]")
        for what, values in (("last_page_len", last), ("k_first", first)):
            if values is not None and len(values) != n:
                raise ValueError(f"cpattn: {len(values)} {what} of {n} sequences; expected one of each")
        indices = sized(c.cpa_attend_indices, shape=self.shape, block_size=self.block_size, sequences=n,
                        qo_indptr=ctypes.addressof(q), kv_indptr=ctypes.addressof(kv),
                        last_page_len=ctypes.addressof(last) if last is not None else None,
                        k_first=ctypes.addressof(first) if first is not None else None,
                        kv_indices=ctypes.addressof(pages))
        call(lib.cpa_attend_plan_set_indices, self.handle, ctypes.byref(indices))
        self.rows = q[n]
        self.spans = q[:n], [end - begin for begin, end in itertools.pairwise(q)]
        self._held = None

    def reserve(self, sequences: int, tokens: int, num_blocks: int, rows: int = 1, total_rows: int = 0) -> None:
        """Allocates once for at most ``sequences`` sequences of ``tokens`` tokens with at most ``rows`` rows each, and
        ``total_rows`` together (0: no other bound), over caches of at least ``num_blocks`` blocks. From then on the
        plan is updated, never set."""
        limits = sized(c.cpa_attend_limits, shape=self.shape, block_size=self.block_size, rows=rows,
                       sequences=sequences, tokens=tokens, num_blocks=num_blocks, total_rows=total_rows)
        call(lib.cpa_attend_plan_reserve, self.handle, ctypes.byref(limits))
        self._limit_rows, self._limit_total = rows, total_rows or sequences * rows

    def update(self, lengths: Any, block_tables: Any, *, qo_indptr: Any = None, stream: int | None = None) -> None:
        """Enqueues what makes a reserved plan that of ``lengths``, int32 or int64 ``[sequences]``, of
        ``block_tables``, int32 ``[sequences, entries]``, and of ``qo_indptr``, int32 ``[sequences + 1]``: which rows
        each has (None: as many as are reserved). All on the device of the plan; also in a capture."""
        args = update_args(self.device, lengths, block_tables, qo_indptr)
        self._held = (lengths, block_tables, qo_indptr)
        self.rows = min(args.sequences * self._limit_rows, self._limit_total)
        enqueue(functools.partial(lib.cpa_attend_plan_update, self.handle), args, self.device, stream)

    def check_refused(self) -> None:
        """Raises if the last update refused a sequence, and says which and why. Wait for the stream before."""
        call(lib.cpa_attend_plan_refused, self.handle)

    def kernels(self) -> dict[str, str]:
        """Which kernels an attend runs, by the kind of work: ``decode``, ``prefill``, ``shared``."""
        out = c.cpa_attend_kernels()
        call(lib.cpa_attend_plan_kernel, self.handle, None, ctypes.byref(out), ctypes.sizeof(out))
        found = {kind: getattr(out, kind).name for kind in ("decode", "prefill", "shared")}
        return {kind: name.decode() for kind, name in found.items() if name}
