"""What SGLang asks of a back end, and how its batches become plans."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from .. import ops
from ..cache import PagedCache
from ..plan import AttendPlan
from ..torch.contexts import DTYPES, place_of
from ..torch.steps import Pages, StepPlans

CACHE_DTYPES = {**DTYPES, torch.float8_e4m3fn: "fp8_e4m3"}
LAYOUTS = {"nhd": "token-major", "hnd": "head-major"}
LARGEST_PAGE = 512


class Backend(AttentionBackend):
    """Causal attention of decoders. Decode updates one plan that is reserved, which graphs capture; extends set a plan.

    Pages of SGLang's pool are the blocks; of a pool whose pages are single tokens, the slots are.
    """

    def __init__(self, runner: Any):
        super().__init__()
        _refuse_others(runner)
        config, ranks = runner.model_config, get_parallel().attn_tp_size
        self.pool, self.requests = runner.token_to_kv_pool, runner.req_to_token_pool
        self.page = runner.page_size
        self._shape: dict[str, Any] = {
            "q_heads": config.num_attention_heads // ranks, "kv_heads": config.get_num_kv_heads(ranks),
            "k_dim": config.head_dim, "v_dim": config.v_head_dim, "block_size": self.page,
            "dtype": DTYPES[runner.dtype], "kv_dtype": CACHE_DTYPES[self.pool.dtype],
            **place_of(self.requests.req_to_token)}
        self._num_blocks = (self.pool.size + self.pool.page_size) // self.page
        self._width = -(-config.context_len // self.page)
        self._steps = StepPlans(lambda: AttendPlan(**self._shape))
        self._decode: AttendPlan | None = None
        self._tables: torch.Tensor | None = None  # int32 [requests, blocks] of decode, at an address that graphs hold
        self._pages: dict[int, Pages] = {}  # by layer
        self._rules: dict[int, ops.ScoreRules | None] = {}
        self.plan: Any = None  # of the batch under way

    # Batches.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self._update(forward_batch)
        elif mode.is_target_verify() or mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise NotImplementedError(f"cpattn: a batch of {mode.name}; expected EXTEND, MIXED or DECODE")
        elif mode.is_extend() and in_capture:
            raise NotImplementedError("cpattn: a graph of prefill; expected graphs of decode alone, see "
                                      "--cuda-graph-backend-prefill")
        elif mode.is_extend():
            lengths = forward_batch.seq_lens_cpu.tolist()
            self.plan = self._steps.take()
            self.plan.set([int(n) for n in forward_batch.extend_seq_lens_cpu], lengths,
                          self._blocks(forward_batch.req_pool_indices, -(-max(lengths) // self.page)),
                          num_blocks=self._num_blocks)

    def _blocks(self, requests: torch.Tensor, width: int) -> torch.Tensor:
        """int32 ``[requests, width]``: the blocks of the first tokens of requests."""
        slots = self.requests.req_to_token[requests, :width * self.page:self.page]
        return slots if self.page == 1 else slots // self.page

    def _reserve(self, requests: int) -> AttendPlan:
        """The plan of decode; again only for more requests than before."""
        if self._tables is None or self._tables.shape[0] < requests:
            requests = max(requests, self.requests.size)
            self._tables = torch.zeros((requests, self._width), dtype=torch.int32,
                                       device=self.requests.req_to_token.device)
            self._decode = AttendPlan(**self._shape)
            self._decode.reserve(requests, self._width * self.page, self._num_blocks)
        assert self._decode is not None
        return self._decode

    def _update(self, batch: Any) -> None:
        """Makes the plan of decode that of a batch, by what lies on the device alone."""
        n = batch.seq_lens.shape[0]
        self.plan = self._reserve(n)
        assert self._tables is not None
        width = self._width if batch.seq_lens_cpu is None else -(-int(batch.seq_lens_cpu.max()) // self.page)
        tables = self._tables[:n]
        tables[:, :width] = self._blocks(batch.req_pool_indices, width)
        self.plan.update(batch.seq_lens, tables)

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
        if save_kv_cache and k is not None and v is not None:
            k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
            self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v, layer.k_scale, layer.v_scale)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        window = layer.sliding_window_size  # keys that a row sees before its own
        ops.attend(self.plan, q, self._cache(layer), out=out, window=window + 1 if window > 0 else 0,
                   scale=layer.scaling, rules=self._rules_of(layer, sinks))
        return out.view(q.shape[0], -1)

    forward_decode = forward_extend

    def _cache(self, layer: Any) -> PagedCache:
        """The pages of a layer."""
        k, v = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        if self.pool.kv_cache_layout == "nhd":
            k, v = (x.view(-1, self.page, *x.shape[1:]) for x in (k, v))
        pages = self._pages.setdefault(layer.layer_id, Pages(LAYOUTS[self.pool.kv_cache_layout]))
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


def _refuse_others(runner: Any) -> None:
    """NotImplementedError for a configuration whose batches would not be understood."""
    pool, page, shared = runner.token_to_kv_pool, runner.page_size, get_parallel().attn_dcp_size
    refused = [
        (runner.use_mla_backend, "multi-head latent attention; expected keys and values of heads"),
        (type(pool) is not MHATokenToKVPool, f"a pool of {type(pool).__name__}; expected MHATokenToKVPool, for windows "
                                             "see --disable-hybrid-swa-memory"),
        (not runner.spec_algorithm.is_none(), f"speculative decoding by {runner.spec_algorithm}; expected none"),
        (shared > 1, f"{shared} ranks of decode context parallelism; expected one"),
        (page & (page - 1) or page > LARGEST_PAGE, f"pages of {page} tokens; expected a power of two up to "
                                                   f"{LARGEST_PAGE}"),
        (getattr(pool, "dtype", None) not in CACHE_DTYPES or getattr(pool, "is_quantized_kv_cache", False),
         f"a cache of {getattr(pool, 'dtype', None)}; expected {', '.join(map(str, CACHE_DTYPES))}"),
        (getattr(pool, "kv_cache_layout", None) not in LAYOUTS,
         f"a cache laid out as {getattr(pool, 'kv_cache_layout', None)!r}; expected one of {', '.join(LAYOUTS)}"),
    ]
    for found, line in refused:
        if found:
            raise NotImplementedError(f"cpattn: {line}")
