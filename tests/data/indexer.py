"""The indexer of transformers' DeepSeek-V3.2 over queries and keys in bf16, in which caches keep keys, for make_models.py."""
import contextlib

import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling


def rotate(x, cos, sin):
    """The first elements of each row, as many as there are angles, in pairs (i, i + half)."""
    width = cos.shape[-1]
    turned = torch.cat([-x[..., width // 2:width], x[..., :width // 2]], dim=-1)
    return torch.cat([x[..., :width] * cos.unsqueeze(2) + turned * sin.unsqueeze(2), x[..., width:]], dim=-1)


def choose(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache=None):
    cos, sin = position_embeddings
    rows = hidden_states.shape[:-1]
    q = rotate(self.wq_b(q_resid).view(*rows, self.n_heads, self.head_dim), cos, sin).bfloat16().float()
    k = rotate(self.k_norm(self.wk(hidden_states)).unsqueeze(2), cos, sin).bfloat16().float()
    weights = self.weights_proj(hidden_states).float() * self.head_dim**-0.5 * self.n_heads**-0.5
    scores = torch.einsum("bshd,btd->bsht", q, k.squeeze(2)).relu()
    scores = torch.einsum("bsht,bsh->bst", scores, weights)
    scores = scores.masked_fill(~attention_mask, float("-inf")) if attention_mask.dtype == torch.bool else scores + attention_mask
    return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.to(torch.int32)


@contextlib.contextmanager
def in_bf16():
    theirs = modeling.DeepseekV32Indexer.forward
    modeling.DeepseekV32Indexer.forward = choose
    try:
        yield
    finally:
        modeling.DeepseekV32Indexer.forward = theirs
