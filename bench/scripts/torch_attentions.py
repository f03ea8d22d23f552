#!/usr/bin/env python3
"""Attention "cpattn" inside transformers beside transformers' own, over one model of random weights: time of a long
prefill and of decode steps, and whether greedy tokens agree wherever the two best logits are apart.
    torch_attentions.py --shape 8b --prefill 32768 --result-json F
The package cpattn has to be importable. Prints a table; exits 1 where tokens differ by more than rounding does."""
import argparse
import json
import pathlib
import time

import torch
import torch_llama
import transformers

import cpattn.transformers

PEERS = ["sdpa", "eager"]
EAGER_TOKENS = 8192  # eager attention stores all scores: no longer prefill with it


def make_model(shape):
    sizes = torch_llama.SHAPES[shape]
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=131072, rms_norm_eps=1e-5,
                                      tie_word_embeddings=False, rope_parameters={"rope_type": "default",
                                                                                  "rope_theta": 500000.0})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).eval()


class Attention:
    """The model with one attention, and a cache of its kind."""

    def __init__(self, model, name, longest):
        self.model, self.name, self.blocks = model, name, -(-longest // 64) + 1
        model.set_attn_implementation(name)
        self.device = model.device

    def cache(self):
        if self.name == "cpattn":
            return cpattn.transformers.PagedCache(self.model.config, num_blocks=self.blocks, block_size=64)
        return transformers.DynamicCache(config=self.model.config)

    def forward(self, ids, cache):
        return self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()

    def timed(self, function):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def prompt(self, length, seed):
        ids = torch.randint(3, self.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
        return ids.to(self.device)

    def prefill_s(self, length, rounds):
        ids = self.prompt(length, 99)
        times = [self.timed(lambda: self.forward(ids, self.cache())) for _ in range(rounds + 1)]
        return sorted(times[1:])[rounds // 2]

    def decode_s(self, length, steps):
        cache, step = self.cache(), self.prompt(1, 5)
        self.forward(self.prompt(length, 7), cache)
        times = [self.timed(lambda: self.forward(step, cache)) for _ in range(steps)]
        return sorted(times)[steps // 2]

    def logits(self, prompt, given, tokens):
        """The logits of each step: after the tokens that are given, or after its own best."""
        cache, ids, steps = self.cache(), prompt, []
        for i in range(tokens):
            steps.append(self.forward(ids, cache))
            ids = (given[i] if given is not None else steps[-1].argmax()).view(1, 1)
        return torch.stack(steps)


def agreement(model, shape, longest):
    """cpattn fed with the tokens that eager attention chooses: positions, those whose best token is another, the widest
    gap between eager's two best among them, and by how much sdpa moves a logit, which is what rounding does."""
    prompts, length, tokens = map(int, shape.split("x"))
    positions, others, widest, noise = 0, 0, 0.0, 0.0
    for seed in range(prompts):
        prompt = Attention(model, "eager", longest).prompt(length, seed)
        eager = Attention(model, "eager", longest).logits(prompt, None, tokens)
        best = eager.argmax(-1)
        ours = Attention(model, "cpattn", longest).logits(prompt, best, tokens)
        noise = max(noise, float((Attention(model, "sdpa", longest).logits(prompt, best, tokens) - eager).abs().max()))
        two = eager.topk(2).values
        differ = ours.argmax(-1) != best
        positions += tokens
        others += int(differ.sum())
        if differ.any():
            widest = max(widest, float((two[:, 0] - two[:, 1])[differ].max()))
    return dict(positions=positions, others=others, widest_gap=widest, noise=noise)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=torch_llama.SHAPES, default="8b")
    parser.add_argument("--prefill", type=int, default=32768)
    parser.add_argument("--decode", type=int, default=8192, help="tokens before the steps that are timed")
    parser.add_argument("--greedy", default="4x64x64", help="prompts x their length x tokens")
    parser.add_argument("--result-json", type=pathlib.Path)
    args = parser.parse_args()
    cpattn.transformers.register()
    longest = max(args.prefill, args.decode + 64)
    result = {"shape": args.shape, "prefill_tokens": args.prefill, "attentions": {}}
    with torch.inference_mode():
        model = make_model(args.shape)
        for name in ["cpattn", *PEERS]:
            attention = Attention(model, name, longest)
            fits = name != "eager" or args.prefill <= EAGER_TOKENS
            result["attentions"][name] = {"prefill_s": attention.prefill_s(args.prefill, 3) if fits else None,
                                          "decode_s": attention.decode_s(min(args.decode, EAGER_TOKENS), 24)}
        result["greedy"] = greedy = agreement(model, args.greedy, longest)
    print(f"| attention | prefill {args.prefill} | decode 1 x {min(args.decode, EAGER_TOKENS)} |\n|---|---|---|")
    for name, times in result["attentions"].items():
        prefill = f"{times['prefill_s'] * 1e3:.1f} ms" if times["prefill_s"] else "not run"
        print(f"| {name} | {prefill} | {times['decode_s'] * 1e3:.2f} ms |")
    print(f"best tokens of {greedy['positions']} positions: {greedy['others']} others, eager's two best at most "
          f"{greedy['widest_gap']:.3f} apart there; sdpa moves a logit by up to {greedy['noise']:.3f}")
    if args.result_json:
        args.result_json.write_text(json.dumps(result))
    raise SystemExit(greedy["widest_gap"] > greedy["noise"])


if __name__ == "__main__":
    main()
