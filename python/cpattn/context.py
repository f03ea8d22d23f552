"""Context attention: attention of a step over a paged cache that is sharded over the ranks of a communicator."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _declarations as c
from ._device import Device, device
from ._library import create, integers, lib, raise_status, sized
from ._tensors import empty_like, plain_dtype, read_on, rows, vector
from .cache import PagedCache
from .communicator import Communicator
from .ops import ScoreRules, mask_of
from .plan import shape_of, update_args

ALGORITHMS = {"auto": c.CPA_AUTO, "pass-kv": c.CPA_PASS_KV, "pass-q": c.CPA_PASS_Q}
_MOST_TOKENS = (1 << 63) - 1  # that an int64_t counts


@dataclass(frozen=True)
class Chunk:
    """The new tokens [start, start + count) of one sequence, over the keys up to their end; the same on every rank but
    for the table.

    ``block_table``: this rank's blocks of its tokens of the sequence. ``algorithm``: ``"pass-kv"``, ``"pass-q"``, or
    ``"auto"``: what moves fewer bytes. ``rank``: the owner of position 0; ``on_rank``: the sequence lies on that rank
    alone.
    """

    start: int
    count: int
    block_table: Sequence[int]
    algorithm: str = "auto"
    rank: int = 0
    on_rank: bool = False


class Context:
    """Attention of several ranks. Creating and destroying it is collective, with the same arguments on every rank.

    ``group``: a ``Communicator``, a process group of torch.distributed, or None: that of all ranks where
    torch.distributed is initialised, else one rank alone. ``max_rows``: most new tokens of a step, over all ranks.
    ``interleave``: tokens in a row that one rank owns, a multiple or a divisor of ``block_size`` (0: that): rank
    (t / interleave) mod N owns token t of a sequence whose first rank is 0. ``staging_bytes`` bounds the memory for
    keys and values on their way (0: 64 MiB on the host, 2 GiB on a GPU).

    ``rows="owned"``: each rank has the rows of the tokens that it owns. ``rows="replicated"``: every rank gives the
    queries of all rows, and gets the results of its slice of the heads, [``head_slice``], of every row.

    Used by one thread at a time, that of the communicator. A step is ``plan`` and one ``attend`` a layer; or, for
    CUDA graphs of decode, ``reserve`` once, and ``update`` and ``attend``.
    """

    def __init__(self, group: Any = None, *, q_heads: int, kv_heads: int, k_dim: int, v_dim: int | None = None,
                 block_size: int = 16, max_rows: int = 8192, interleave: int = 0, rows: str = "owned",
                 dtype: str = "fp32", kv_dtype: str | None = None, v_in_k: bool = False, staging_bytes: int = 0,
                 backend: str = "host", ordinal: int = 0):
        if rows not in ("owned", "replicated"):
            raise ValueError(f"cpattn: rows {rows!r} of a context; expected 'owned' or 'replicated'")
        self.communicator = group if isinstance(group, Communicator) else _communicator(group)
        self.device: Device = device(backend, ordinal)
        self.shape = shape_of(q_heads, kv_heads, k_dim, v_dim, dtype, kv_dtype, v_in_k)
        self.block_size = block_size
        self.max_rows = max_rows
        self.replicated = rows == "replicated"
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.map = c.cpa_owner_map(self.size, interleave or block_size)
        options = sized(c.cpa_context_options, shape=self.shape, block_size=block_size, interleave=interleave,
                        staging_bytes=staging_bytes, max_rows=max_rows,
                        rows=c.CPA_ROWS_REPLICATED if self.replicated else c.CPA_ROWS_OWNED)
        self.handle = create(lib.cpa_context_create, self.communicator.handle, self.device.handle,
                             ctypes.byref(options))
        self.communicator.contexts.append(self.handle)
        self.n_rows = 0

    def close(self) -> None:
        """Ends the context. Collective; without it the end of the process does."""
        if hasattr(self, "handle"):
            self.communicator.destroy_context(self.handle)
            del self.handle

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    @property
    def head_slice(self) -> tuple[int, int]:
        """The heads of this rank's results: all, or with replicated rows its slice."""
        heads = self.shape.q_heads
        if not self.replicated:
            return 0, heads
        return (lib.cpa_slice_begin(heads, self.size, self.rank), lib.cpa_slice_begin(heads, self.size, self.rank + 1))

    def tokens_on(self, length: int, *, first_rank: int = 0, rank: int | None = None) -> int:
        """How many of the first ``length`` tokens of a sharded sequence a rank (by default this one) holds."""
        own = self._own(first_rank, self.rank if rank is None else rank)
        return lib.cpa_tokens_before(self.map, own, length)

    def positions(self, start: int, end: int, *, first_rank: int = 0, rank: int | None = None) -> list[int]:
        """The positions in [start, end) of a sharded sequence that a rank (by default this one) owns, ascending. The
        i-th of all its positions is its local token i, in block i / block_size of its table."""
        own = self._own(first_rank, self.rank if rank is None else rank)
        first, last = (lib.cpa_tokens_before(self.map, own, p) for p in (start, end))
        return [lib.cpa_token_position(self.map, own, i) for i in range(first, last)]

    def _own(self, first_rank: int, rank: int) -> Any:
        return lib.cpa_tokens_on(self.map, c.cpa_placement(c.CPA_SHARDED, first_rank), rank)

    def _check(self, status: int) -> None:
        if status:
            raise_status(status, lib.cpa_context_error(self.handle))

    def plan(self, chunks: Sequence[Chunk]) -> int:
        """Plans a step; how many rows this rank has in it: the tokens of the chunks that it owns, or all of them,
        chunk after chunk. Every rank plans the same chunks. The tables are copied."""
        array = (c.cpa_context_chunk * len(chunks))()
        tables = [integers(c.c_int32, chunk.block_table, "blocks") for chunk in chunks]
        for i, (chunk, table) in enumerate(zip(chunks, tables)):
            if chunk.algorithm not in ALGORITHMS:
                raise ValueError(f"cpattn: algorithm {chunk.algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
            most = _MOST_TOKENS - chunk.start
            if not (chunk.start >= 0 and 0 <= chunk.count <= most and 0 <= chunk.rank < self.size):
                raise ValueError(f"cpattn: chunk {i} is of {chunk.count} tokens from {chunk.start} on, its first rank "
                                 f"{chunk.rank}; expected none below 0, a rank below {self.size}, and {_MOST_TOKENS} "
                                 "tokens at most")
            placement = c.cpa_placement(c.CPA_ON_RANK if chunk.on_rank else c.CPA_SHARDED, chunk.rank)
            own = lib.cpa_tokens_on(self.map, placement, self.rank)
            needed = -(-lib.cpa_tokens_before(self.map, own, chunk.start + chunk.count) // self.block_size)
            if len(table) < needed:
                raise ValueError(f"cpattn: {len(table)} blocks of chunk {i}, whose tokens on rank {self.rank} take "
                                 f"{needed}")
            array[i] = c.cpa_context_chunk(start=chunk.start, count=chunk.count, placement=placement,
                                           algorithm=self._algorithm(chunk), block_table=ctypes.addressof(table))
        self._check(lib.cpa_context_plan(self.handle, array, len(chunks)))
        self.n_rows = lib.cpa_context_rows(self.handle, array, len(chunks))
        return self.n_rows

    def _algorithm(self, chunk: Chunk) -> int:
        if chunk.algorithm != "auto":
            return ALGORITHMS[chunk.algorithm]
        question = sized(c.cpa_algorithm_question, shape=self.shape, ranks=self.size, new_tokens=chunk.count,
                         cached_tokens=chunk.start)
        return lib.cpa_algorithm_choose(ctypes.byref(question)) or c.CPA_PASS_Q

    def attend(self, q: Any, cache: PagedCache, *, out: Any = None, lse: Any = None, causal: bool = True,
               window: int = 0, sinks: int = 0, scale: float = 0.0, rules: ScoreRules | None = None,
               stream: int | None = None) -> Any:
        """Attends one layer of the planned step. Collective: the same layers in the same order on every rank.

        ``q``: ``[rows, q_heads, k_dim]``, contiguous; the keys and values of the new tokens that this rank owns are in
        ``cache`` before (``ops.kv_write``). Returns ``out``, ``[rows, heads of this rank's results, v_dim]``; with
        ``lse``, fp32 ``[rows, heads]`` or True, ``(out, lse)``.
        """
        queries, shape, n = read_on(self.device, q, "q"), self.shape, self.n_rows
        begin, end = self.head_slice
        heads, v_dim = end - begin, shape.v_dim
        if plain_dtype(queries, "q") != shape.dtype or queries.shape[0] < n:
            raise ValueError(f"cpattn: q is {queries.dtype} of {queries.shape[0]} rows; expected the dtype of the "
                             f"context and {n} rows")
        if n and rows(queries, "q", shape.q_heads, shape.k_dim) != shape.q_heads * shape.k_dim:
            raise ValueError("cpattn: q is not contiguous")
        if cache.device is not self.device:
            raise ValueError(f"cpattn: the cache lies on {cache.device!r}, the context on {self.device!r}")
        if rules is not None:
            rules.check(self.device, shape.q_heads)
        if out is None:
            out = empty_like(q, (n, heads, v_dim))
        if lse is True:
            lse = empty_like(q, (n, heads), "fp32")
        written: dict[str, Any] = {"place": self.device, "written": True}
        args = sized(c.cpa_context_args, q=queries.address, kv=cache.view, mask=mask_of(causal, window, sinks),
                     scale=scale, out=vector(out, "out", queries.dtype, n * heads * v_dim, **written),
                     lse=None if lse is None else vector(lse, "lse", "fp32", n * heads, **written),
                     rules=None if rules is None else ctypes.addressof(rules.rules))
        self._check(lib.cpa_context_attend(self.handle, ctypes.byref(args), self.device.stream(stream)))
        return out if lse is None else (out, lse)

    def reserve(self, sequences: int, tokens: int, num_blocks: int, rows: int = 1) -> None:
        """Allocates once for decode of at most ``sequences`` sharded sequences of ``tokens`` tokens on all ranks
        together, of which at most ``rows`` are new in a step, over caches of at least ``num_blocks`` blocks on this
        rank. Collective, once."""
        limits = sized(c.cpa_context_limits, sequences=sequences, tokens=tokens, num_blocks=num_blocks, rows=rows)
        self._check(lib.cpa_context_reserve(self.handle, ctypes.byref(limits)))
        self._reserved = sequences * rows

    def update(self, lengths: Any, block_tables: Any, *, first_ranks: Any = None, qo_indptr: Any = None,
               stream: int | None = None) -> None:
        """Enqueues what makes the reserved step that of ``lengths``, int32 or int64 ``[sequences]``, tokens on all
        ranks; of this rank's ``block_tables``, int32 ``[sequences, entries]``; and of ``first_ranks``, int32
        ``[sequences]`` or None: rank 0. All on the device; also in a capture. The rows from ``s * rows`` on of q, out
        and lse are those of sequence s on every rank: its new tokens that this rank owns, of ``rows``, or of
        ``qo_indptr[s + 1] - qo_indptr[s]`` ones, int32 ``[sequences + 1]``."""
        args = update_args(self.device, lengths, block_tables, qo_indptr, first_ranks)
        self._held = (lengths, block_tables, first_ranks, qo_indptr)
        handle = self.device.stream(stream)
        self._check(lib.cpa_context_update(self.handle, ctypes.byref(args), handle))
        self.n_rows = self._reserved

    def stats(self) -> dict[str, float | str]:
        """What has happened on this rank since the context was created: numbers and names of cpa_context_stats."""
        out = c.cpa_context_stats()
        self._check(lib.cpa_context_get_stats(self.handle, ctypes.byref(out), ctypes.sizeof(out)))
        found = ((field[0], getattr(out, field[0])) for field in out._fields_)
        return {name: x.decode() if isinstance(x, bytes) else x for name, x in found
                if isinstance(x, (int, float, bytes))}


def _communicator(group: Any) -> Communicator:
    distributed = sys.modules.get("torch.distributed")
    if group is not None or (distributed is not None and distributed.is_available() and distributed.is_initialized()):
        return Communicator.from_group(group)
    return Communicator.alone()
