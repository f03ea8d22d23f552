"""The attention of one layer of vLLM's over latents (multi-head latent attention)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from .. import ops
from ..cache import PagedCache
from ..torch.steps import Pages
from .attention import CACHE_DTYPES, FP8


class LatentAttention(MLAAttentionImpl):
    """One layer: its latents are written to their slots, and all rows, of prompts too, attend them as they lie, by
    queries that vLLM has multiplied by W_UK; it multiplies the results by W_UV.

    Under decode context parallelism the layer gathers the queries of the heads of all ranks and joins what they return,
    (O, LSE), LSEs being natural logarithms.
    """

    can_return_lse_for_decode = True
    supports_pcp = False
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
                 alibi_slopes: list[float] | None, sliding_window: int | None, kv_cache_dtype: str,
                 logits_soft_cap: float | None, attn_type: str, kv_sharing_target_layer_name: str | None, *,
                 kv_lora_rank: int, indexer: object | None = None, **widths: Any):
        for found, line in (
                (attn_type != AttentionType.DECODER, f"a layer of attn_type {attn_type}; expected 'decoder'"),
                (kv_cache_dtype not in CACHE_DTYPES,
                 f"kv_cache_dtype {kv_cache_dtype!r}; expected one of {', '.join(map(repr, CACHE_DTYPES))}"),
                (alibi_slopes is not None or logits_soft_cap, "ALiBi or a soft cap over latents; expected neither"),
                (kv_sharing_target_layer_name is not None, "latents of another layer; expected those of its own"),
                (indexer is not None, "a layer with an indexer; expected one that attends all keys")):
            if found:
                raise NotImplementedError(f"cpattn: {line}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, kv_lora_rank
        self.sliding_window = sliding_window
        self._pages = Pages("token-major", kv_lora_rank)
        self._scale = 0.0  # of codes, which the host has to know

    def _view(self, kv_cache: torch.Tensor) -> PagedCache:
        """The cache of ``[blocks, tokens, latent + rope]``."""
        if self.kv_cache_dtype in FP8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return self._pages.of(kv_cache.unsqueeze(2), None, self._scale, 0.0)

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor,
                           skip_scale: bool = False) -> None:
        """Writes the latents of the tokens that have a slot on this rank."""
        if kv_cache.numel() == 0:  # memory is being measured
            return
        if self.kv_cache_dtype in FP8 and not self._scale:
            self._scale = float(k_scale)
        n = slot_mapping.shape[0]
        rows = torch.cat((kv_c_normed[:n].unsqueeze(1), k_pe[:n].view(n, 1, k_pe.shape[-1])), dim=-1)
        ops.kv_write(self._view(kv_cache), rows, None, slot_mapping)

    def forward_mqa(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor,
                    attn_metadata: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[rows, heads, latent]`` and, where ranks share the tokens, LSEs ``[rows, heads]``."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        plan, order = attn_metadata.plan, attn_metadata.order
        rows = q if order is None else q.index_select(0, order)
        result = ops.attend(plan, rows, self._view(kv_c_and_k_pe_cache), window=self.sliding_window or 0,
                            scale=self.scale, out=q.new_empty((*rows.shape[:2], self.kv_lora_rank)),
                            lse=self.need_to_return_lse_for_decode or None)
        out, lse = result if self.need_to_return_lse_for_decode else (result, None)
        if order is None:
            return out, lse
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return out.index_select(0, back), None if lse is None else lse.index_select(0, back)
