"""The attention of one layer of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from .. import ops
from ..cache import PagedCache
from ..torch.steps import Pages, gather_heads, merge_heads

FP8 = ["fp8", "fp8_e4m3"]
CACHE_DTYPES = ["auto", "float16", "bfloat16", *FP8]


class Attention(AttentionImpl):
    """One layer: its keys and values are written to their slots, and its queries attend the pages.

    Under decode context parallelism ranks gather the queries of the heads of all, attend the tokens that they keep, and
    exchange heads of states (O, LSE), LSEs being natural logarithms.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: torch.Tensor | None = None, **others: Any):
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"cpattn: a layer of attn_type {attn_type}; expected 'decoder'")
        if kv_cache_dtype not in CACHE_DTYPES:
            raise NotImplementedError(f"cpattn: kv_cache_dtype {kv_cache_dtype!r}; expected one of "
                                      f"{', '.join(map(repr, CACHE_DTYPES))}")
        if others:
            raise NotImplementedError(f"cpattn: a layer with {', '.join(others)}; expected attention without")
        if alibi_slopes is not None and self.dcp_world_size > 1:
            raise NotImplementedError(f"cpattn: ALiBi with {self.dcp_world_size} ranks of decode context parallelism; "
                                      "expected one")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._softcap, self._slopes, self._sinks = logits_soft_cap or 0.0, alibi_slopes, sinks
        self._rules: ops.ScoreRules | None = None
        self._sink_logits: torch.Tensor | None = None
        self._ready = False
        self._pages = Pages("head-major")

    def _prepare(self, device: torch.device) -> None:
        """Brings what belongs to heads to the device, once weights are loaded."""
        self._ready = True
        if self._sinks is not None:
            self._sink_logits = self._sinks.detach().to(device, torch.float32).contiguous()
        slopes = None if self._slopes is None else torch.tensor(self._slopes, dtype=torch.float32, device=device)
        sinks = self._sink_logits if self.dcp_world_size == 1 else None  # else counted once, as states are merged
        if self._softcap or slopes is not None or sinks is not None:
            self._rules = ops.ScoreRules(softcap=self._softcap, alibi_slopes=slopes, sink_logits=sinks)

    def _cache(self, layer: Any, kv_cache: torch.Tensor) -> PagedCache:
        """The cache of ``[blocks, kv_heads, tokens, k_dim + v_dim]``, in any order of memory but that of the last."""
        if self.kv_cache_dtype in FP8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        k, v = kv_cache[..., :self.head_size], kv_cache[..., self.head_size:]
        return self._pages.of(k, v, layer._k_scale_float, layer._v_scale_float)

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        """Writes the keys and values of the tokens that have a slot on this rank."""
        n = slot_mapping.shape[0]
        ops.kv_write(self._cache(layer, kv_cache), key[:n], value[:n], slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor,
                output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Attends; ``query`` is ``[rows, heads, k_dim]``, ``output`` ``[rows, heads, v_dim]``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("cpattn: quantised results of attention; expected those of the model's dtype")
        if attn_metadata is None:  # memory is being measured, and there is no cache
            return output.fill_(0)
        if not self._ready:
            self._prepare(query.device)
        plan = attn_metadata.plan
        cache = self._cache(layer, kv_cache)
        options: dict[str, Any] = {"window": self.sliding_window or 0, "scale": self.scale, "rules": self._rules}
        if self.dcp_world_size == 1:
            ops.attend(plan, query, cache, out=output, **options)
            return output
        group, order, n = get_dcp_group().device_group, attn_metadata.order, plan.rows
        rows = query[:n] if order is None else query.index_select(0, order)
        o, lse = ops.attend(plan, gather_heads(rows, group), cache, lse=True, **options)
        merged = output[:n] if order is None else torch.empty_like(output[:n])
        merge_heads(o, lse, group, merged, self._sink_logits)
        if order is not None:
            output.index_copy_(0, order, merged)
        return output
