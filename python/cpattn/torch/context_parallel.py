"""Scaled dot product attention over sequences that are sharded over the ranks of a mesh, as PyTorch's context_parallel
has it; inference only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..cache import PagedCache
from ..communicator import Communicator
from ..context import Chunk
from .contexts import Contexts

BLOCK = 16  # tokens in a row that a rank has: short, so that all ranks have as much causal work


class _Shards:
    """How sequences lie on the ranks, and their contexts."""

    def __init__(self, group: Any):
        self.group = group
        self.communicator = Communicator.from_group(group)
        self.contexts = Contexts(self.communicator, BLOCK, "owned")
        self.length = 0  # tokens of the sequences on all ranks

    def positions(self, length: int, rank: int) -> list[int]:
        """The positions that a rank has of a sequence of `length` tokens: runs of BLOCK tokens in turn."""
        size = self.communicator.size
        return [t for t in range(length) if t // BLOCK % size == rank]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        """Attention of [batch, heads, own tokens, dim] over the keys of all ranks."""
        batch, _, own, _ = q.shape
        if own != len(self.positions(self.length, self.communicator.rank)) or k.shape[2] != own:
            raise ValueError(f"cpattn: attention of {own} queries and {k.shape[2]} keys within context_parallel of "
                             f"{self.length} tokens; expected those of its shard")
        context = self.contexts.take(q, k, v, batch * self.length)
        blocks = -(-own // BLOCK)
        pools = [_paged(x, blocks) for x in (k, v)]
        tables = [range(b * blocks, (b + 1) * blocks) for b in range(batch)]
        context.plan([Chunk(0, self.length, table) for table in tables])
        rows = q.transpose(1, 2).reshape(batch * own, q.shape[1], q.shape[3]).contiguous()
        out = context.attend(rows, PagedCache(*pools), causal=causal, scale=scale)
        return out.view(batch, own, q.shape[1], v.shape[3]).transpose(1, 2)


def _paged(x: torch.Tensor, blocks: int) -> torch.Tensor:
    """[batch, heads, tokens, dim] as blocks of tokens, [batch * blocks, BLOCK, heads, dim]."""
    batch, heads, tokens, dim = x.shape
    pool = x.new_zeros((batch, blocks * BLOCK, heads, dim))
    pool[:, :tokens] = x.transpose(1, 2)
    return pool.view(batch * blocks, BLOCK, heads, dim)


class _Attention(TorchFunctionMode):
    """Takes the calls of scaled_dot_product_attention."""

    def __init__(self, shards: _Shards):
        super().__init__()
        self.shards = shards

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Any:
        if attn_mask is not None or dropout_p:
            raise NotImplementedError("cpattn: context_parallel takes is_causal, and neither attn_mask nor dropout_p")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise NotImplementedError("cpattn: context_parallel has no gradients; use torch.no_grad()")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(f"cpattn: {query.shape[1]} heads of queries and {key.shape[1]} of keys without enable_gqa")
        with torch._C.DisableTorchFunction():
            return self.shards.attend(query, key, value, is_causal, scale or 0.0)


_shards: dict[Any, _Shards] = {}


def _of_mesh(mesh: Any) -> _Shards:
    """The ranks of a one-dimensional DeviceMesh, or of a process group; made once, collectively."""
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    if group not in _shards:
        _shards[group] = _Shards(group)
    return _shards[group]


@contextlib.contextmanager
def context_parallel(mesh: Any, *, buffers: Sequence[torch.Tensor] = (), buffer_seq_dims: Sequence[int] = (),
                     no_restore_buffers: set[torch.Tensor] | None = None) -> Iterator[None]:
    """Within it, ``F.scaled_dot_product_attention`` attends over the sequences of all ranks of the mesh.

    The recipe is that of ``torch.distributed.tensor.experimental.context_parallel``: every rank has the same
    ``buffers``, whose dimensions ``buffer_seq_dims`` are that of the sequence; each is cut to the rank's shard in
    place, and comes back whole at the end unless it is among ``no_restore_buffers``. Positions (rotary tables, position
    ids) have to be among the buffers. Results are shards, which ``context_parallel_unshard`` joins.

    A rank has runs of 16 tokens in turn, whatever the length, so that shards may differ by one run. Attention is that
    of ``is_causal`` (by position in the whole sequence) or full, with ``scale`` and ``enable_gqa``, without a mask.
    ``mesh``: a one-dimensional DeviceMesh or a process group. Collective.
    """
    if len(buffers) != len(buffer_seq_dims):
        raise ValueError(f"cpattn: {len(buffers)} buffers and {len(buffer_seq_dims)} buffer_seq_dims")
    lengths = {x.shape[d] for x, d in zip(buffers, buffer_seq_dims)}
    if len(lengths) != 1:
        raise ValueError(f"cpattn: buffers of {sorted(lengths)} tokens; expected one length, that of the sequences")
    shards = _of_mesh(mesh)
    before, length = shards.length, lengths.pop()
    own = shards.positions(length, shards.communicator.rank)
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        shards.length = length
        for x, d in zip(buffers, buffer_seq_dims):
            kept = no_restore_buffers is None or not any(x is y for y in no_restore_buffers)
            content = x.clone() if kept else None
            shard = x.index_select(d, torch.tensor(own, dtype=torch.int64, device=x.device))
            x.resize_(shard.shape)
            if content is not None:
                whole.append((x, content))
            x.copy_(shard)
        with _Attention(shards):
            yield
    finally:
        shards.length = before
        for x, content in whole:
            x.resize_(content.shape)
            x.copy_(content)


def context_parallel_unshard(mesh: Any, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int],
                             length: int) -> list[torch.Tensor]:
    """The whole tensors of the ranks' shards of ``length`` tokens, on every rank. Collective."""
    shards = _of_mesh(mesh)
    size = shards.communicator.size
    places = [shards.positions(length, rank) for rank in range(size)]
    longest = max(map(len, places))
    joined = []
    for x, d in zip(buffers, seq_dims):
        shard = x.movedim(d, 0)
        padded = shard.new_zeros((longest, *shard.shape[1:]))
        padded[:shard.shape[0]] = shard
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=shards.group)
        out = shard.new_empty((length, *shard.shape[1:]))
        for part, place in zip(parts, places):
            out[torch.tensor(place, dtype=torch.int64, device=x.device)] = part[:len(place)]
        joined.append(out.movedim(0, d))
    return joined
