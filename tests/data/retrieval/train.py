#!/usr/bin/env python3
"""Trains the retrieval model beside this file: config.json, generation_config.json, model.safetensors.

    python3 -m venv VENV && VENV/bin/pip install torch safetensors
    VENV/bin/python tests/data/retrieval/train.py [--device cuda] [--seed N] [FOLDER]

That takes 10 minutes of one core of a CPU, or 30 s on an H200, which has made the weights here (seed 0). At the end
both sets of prompts are asked at 4,096 and 16,384 tokens; the exit code is 1 unless all answers are right. Of seeds 0
to 2, 1 was wrong twice in 32.

Two Llama layers of one head learn to answer questions (prompts.py) in sequences of 16 to 512 tokens that end with 32
of them, each of which is a target: what forms is an induction head (Elhage et al. 2021, Olsson et al. 2022). It comes
sooner with a second loss, on what layer 0 knows of the token before (weight BEFORE), as the next layer needs that.
Half of the sequences have positions far apart, pairs excepted, so that all distances up to 30,000 are seen (Ruoss et
al. 2023); and as the scores of one key must stand out among more, the longer a context is, by the logarithm of its
length, queries are made SHARPER times as long at the end (Nakanishi 2025).

The embeddings of tokens are drawn, and stay: what is like what is part of the language. Keys are families of 8 whose
cosines are about 0.94, as of words that mean nearly the same; an opposite is its key, negated.
"""
import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
import prompts as p  # noqa: E402

CONTENT = 48  # elements of a direction
HIDDEN, HEAD_DIM, INTERMEDIATE, LAYERS = 208, 128, 16, 2
KEY, VALUE, QUESTION = (slice(i * CONTENT, (i + 1) * CONTENT) for i in range(3))
ONE, FIRST = 3 * CONTENT, 3 * CONTENT + 1
THETA, EPSILON = 1e9, 1e-6
NEAR = 0.25  # how far keys lie from the middle of their family, which has length 1
FAINT = 0.2  # length of the directions of filler

STEPS, RATE, TOKENS = 2500, 1e-3, 4096
LENGTHS = [16, 32, 64, 128, 256, 512]  # the longer ones come later, and the longest two alone in the last quarter
N_ASKED, MOST_PAIRS = 32, 32
BEFORE = 0.5
FAR = 30000
SHARPER = 3.0


def directions(count):
    """Rows of length 1."""
    return F.normalize(torch.randn(count, CONTENT), dim=1)


def embeddings():
    """One row a token."""
    e = torch.zeros(p.VOCABULARY, HIDDEN)
    apart = directions(len(p.KEYS)).view(p.FAMILIES, p.FAMILY, CONTENT)
    keys = F.normalize(directions(p.FAMILIES)[:, None] + NEAR * apart, dim=2).reshape(-1, CONTENT)
    e[:, ONE] = 1
    e[p.FIRST, FIRST] = 1
    e[p.KEYS, KEY], e[p.QUESTIONS, QUESTION], e[p.OPPOSITES, KEY] = keys, keys, -keys
    e[p.VALUES, VALUE] = directions(p.N_VALUES)
    e[p.FILLERS, KEY] = FAINT * directions(p.N_FILLERS)
    return e


def shapes():
    """Those of the weights, by their names in a file: [out, in], or [elements] of a norm."""
    out = {"lm_head.weight": (p.VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        out |= {f"{prefix}self_attn.{name}_proj.weight": (HEAD_DIM, HIDDEN) for name in "qkv"}
        out |= {f"{prefix}mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        out |= {f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEAD_DIM),
                f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE)}
        out |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return out


def begin(shape):
    return torch.ones(shape) if len(shape) == 1 else (2 * torch.rand(shape) - 1) / math.sqrt(shape[1])


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def turns(positions):
    """Cosines and sines of rotary positions, each [batch, tokens, HEAD_DIM / 2]."""
    half = HEAD_DIM // 2
    rates = THETA ** (-torch.arange(half, dtype=torch.float64, device=positions.device) / half)
    angles = positions[..., None] * rates
    return angles.cos().float(), angles.sin().float()


def turn(x, cos, sin):
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def forward(w, ids, positions):
    """The residual stream behind each layer."""
    x, cos_sin, out = w["model.embed_tokens.weight"][ids], turns(positions), []
    for layer in range(LAYERS):
        def times(rows, name, prefix=f"model.layers.{layer}."):
            return rows @ w[f"{prefix}{name}.weight"].T
        h = norm(x, w[f"model.layers.{layer}.input_layernorm.weight"])
        q, k, v = (times(h, f"self_attn.{name}_proj") for name in "qkv")
        mixed = F.scaled_dot_product_attention(turn(q, *cos_sin)[:, None], turn(k, *cos_sin)[:, None], v[:, None],
                                               is_causal=True)[:, 0]
        x = x + times(mixed, "self_attn.o_proj")
        h = norm(x, w[f"model.layers.{layer}.post_attention_layernorm.weight"])
        x = x + times(F.silu(times(h, "mlp.gate_proj")) * times(h, "mlp.up_proj"), "mlp.down_proj")
        out.append(x)
    return out


def logits(w, x):
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def sequences(count, length, device):
    """Tokens [count, length + N_ASKED], their positions, and the answers to the last N_ASKED of them."""
    def choose(most, shape):
        return torch.randint(most, shape, device=device)

    def share(*shape):
        return torch.rand(shape, device=device)

    pairs = min(MOST_PAIRS, length // 4)
    others = length - 1 - 2 * pairs
    # Keys of one family first, mostly.
    family = torch.arange(len(p.KEYS), device=device) // p.FAMILY == choose(p.FAMILIES, (count, 1))
    keys = (share(count, len(p.KEYS)) + (family & (share(count, 1) < 0.7))).topk(pairs, 1).indices
    values = share(count, p.N_VALUES).topk(pairs, 1).indices
    # Pairs, the first of the units, and single tokens, in any order.
    order = share(count, pairs + others).argsort(1)
    sizes = 1 + (order < pairs).long()
    starts = sizes.cumsum(1) - sizes + 1
    at = torch.zeros_like(order).scatter(1, order, starts)
    opposites = keys.gather(1, choose(pairs, (count, others))) + p.OPPOSITES.start
    fillers = choose(p.N_FILLERS, (count, others)) + p.FILLERS.start
    asked = choose(pairs, (count, N_ASKED))
    asked[:, 1:] = torch.where(share(count, N_ASKED - 1) < 0.3, asked[:, :-1], asked[:, 1:])
    ids = torch.full((count, length + N_ASKED), p.FIRST, device=device)
    ids.scatter_(1, at[:, pairs:], torch.where(share(count, others) < 0.7 * share(count, 1) ** 3, opposites, fillers))
    ids.scatter_(1, at[:, :pairs], keys + p.KEYS.start)
    ids.scatter_(1, at[:, :pairs] + 1, values + p.VALUES.start)
    ids[:, length:] = keys.gather(1, asked) + p.QUESTIONS.start
    # Gaps between units, of half of the sequences.
    far = (share(count, 1) < 0.5) * share(count, 1)
    gaps = torch.ones((count, length + N_ASKED), device=device)
    gaps.scatter_(1, starts, 1 + (5 * FAR / length * far * share(count, pairs + others) ** 4).floor())
    gaps[:, length] += (1000 * far[:, 0]).floor()
    return ids, gaps.cumsum(1) - 1, values.gather(1, asked) + p.VALUES.start


def length_of(step):
    done = step / STEPS
    if done >= 0.75:
        return random.choice(LENGTHS[-2:])
    known = 1 + int(done / 0.75 * len(LENGTHS))
    return LENGTHS[max(random.randrange(known), random.randrange(known))]


def train(w, before, device):
    """Trains all but the embeddings."""
    trained = [weight.requires_grad_() for name, weight in w.items() if "embed" not in name] + [before]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0)
    start = time.time()
    for step in range(STEPS):
        rate = RATE * min(1, (step + 1) / 100, max(0.02, 4 * (1 - step / STEPS)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = length_of(step)
        ids, positions, answers = sequences(max(4, TOKENS // (length + N_ASKED)), length, device)
        early, late = forward(w, ids, positions)
        told = logits(w, late[:, length:])
        known = norm(early[:, 1:], w["model.norm.weight"]) @ before.T
        loss = F.cross_entropy(told.flatten(0, 1), answers.flatten())
        loss = loss + BEFORE * F.cross_entropy(known.flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 100 == 99:
            right = (told.argmax(-1) == answers).float().mean().item()
            print(f"step {step + 1}: {time.time() - start:.0f} s, {length} tokens: {right:.1%} right", flush=True)


def finish(w):
    """The weights as they are stored: sharper, in bf16."""
    out = {}
    for name, weight in w.items():
        factor = SHARPER if "q_proj" in name else 1
        out[name] = (weight.detach() * factor).to(torch.bfloat16)
    return out


def check(w, device):
    """Rates of right answers of both sets, at the lengths of the accuracy table."""
    wide, rates = {name: weight.float() for name, weight in w.items()}, []
    for length in (4096, 16384):
        for cancelled in (False, True):
            right = 0
            for seed in range(8):
                ids, answer = p.prompt(seed, length, cancelled=cancelled)
                ids = torch.tensor([ids], device=device)
                with torch.no_grad():
                    last = forward(wide, ids, torch.arange(length, device=device)[None])[-1][:, -1]
                right += logits(wide, last).argmax().item() == answer
            print(f"{length} tokens{', cancelled' if cancelled else ''}: {right} of 8 right")
            rates.append(right / 8)
    return rates


def save(w, folder):
    save_file({name: weight.cpu().contiguous() for name, weight in w.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
              "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 1,
              "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": p.VOCABULARY,
              "max_position_embeddings": 32768, "rms_norm_eps": EPSILON, "hidden_act": "silu", "use_cache": True,
              "bos_token_id": p.FIRST, "rope_theta": THETA, "rope_scaling": None, "tie_word_embeddings": False,
              "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": p.FIRST}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    w = {"model.embed_tokens.weight": embeddings()} | {name: begin(shape) for name, shape in shapes().items()}
    w = {name: weight.to(args.device) for name, weight in w.items()}
    before = begin((p.VOCABULARY, HIDDEN)).to(args.device).requires_grad_()
    train(w, before, args.device)
    w = finish(w)
    rates = check(w, args.device)
    save(w, args.folder)
    return 0 if min(rates) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
