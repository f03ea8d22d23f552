"""What vLLM asks of a back end for latents, and its steps as plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata
from vllm.v1.attention.backend import CommonAttentionMetadata

from .backend import Backend, Builder, Metadata
from .latent_attention import LatentAttention

WIDEST_LATENT = 576


class LatentBackend(Backend):
    """Causal attention of decoders over pages of latents."""

    @staticmethod
    def get_name() -> str:
        return "CPATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[LatentAttention]:
        return LatentAttention

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= WIDEST_LATENT


@dataclass
class LatentMetadata(Metadata):
    """The plan of a step, as vLLM's layers of latents know it: all rows are of decode."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    query_start_loc: torch.Tensor
    decode: MLACommonDecodeMetadata


class LatentBuilder(Builder):
    """As that of keys and values."""

    def _value_shape(self) -> dict[str, Any]:
        layer: Any = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]
        return {"v_dim": layer.kv_lora_rank, "v_in_k": True}

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> LatentMetadata:
        step, plain = common_attn_metadata, super().build(common_prefix_len, common_attn_metadata, fast_build)
        decode = MLACommonDecodeMetadata(step.block_table_tensor, step.seq_lens, None)
        if self.ranks > 1:  # the layer leaves out ranks that have no token of a sequence; a graph holds the tensor
            local = step.dcp_local_seq_lens
            decode.seq_lens = self.local_lengths(step.seq_lens) if local is None else local
        return LatentMetadata(plain.plan, plain.num_actual_tokens, plain.order, step.num_reqs,
                              plain.num_actual_tokens, 0, step.query_start_loc, decode)
