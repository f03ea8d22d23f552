"""What SGLang asks of a back end, and how its batches become plans."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from .. import ops
from ..cache import PagedCache
from ..torch.contexts import DTYPES, place_of
from ..torch.steps import Pages
from .pool_plans import CACHE_DTYPES, PoolPlans

LAYOUTS = {"nhd": "token-major", "hnd": "head-major"}
LARGEST_PAGE = 512


class Backend(AttentionBackend):
    """Causal attention of decoders, over pools of keys and values or of latents, where all rows, of prompts too, attend
    absorbed. A pool of layers with windows has plans of its own."""

    def __init__(self, runner: Any):
        super().__init__()
        _refuse_others(runner)
        config, pool, ranks = runner.model_config, runner.token_to_kv_pool, get_parallel().attn_tp_size
        self.pool, requests = pool, runner.req_to_token_pool
        shape = {"q_heads": config.num_attention_heads // ranks, "dtype": DTYPES[runner.dtype],
                 **place_of(requests.req_to_token)}
        common = (requests, runner.page_size, config.context_len, shape)
        self.has_latents = isinstance(_parts(pool)[0], MLATokenToKVPool)
        self.plans = PoolPlans(_parts(pool)[0], *common)
        self.window_plans: PoolPlans | None = None
        if isinstance(pool, SWAKVPool):
            self.window_plans = PoolPlans(pool.swa_kv_pool, *common, pool.translate_loc_from_full_to_swa)
        if self.has_latents:
            _attend_absorbed()
        self._pages: dict[int, Pages] = {}  # by layer
        self._rules: dict[int, ops.ScoreRules | None] = {}

    # Batches.

    def _all_plans(self) -> list[PoolPlans]:
        return [self.plans] if self.window_plans is None else [self.plans, self.window_plans]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for plans in self._all_plans():
            plans.reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise NotImplementedError(f"cpattn: a batch of {mode.name}; expected EXTEND, MIXED or DECODE")
        if mode.is_extend() and in_capture:
            raise NotImplementedError("cpattn: a graph of prefill; expected graphs of decode alone, see "
                                      "--cuda-graph-backend-prefill")
        for plans in self._all_plans():
            if mode.is_decode():
                plans.update(forward_batch, in_capture)
            elif mode.is_extend():
                plans.set(forward_batch)

    # Layers.

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any,
                       forward_batch: Any, save_kv_cache: bool = True, sinks: torch.Tensor | None = None,
                       **others: Any) -> torch.Tensor:
        """Attention of a layer over its pages, ``[tokens, heads * v_dim]``; q is ``[tokens, heads * k_dim]``."""
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"cpattn: a layer of {layer.attn_type}, cross attention "
                                      f"{layer.is_cross_attention}; expected one of a decoder")
        if any(x is not None and x is not False for x in others.values()):
            raise NotImplementedError(f"cpattn: attention with {', '.join(others)}; expected q, k, v and sinks alone")
        plans = self._plans_of(layer)
        if save_kv_cache and k is not None and v is not None:
            k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
            scales = () if self.has_latents else (layer.k_scale, layer.v_scale)
            self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch, swa_loc=plans.slots), k, v, *scales)
        if layer.qk_head_dim != plans.k_dim:
            raise NotImplementedError(f"cpattn: a layer of keys of {layer.qk_head_dim} over a cache of {plans.k_dim}; "
                                      "expected the same, and latents as they lie")
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        window = layer.sliding_window_size  # keys that a row sees before its own
        ops.attend(plans.plan, q, self._cache(layer), out=out, window=window + 1 if window > 0 else 0,
                   scale=layer.scaling, rules=self._rules_of(layer, sinks))
        return out.view(q.shape[0], -1)

    forward_decode = forward_extend

    def _plans_of(self, layer: Any) -> PoolPlans:
        """The plans over the pool that has the layer."""
        if self.window_plans is not None and self.pool.layers_mapping[layer.layer_id][1]:
            return self.window_plans
        return self.plans

    def _cache(self, layer: Any) -> PagedCache:
        """The pages of a layer."""
        k, page = self.pool.get_key_buffer(layer.layer_id), self.plans.page
        if self.has_latents:
            pages = self._pages.setdefault(layer.layer_id, Pages("token-major", layer.v_head_dim))
            return pages.of(k.view(-1, page, *k.shape[1:]), None, 1.0, 0.0)
        v, layout = self.pool.get_value_buffer(layer.layer_id), _parts(self.pool)[0].kv_cache_layout
        if layout == "nhd":
            k, v = (x.view(-1, page, *x.shape[1:]) for x in (k, v))
        pages = self._pages.setdefault(layer.layer_id, Pages(LAYOUTS[layout]))
        scales = (1.0 if s is None else s for s in (layer.k_scale_float, layer.v_scale_float))
        return pages.of(k, v, *scales)

    def _rules_of(self, layer: Any, sinks: torch.Tensor | None) -> ops.ScoreRules | None:
        """What else is done to the scores of a layer."""
        if layer.layer_id not in self._rules:
            if layer.logit_cap and layer.logit_capping_method != "tanh":
                raise NotImplementedError(f"cpattn: logits capped by {layer.logit_capping_method}; expected tanh")
            softcap, temperature_len = max(layer.logit_cap or 0.0, 0.0), max(layer.xai_temperature_len, 0)
            rules = None
            if softcap or temperature_len or sinks is not None:
                sink_logits = None if sinks is None else sinks.detach().float().contiguous()
                rules = ops.ScoreRules(softcap=softcap, temperature_len=temperature_len, sink_logits=sink_logits)
            self._rules[layer.layer_id] = rules
        return self._rules[layer.layer_id]


def _attend_absorbed() -> None:
    """DeepSeek's layers ask for each back end by its name how to attend: always by latents as they lie."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("cpattn", lambda layer, forward_batch: AttnForwardMethod.MLA)


def _parts(pool: Any) -> list[Any]:
    """The pools of which a pool is made: that of layers that see all keys first."""
    return [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]


def _refuse_others(runner: Any) -> None:
    """NotImplementedError for a configuration whose batches would not be understood."""
    pool, page, shared = runner.token_to_kv_pool, runner.page_size, get_parallel().attn_dcp_size
    parts = _parts(pool)
    expected = MLATokenToKVPool if runner.use_mla_backend else MHATokenToKVPool
    kinds = " and ".join(type(part).__name__ for part in parts)
    refused = [
        (type(pool) not in (expected, SWAKVPool) or any(type(part) is not expected for part in parts),
         f"a pool of {kinds}; expected {expected.__name__}, or SWAKVPool of two"),
        (not runner.spec_algorithm.is_none(), f"speculative decoding by {runner.spec_algorithm}; expected none"),
        (shared > 1, f"{shared} ranks of decode context parallelism; expected one"),
        (page & (page - 1) or page > LARGEST_PAGE, f"pages of {page} tokens; expected a power of two up to "
                                                   f"{LARGEST_PAGE}"),
    ]
    for part in parts:
        dtype, layout = getattr(part, "dtype", None), getattr(part, "kv_cache_layout", "nhd")
        refused += [
            (dtype not in CACHE_DTYPES or getattr(part, "is_quantized_kv_cache", False)
             or getattr(part, "use_dsa", False), f"a cache of {dtype}; expected {', '.join(map(str, CACHE_DTYPES))}, all keys of which are attended"),
            (layout not in LAYOUTS, f"a cache laid out as {layout!r}; expected one of {', '.join(LAYOUTS)}"),
        ]
    for found, line in refused:
        if found:
            raise NotImplementedError(f"cpattn: {line}")
