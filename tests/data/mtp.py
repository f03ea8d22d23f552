"""The module of DeepSeek-V3 that predicts the token after next: weights for a tiny one, and what it drafts, in float64.

Written from the technical report (DeepSeek-AI, arXiv:2412.19437, sections 2.1 and 2.2), with what the report leaves to
the code beside the weights: the hidden state that goes into the module is the normed one that the model's head reads,
and eh_proj has the embedding's half first. Of position i, in a sequence t,

    h'(i) = eh_proj [enorm(E t(i + 1)) | hnorm(h(i))],  draft of t(i + 2) = argmax head(norm(layer(h')(i)))

Nothing here is of transformers: model and module are one function of matrices, and the model's logits are compared with
those of transformers before what the module says is believed.
"""
import math
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

QUIET = 0.3  # of the layers, beside the embedding


def with_module(state, model, seed):
    """The state, of layers that add less, with a module behind them: the last layer once more, a little different."""
    generator = torch.Generator().manual_seed(1000 + seed)
    hidden, last = model.config.hidden_size, model.config.num_hidden_layers - 1
    out = {}
    for name, values in state.items():
        adds = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        out[name] = values * QUIET if adds else values
    own, behind = f"model.layers.{last}.", f"model.layers.{last + 1}."
    for name, values in list(out.items()):
        if name.startswith(own):
            noise = torch.randn(values.shape, generator=generator)
            out[behind + name[len(own):]] = values + 0.3 * values.std() * noise
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        out[f"{behind}{norm}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    halves = torch.randn(hidden, 2 * hidden, generator=generator) * (0.5 * hidden**-0.5)
    halves[:, :hidden] = 0.3 * halves[:, :hidden] + 1.0 * torch.eye(hidden)
    out[f"{behind}eh_proj.weight"] = halves
    out[f"{behind}embed_tokens.weight"] = out["model.embed_tokens.weight"]
    out[f"{behind}shared_head.head.weight"] = out["lm_head.weight"]
    return out


class Weights:
    """The tensors of a folder in float64."""

    def __init__(self, folder):
        self.file = safe_open(Path(folder) / "model.safetensors", "pt")

    def __call__(self, name):
        return self.file.get_tensor(name).double().numpy()


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rope_frequencies(c):
    """YaRN (Peng et al., arXiv:2309.00071), and the factor of scores that DeepSeek takes from it."""
    dim, s = c["qk_rope_head_dim"], c["rope_scaling"]
    f = c["rope_theta"] ** (-np.arange(0, dim, 2) / dim)

    def turns(beta):
        return dim * math.log(s["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (
            2 * math.log(c["rope_theta"]))

    low, high = max(math.floor(turns(s["beta_fast"])), 0), min(math.ceil(turns(s["beta_slow"])), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    scale = (0.1 * s["mscale_all_dim"] * math.log(s["factor"]) + 1) ** 2
    return f * (1 - ramp) + f / s["factor"] * ramp, scale


def rotate(x, frequencies):
    """Pairs (2 i, 2 i + 1) of the last dimension; the first one is that of positions."""
    angles = np.arange(x.shape[0])[:, None] * frequencies
    cos, sin = (f(angles).reshape(x.shape[0], *[1] * (x.ndim - 2), -1) for f in (np.cos, np.sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def attention(x, c, w, at):
    heads, nope, rope, latent = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim",
                                                "kv_lora_rank"))
    n, eps = len(x), 1e-6
    frequencies, factor = rope_frequencies(c)
    q = norm(x @ w(at + "q_a_proj.weight").T, w(at + "q_a_layernorm.weight"), eps) @ w(at + "q_b_proj.weight").T
    q = q.reshape(n, heads, nope + rope)
    cached = x @ w(at + "kv_a_proj_with_mqa.weight").T
    kv = norm(cached[:, :latent], w(at + "kv_a_layernorm.weight"), eps) @ w(at + "kv_b_proj.weight").T
    kv = kv.reshape(n, heads, -1)
    scores = np.einsum("ihd,jhd->hij", q[..., :nope], kv[..., :nope])
    scores += np.einsum("ihd,jd->hij", rotate(q[..., nope:], frequencies), rotate(cached[:, latent:], frequencies))
    scores = scores * factor / math.sqrt(nope + rope)
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", p, kv[..., nope:]).reshape(n, -1) @ w(at + "o_proj.weight").T


def gated(x, w, at):
    return (silu(x @ w(at + "gate_proj.weight").T) * (x @ w(at + "up_proj.weight").T)) @ w(at + "down_proj.weight").T


def mixture(x, c, w, at):
    groups, experts = c["n_group"], c["n_routed_experts"]
    scores = 1 / (1 + np.exp(-(x @ w(at + "gate.weight").T)))
    choice = scores + w(at + "gate.e_score_correction_bias")
    by_group = np.sort(choice.reshape(len(x), groups, -1), -1)[..., -2:].sum(-1)
    out = gated(x, w, at + "shared_experts.")
    for i, row in enumerate(x):
        kept = np.argsort(-by_group[i])[: c["topk_group"]]
        allowed = np.isin(np.arange(experts) // (experts // groups), kept)
        chosen = np.argsort(-np.where(allowed, choice[i], -np.inf))[: c["num_experts_per_tok"]]
        weights = scores[i, chosen] / (scores[i, chosen].sum() + 1e-20) * c["routed_scaling_factor"]
        for e, weight in zip(chosen, weights):
            out[i] += weight * gated(row, w, f"{at}experts.{e}.")
    return out


def decoder_layer(x, c, w, layer):
    at, eps = f"model.layers.{layer}.", c["rms_norm_eps"]
    x = x + attention(norm(x, w(at + "input_layernorm.weight"), eps), c, w, at + "self_attn.")
    y = norm(x, w(at + "post_attention_layernorm.weight"), eps)
    is_dense = layer < c["first_k_dense_replace"]
    return x + (gated(y, w, at + "mlp.") if is_dense else mixture(y, c, w, at + "mlp."))


def drafts(folder, c, prompts, answers):
    """Of each id of the answers the one that the module expects behind it; the least distance between its two best logits;
    and whether some are right and some are wrong."""
    w, eps, layers = Weights(folder), c["rms_norm_eps"], c["num_hidden_layers"]
    embedding, head, at = w("model.embed_tokens.weight"), w("lm_head.weight"), f"model.layers.{layers}."
    out, gap, right, total = [], math.inf, 0, 0
    for prompt, (ids, logits, _) in zip(prompts, answers):
        known = prompt + ids
        x = embedding[known[:-1]]
        for layer in range(layers):
            x = decoder_layer(x, c, w, layer)
        h = norm(x, w("model.norm.weight"), eps)
        rows = slice(len(prompt) - 1, None)
        assert np.abs(h[rows] @ head.T - logits.numpy()).max() < 1e-3, "the model is not that of transformers"
        next_tokens = norm(embedding[known[1:]], w(at + "enorm.weight"), eps)
        joined = np.concatenate([next_tokens, norm(h, w(at + "hnorm.weight"), eps)], -1) @ w(at + "eh_proj.weight").T
        y = norm(decoder_layer(joined, c, w, layers), w(at + "shared_head.norm.weight"), eps)
        said = (y @ head.T)[rows]
        best = np.sort(said, -1)
        gap = min(gap, float((best[:, -1] - best[:, -2]).min()))
        out.append([int(i) for i in said.argmax(-1)])
        right += sum(a == b for a, b in zip(out[-1], ids[1:]))
        total += len(ids) - 1
    return out, gap, 0.25 < right / total < 0.75
