"""What back ends of serving stacks have in common: plans of steps, views of caches, and ranks that share heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import ops
from ..cache import PagedCache
from ..plan import AttendPlan


class StepPlans:
    """Two plans that are set in turn, so that the host may prepare a step while the device computes the one before.

    The steps are enqueued on the stream that is current when the next one is prepared.
    """

    def __init__(self, make: Callable[[], AttendPlan]):
        self._plans = [make(), make()]
        self._done: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def take(self) -> AttendPlan:
        """The plan to be set for a step, when the attends of the step that it was set for before are over."""
        if self._plans[0].device.backend == "cuda":
            self._done[self._turn] = torch.cuda.current_stream().record_event()
        self._turn ^= 1
        event = self._done[self._turn]
        if event is not None:
            event.synchronize()
        return self._plans[self._turn]


class Pages:
    """The view of one layer's cache, made again only where its memory, form or scales are others. ``v_dim``: that of
    latents."""

    def __init__(self, layout: str, v_dim: int | None = None):
        self.layout, self.v_dim = layout, v_dim
        self._known: Any = None
        self._cache: PagedCache | None = None

    def of(self, k: torch.Tensor, v: torch.Tensor | None, k_scale: float, v_scale: float) -> PagedCache:
        """The cache of pools of keys and values; scales count for 8-bit elements alone. ``v`` None: of latents."""
        values = None if v is None else (v.data_ptr(), v.shape, v.stride())
        known = (k.data_ptr(), k.shape, k.stride(), k.dtype, values, k_scale, v_scale)
        if self._cache is None or self._known != known:
            k_scale, v_scale = (k_scale, v_scale) if k.dtype.itemsize == 1 else (0.0, 0.0)
            self._cache = PagedCache(k, v, v_dim=self.v_dim, layout=self.layout, k_scale=k_scale, v_scale=v_scale)
            self._known = known
        return self._cache


def gather_heads(q: torch.Tensor, group: Any) -> torch.Tensor:
    """``[rows, heads of all ranks, dim]`` of the ``[rows, heads, dim]`` of each, by rank. Collective."""
    rows, heads, dim = q.shape
    size = dist.get_world_size(group)
    parts = q.new_empty((size * rows, heads, dim))
    dist.all_gather_into_tensor(parts, q.contiguous(), group=group)
    return parts.view(size, rows, heads, dim).transpose(0, 1).reshape(rows, size * heads, dim)


def merge_heads(o: torch.Tensor, lse: torch.Tensor, group: Any, out: torch.Tensor,
                sink_logits: torch.Tensor | None = None) -> None:
    """Each rank has attended the same rows, with the heads of all ranks, over keys of its own: ``o`` ``[rows, heads of
    all ranks, dim]`` and ``lse`` ``[rows, heads of all ranks]``. It gets the merged results of its heads in ``out``,
    ``[rows, heads, dim]``. ``sink_logits``: those of its heads. Collective."""
    rows, heads, dim = out.shape
    size = dist.get_world_size(group)
    states = []
    for x in (o.view(rows, size, heads, dim), lse.view(rows, size, heads)):
        sent = x.transpose(0, 1).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        states.append(got)
    ops.merge(list(zip(*states)), out=out, sink_logits=sink_logits)
