"""Plans of batches over the pages of one of SGLang's pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from ..plan import AttendPlan
from ..torch.contexts import DTYPES
from ..torch.steps import StepPlans

CACHE_DTYPES = {**DTYPES, torch.float8_e4m3fn: "fp8_e4m3"}


def cache_shape(pool: Any) -> dict[str, Any]:
    """What plans are told of the keys and values of a pool, of heads or of latents."""
    if isinstance(pool, MLATokenToKVPool):
        return {"kv_heads": 1, "k_dim": pool.kv_lora_rank + pool.qk_rope_head_dim, "v_dim": pool.kv_lora_rank,
                "v_in_k": True, "kv_dtype": CACHE_DTYPES[pool.dtype]}
    return {"kv_heads": pool.head_num, "k_dim": pool.head_dim, "v_dim": pool.v_head_dim,
            "kv_dtype": CACHE_DTYPES[pool.dtype]}


class PoolPlans:
    """Plans of batches over the pages of one pool, which are the blocks; of a pool whose pages are single tokens, the
    slots are. Decode updates one plan that is reserved, which graphs capture; extends set a plan.

    ``translate``: of a pool of layers with windows the slots there from those that requests have; None: the same.
    """

    def __init__(self, pool: Any, requests: Any, page: int, context: int, shape: dict[str, Any],
                 translate: Callable[[torch.Tensor], torch.Tensor] | None = None):
        self.page, self._requests, self._translate = page, requests, translate
        self._shape: dict[str, Any] = {**shape, **cache_shape(pool), "block_size": page}
        self.k_dim: int = self._shape["k_dim"]
        self._num_blocks = (pool.size + pool.page_size) // page
        self._width = -(-context // page)
        self._steps = StepPlans(lambda: AttendPlan(**self._shape))
        self._decode: AttendPlan | None = None
        self._tables: torch.Tensor | None = None  # int32 [requests, blocks] of decode, at an address that graphs hold
        self._slots: torch.Tensor | None = None  # int64 [requests] likewise: where a batch of decode writes
        self.plan: Any = None  # of the batch under way
        self.slots: torch.Tensor | None = None  # where it writes, if not where requests have it

    @property
    def tables(self) -> torch.Tensor | None:
        """Block tables of decode, which graphs hold."""
        return self._tables

    def set(self, batch: Any) -> None:
        """Makes the plan that of a batch of extends."""
        lengths = batch.seq_lens_cpu.tolist()
        self.plan = self._steps.take()
        self.plan.set([int(n) for n in batch.extend_seq_lens_cpu], lengths,
                      self._blocks(batch, -(-max(lengths) // self.page)), num_blocks=self._num_blocks)
        self.slots = self._translate(batch.out_cache_loc) if self._translate is not None else None

    def update(self, batch: Any, in_capture: bool) -> None:
        """Makes the plan of decode that of a batch, by what lies on the device alone."""
        n = batch.seq_lens.shape[0]
        self.plan = self.reserve(n)
        assert self._tables is not None and self._slots is not None
        width = self._width if batch.seq_lens_cpu is None else -(-int(batch.seq_lens_cpu.max()) // self.page)
        tables = self._tables[:n]
        tables[:, :width] = self._blocks(batch, width)
        self.plan.update(batch.seq_lens, tables)
        if self._translate is not None:
            self.slots = self._slots[:n]
            self.slots.copy_(torch.zeros_like(self.slots) if in_capture else self._translate(batch.out_cache_loc))

    def reserve(self, requests: int) -> AttendPlan:
        """The plan of decode; again only for more requests than before."""
        if self._tables is None or self._tables.shape[0] < requests:
            requests, place = max(requests, self._requests.size), self._requests.req_to_token.device
            self._tables = torch.zeros((requests, self._width), dtype=torch.int32, device=place)
            self._slots = torch.zeros(requests, dtype=torch.int64, device=place)
            self._decode = AttendPlan(**self._shape)
            self._decode.reserve(requests, self._width * self.page, self._num_blocks)
        assert self._decode is not None
        return self._decode

    def _blocks(self, batch: Any, width: int) -> torch.Tensor:
        """int32 ``[requests, width]``: the blocks of the first tokens of requests."""
        tokens = self._requests.req_to_token
        if self._translate is None:
            slots = tokens[batch.req_pool_indices, :width * self.page:self.page]
        else:  # by the last token of each page, which leaves a window last
            ends = torch.arange(1, width + 1, device=tokens.device) * self.page - 1
            last = torch.minimum(ends[None], batch.seq_lens[:, None] - 1).clamp_(min=0)
            slots = self._translate(tokens[batch.req_pool_indices[:, None], last]).int()
        return slots if self.page == 1 else slots // self.page
