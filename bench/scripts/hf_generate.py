#!/usr/bin/env python3
"""cp_attn generate beside Hugging Face transformers on the same machine.

    hf_generate.py write FOLDER [--layers N]      a model of Llama-3-8B's shape with random weights, bf16
    hf_generate.py tokens FOLDER --cp-attn "mpirun -np 4 ./cp_attn"
    hf_generate.py speed FOLDER --cp-attn "./cp_attn"

`tokens`: transformers answers some prompts greedily; cp_attn is fed with its tokens (--given-ids) and has to call the same
token the most probable one wherever the two best logits are further apart than noise: the largest distance between the
logits of transformers' own eager and best attention. Exit code 1 if it does not.
`speed`: the time to the first token of a long prompt, and tokens a second at batch 1 and at batch --batch, of both.
Needs torch and transformers; --device cpu --dtype float32 tries it without a GPU.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time

import torch

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}
LAYERS = 32
STD = 0.02  # of the weights, as transformers initialises them


def layer_shapes(config):
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], 128
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}


def write(args):
    from safetensors.torch import save_file

    os.makedirs(args.folder, exist_ok=True)
    config = {**LLAMA_3_8B, "num_hidden_layers": args.layers}
    with open(os.path.join(args.folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(shape):
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (STD * values).to(torch.bfloat16).cpu()

    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    shards = [{"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,),
               "lm_head.weight": (vocabulary, hidden)}]
    for first in range(0, args.layers, 8):
        shards.append({f"model.layers.{layer}.{name}.weight": shape
                       for layer in range(first, min(first + 8, args.layers))
                       for name, shape in layer_shapes(config).items()})
    weight_map = {}
    for i, shapes in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: random(shape) for name, shape in shapes.items()}, os.path.join(args.folder, file))
        weight_map.update({name: file for name in shapes})
    with open(os.path.join(args.folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)


def load(args, attention):
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype), attn_implementation=attention)
    return model.to(args.device).eval()


def prompts(args, count, length, vocabulary):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (count, length), generator=generator).to(args.device)


def synchronise(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def decode(args, model, ids, steps):
    """Greedy tokens [batch, steps], their logits of the first sequence, seconds to the first token and of the others."""
    synchronise(args)
    start = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    tokens, rows = [], []
    for step in range(steps):
        rows.append(out.logits[0, -1])
        tokens.append(out.logits[:, -1].argmax(-1))
        if step == 0:
            tokens[0].cpu()
            first = time.perf_counter() - start
        if step + 1 < steps:
            out = model(tokens[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
    synchronise(args)
    return torch.stack(tokens, 1), torch.stack(rows).float(), first, time.perf_counter() - start - first


def generate(args, prompt, *options):
    """What `cp_attn generate --json` says."""
    with tempfile.NamedTemporaryFile("w", suffix=".ids") as file:
        file.write(",".join(map(str, prompt)))
        file.flush()
        command = [*shlex.split(args.cp_attn), "generate", "--model-dir", args.folder, "--prompt-ids", "@" + file.name,
                   "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def cp_dtype(args):
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[args.dtype]


def tokens(args):
    model = load(args, args.attention)
    ids = prompts(args, args.prompts, args.prompt_len, model.config.vocab_size)
    answers = [decode(args, model, ids[i : i + 1], args.tokens)[:2] for i in range(args.prompts)]
    del model
    eager = load(args, "eager")
    noise = 0.0
    for i, (answer, logits) in enumerate(answers):
        with torch.no_grad():
            whole = torch.cat([ids[i : i + 1], answer[:, :-1]], 1)
            other = eager(whole, logits_to_keep=args.tokens).logits[0].float()
        noise = max(noise, float((other - logits).abs().max()))
    del eager
    if args.device == "cuda":
        torch.cuda.empty_cache()
    near = same = wrong = 0
    for i, (answer, logits) in enumerate(answers):
        best = logits.topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        theirs = answer[0].tolist()
        ours = generate(args, ids[i].tolist(), "--given-ids", ",".join(map(str, theirs)) if len(theirs) < 100 else
                        given_file(theirs), "--dtype", cp_dtype(args))["best_ids"]
        for gap, a, b in zip(gaps, theirs, ours):
            same += a == b
            near += a != b and gap <= noise
            wrong += a != b and gap > noise
    print(f"{same} of {args.prompts * args.tokens} most probable tokens are the same, {near} differ where the two best "
          f"logits are nearer than noise ({noise:.4f}), {wrong} elsewhere")
    return 1 if wrong else 0


def given_file(ids):
    """--given-ids @FILE, for more than an option holds."""
    path = os.path.join(tempfile.gettempdir(), f"given-{os.getpid()}.ids")
    with open(path, "w") as file:
        file.write(",".join(map(str, ids)))
    return "@" + path


def ours_at_batch(args):
    """Tokens a second of decoding at that batch."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        command = [*shlex.split(args.cp_attn), "--model-dir", args.folder, "--requests", str(args.batch), "--input-len",
                   str(args.prompt_len), "--output-len", str(args.tokens), "--verify", "0", "--result-json", path,
                   "--dtype", cp_dtype(args)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        with open(path) as file:
            return 1e3 * args.batch / json.load(file)["median_itl_ms"]


def speed(args):
    model = load(args, args.attention)
    rows = []
    for batch, length, steps in ((1, args.long, 2), (1, args.prompt_len, args.tokens), (args.batch, args.prompt_len,
                                                                                      args.tokens)):
        ids = prompts(args, batch, length, model.config.vocab_size)
        for _ in range(2):  # the first warms up
            _, _, first, rest = decode(args, model, ids, steps)
        rows.append((ids[0].tolist(), first, batch * (steps - 1) / rest))
    del model
    if args.device == "cuda":
        torch.cuda.empty_cache()
    plain = ["--dtype", cp_dtype(args), "--verify", "0"]
    long = generate(args, rows[0][0], "--max-tokens", "2", *plain)
    one = generate(args, rows[1][0], "--max-tokens", str(args.tokens), "--ignore-eos", *plain)
    ours = (long["ttft_s"], one["tokens_per_s"], ours_at_batch(args))
    theirs = (rows[0][1], rows[1][2], rows[2][2])
    names = (f"first token of {args.long}, s", f"decode, batch 1 after {args.prompt_len}, tokens/s",
             f"decode, batch {args.batch} after {args.prompt_len}, tokens/s")
    print(f"| {'':48} | cp_attn | transformers ({args.attention}) |\n|---|---|---|")
    for name, a, b in zip(names, ours, theirs):
        print(f"| {name:48} | {a:.4g} | {b:.4g} |")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "tokens", "speed"])
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--cp-attn", default="./cp_attn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--attention", default="sdpa", help="of transformers: sdpa, flash_attention_2, ...")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    sys.exit({"write": write, "tokens": tokens, "speed": speed}[args.what](args))


if __name__ == "__main__":
    main()
