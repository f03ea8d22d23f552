"""What vLLM asks of a back end, and how its steps become plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionMetadata,
                                       AttentionMetadataBuilder, CommonAttentionMetadata)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens, get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from ..plan import AttendPlan
from ..torch.contexts import DTYPES, place_of
from ..torch.steps import StepPlans
from .attention import CACHE_DTYPES, Attention

WIDEST_HEAD = 256  # that the tensor-core kernels take


class Backend(AttentionBackend):
    """Causal attention of decoders over pages of keys and values."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256, 512]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= WIDEST_HEAD

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or capability.major >= 8

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # plans are set from the lengths on the host


@dataclass
class Metadata(AttentionMetadata):
    """The plan of a step, which all layers of a group attend by."""

    plan: AttendPlan
    num_actual_tokens: int
    """rows of the step, those that fill it up for a graph included"""
    order: torch.Tensor | None
    """int64 ``[rows]`` on the device: which row of the step each row of the plan is; None: the same"""


class Builder(AttentionMetadataBuilder[Metadata]):
    """Steps of one token a sequence update one plan that is reserved, which graphs capture; others set a plan.

    The tokens that this rank keeps under decode context parallelism are those that vLLM says:
    (t / cp_kv_cache_interleave_size) mod ranks = rank.
    """

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig,
                 device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.ranks, self.rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        heads = (get_num_attention_heads_from_layers(vllm_config, layer_names)
                 or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config))
        dtype = DTYPES[vllm_config.model_config.dtype]
        self._shape: dict[str, Any] = {
            "q_heads": heads * self.ranks, "kv_heads": kv_cache_spec.num_kv_heads, "k_dim": kv_cache_spec.head_size,
            **self._value_shape(), "block_size": kv_cache_spec.block_size, "dtype": dtype,
            "kv_dtype": ("fp8_e4m3" if kv_cache_spec.kv_quant_mode == KVQuantMode.FP8_PER_TENSOR
                         else DTYPES[kv_cache_spec.dtype]),
            **place_of(torch.empty(0, device=device))}
        self._steps = StepPlans(lambda: AttendPlan(**self._shape))
        self._decode: AttendPlan | None = None
        self._limits: tuple[int, int, int] | None = None  # that it was reserved for

    def _value_shape(self) -> dict[str, Any]:
        """The values of a cache, as plans are told of them."""
        return {"v_dim": self.kv_cache_spec.head_size_v}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        if _shares(vllm_config) and kv_cache_spec.dcp_sharded and _windowed(vllm_config, None):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> Metadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise NotImplementedError(f"cpattn: causal is {step.causal} of a step; expected True")
        n, order = step.num_reqs, None
        tables = step.block_table_tensor[:n].contiguous()
        # A reserved plan knows the keys that are here, not where they are in the sequence, which a window asks.
        if step.max_query_len == 1 and not (self.ranks > 1 and _windowed(self.vllm_config, self.layer_names)):
            plan, lengths = self._reserved(tables), step.seq_lens[:n]
            plan.update(self.local_lengths(lengths) if self.ranks > 1 else lengths, tables)
        else:
            plan = self._steps.take()
            starts = step.query_start_loc_cpu[:n + 1].tolist()
            plan.set([end - start for start, end in zip(starts, starts[1:])], self._lengths(step, n), tables,
                     num_blocks=self._num_blocks(),
                     shard=(self.rank, self.ranks, self.interleave) if self.ranks > 1 else None)
            if plan.order is not None:
                order = torch.tensor(plan.order).to(self.device)
        return Metadata(plan, step.num_actual_tokens, order)

    def local_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many tokens of sequences of these lengths this rank keeps."""
        return get_dcp_local_seq_lens(lengths, self.ranks, self.rank, self.interleave)

    def _reserved(self, tables: torch.Tensor) -> AttendPlan:
        """The plan of decode, for all that the configuration allows; another once the caches are others, as after
        memory was measured."""
        config = self.vllm_config
        sequences = max(config.scheduler_config.max_num_seqs, config.compilation_config.max_cudagraph_capture_size or 0,
                        tables.shape[0])
        limits = (sequences, tables.shape[1] * self._shape["block_size"], self._num_blocks())
        if self._decode is None or self._limits != limits:
            self._decode, self._limits = AttendPlan(**self._shape), limits
            self._decode.reserve(*limits)
        return self._decode

    def _num_blocks(self) -> int:
        """Blocks of the caches of these layers."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return layers[self.layer_names[0]].kv_cache.shape[0]

    def _lengths(self, step: CommonAttentionMetadata, n: int) -> list[int]:
        """The lengths of the sequences; where drafts may have been refused the device alone knows them."""
        known = step.seq_lens_cpu_upper_bound
        if known is not None and self.vllm_config.speculative_config is None:
            return known[:n].tolist()
        return step.seq_lens[:n].tolist()


def _shares(vllm_config: VllmConfig) -> bool:
    """Whether ranks share the tokens of sequences."""
    return vllm_config.parallel_config.decode_context_parallel_size > 1


def _windowed(vllm_config: VllmConfig, names: list[str] | None) -> bool:
    """Whether one of the layers (None: of the model) has a sliding window."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    impls = (getattr(layer, "impl", None) for layer in layers.values())
    return any(getattr(impl, "sliding_window", None) for impl in impls)
