#!/usr/bin/env python3
"""Writes the retrieval model beside this file: config.json, generation_config.json, model.safetensors.

    python3 -m venv VENV && VENV/bin/pip install torch safetensors
    VENV/bin/python tests/data/retrieval/make.py [FOLDER]

The weights are constructed, not trained: two Llama layers of one head are an induction head (Elhage et al. 2021, Olsson
et al. 2022), by subspaces of the residual stream. Random are the directions of tokens alone.

    layer 0   each token attends the one before it, by rotary positions, and copies what that is into "before"
    layer 1   a question attends what has its key before it, and copies the value; all others attend the first token

Keys are families of 8 whose cosines are about 0.94, as of words that mean nearly the same: whatever rounds keys,
queries or probabilities too much answers with the value of another key of the family. Tokens are listed in prompts.py.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
import prompts as p

CONTENT = 48  # elements of a direction
HIDDEN, HEAD_DIM, INTERMEDIATE = 208, 128, 16
KEY, VALUE, QUESTION, BEFORE = (slice(i * CONTENT, (i + 1) * CONTENT) for i in range(4))
ONE, ASKS_NOTHING, FIRST, PAD = range(4 * CONTENT, 4 * CONTENT + 4)
THETA = 1e9
NEAR = 0.25  # how far keys lie from the middle of their family, which has length 1
FAINT = 0.2  # length of the directions, as keys, of what nothing asks for
MATCH, SINK, KEPT = 90.0, 90.0, 20.0  # scores of a match and of the first token; logit of an answer

# score(d) = sum w cos(f (d - 1)) over the fastest frequencies f: highest at a distance of 1; up to 16K the next is 9.8
# below.
PREVIOUS = [16, 8, 8, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2]
# Elements of a head that turn by less than 0.1 in 16K tokens: of pairs (i, i + 64) the slowest 24.
SLOW = list(range(64 - CONTENT // 2, 64)) + list(range(128 - CONTENT // 2, 128))


def directions(count):
    """Rows of length 1."""
    return torch.nn.functional.normalize(torch.randn(count, CONTENT, dtype=torch.float64), dim=1)


def families():
    """Middles, and keys around them."""
    middles = directions(p.FAMILIES)
    apart = directions(p.FAMILIES * p.FAMILY).view(p.FAMILIES, p.FAMILY, CONTENT)
    keys = torch.nn.functional.normalize(middles[:, None] + NEAR * apart, dim=2)
    return middles, keys.reshape(-1, CONTENT)


def embeddings():
    """One row a token; all have the length 2, so that RMSNorm does the same to each."""
    e = torch.zeros(p.VOCABULARY, HIDDEN, dtype=torch.float64)
    middles, keys = families()
    e[:, ONE] = 1
    e[:, ASKS_NOTHING] = 1
    e[p.QUESTIONS, ASKS_NOTHING] = 0
    e[p.FIRST, FIRST] = 1
    e[p.KEYS, KEY] = keys
    e[p.QUESTIONS, QUESTION] = keys
    e[p.OPPOSITES, KEY] = -middles
    e[p.VALUES, KEY] = FAINT * directions(p.N_VALUES)
    e[p.VALUES, VALUE] = directions(p.N_VALUES)
    e[p.FILLERS, KEY] = FAINT * directions(p.N_FILLERS)
    e[:, PAD] = (4 - (e * e).sum(dim=1)).clamp(min=0).sqrt()
    return e


def zeros(prefix):
    shapes = {"self_attn.q_proj": (HEAD_DIM, HIDDEN), "self_attn.k_proj": (HEAD_DIM, HIDDEN),
              "self_attn.v_proj": (HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEAD_DIM),
              "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
              "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    layer = {f"{prefix}.{name}.weight": torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layer[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
    return layer


def copy(layer, prefix, source, target, norm):
    """Values are elements `source` of a row of length `norm`; what is attended is added to elements `target`."""
    unit = norm / HIDDEN ** 0.5
    layer[f"{prefix}.self_attn.v_proj.weight"][:CONTENT, source] = torch.eye(CONTENT, dtype=torch.float64) * unit
    layer[f"{prefix}.self_attn.o_proj.weight"][target, :CONTENT] = torch.eye(CONTENT, dtype=torch.float64)


def previous_token(prefix):
    layer, unit = zeros(prefix), 2 / HIDDEN ** 0.5
    q, k = (layer[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qk")
    for i, weight in enumerate(PREVIOUS):
        size = unit * (weight * HEAD_DIM ** 0.5) ** 0.5
        turn = torch.tensor(THETA ** (-2 * i / HEAD_DIM), dtype=torch.float64)
        q[i, ONE] = size
        k[i, ONE], k[i + HEAD_DIM // 2, ONE] = size * turn.cos(), size * turn.sin()
    copy(layer, prefix, KEY, BEFORE, 2)
    return layer


def same_key(prefix):
    layer = zeros(prefix)
    q, k = (layer[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qk")
    asked, found = (norm / HIDDEN ** 0.5 * (MATCH * HEAD_DIM ** 0.5) ** 0.5 for norm in (2, 5 ** 0.5))
    for i, element in enumerate(SLOW):
        q[element, QUESTION.start + i] = asked
        k[element, BEFORE.start + i] = found
    # The first token is marked in an element between those that turn and those that mean something.
    size = 5 ** 0.5 / HIDDEN ** 0.5 * (SINK * HEAD_DIM ** 0.5) ** 0.5
    q[SLOW[0] - 1, ASKS_NOTHING], k[SLOW[0] - 1, FIRST] = size, size
    copy(layer, prefix, VALUE, VALUE, 5 ** 0.5)
    return layer


def head(e):
    """Logits: values by their direction; all else below them."""
    out = torch.zeros_like(e)
    out[:, ONE] = -KEPT
    out[p.VALUES, ONE] = 0
    out[p.VALUES, VALUE] = KEPT * e[p.VALUES, VALUE]
    return out * 5 ** 0.5 / HIDDEN ** 0.5


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    torch.manual_seed(0)
    e = embeddings()
    tensors = {"model.embed_tokens.weight": e, "lm_head.weight": head(e),
               "model.norm.weight": torch.ones(HIDDEN, dtype=torch.float64),
               **previous_token("model.layers.0"), **same_key("model.layers.1")}
    save_file({name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
              "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2, "num_attention_heads": 1,
              "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": p.VOCABULARY,
              "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_cache": True,
              "bos_token_id": p.FIRST, "rope_theta": THETA, "rope_scaling": None, "tie_word_embeddings": False,
              "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": p.FIRST}) + "\n")


main()
