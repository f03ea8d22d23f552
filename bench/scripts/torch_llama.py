#!/usr/bin/env python3
"""torch_llama.py write DIR [--shape 8b]: a Hugging Face folder with random weights, drawn from a seed.
torch_llama.py run DIR --result-json F --ids OUT: what transformers does with it on one GPU, or on the CPU without: greedy
tokens of some prompts and how far the two best logits are apart, the time of a long prefill, and decode steps at several
batches. OUT/prompt-N.ids and OUT/answer-N.ids get the prompts and their tokens, for a run that is fed with them.
torch_llama.py table DIR --out OUT: what llama.sh left in OUT as one table."""
import argparse
import json
import pathlib
import time

SHAPES = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256),
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256),
    "200m": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                 num_key_value_heads=8, vocab_size=32000),
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=256),
}
SHARD_BYTES = 4 << 30


def write(folder, shape):
    """Llama 3's configuration with the widths of the shape; a normal deviation of 0.02 for all but the norms."""
    import torch
    from safetensors.torch import save_file
    folder.mkdir(parents=True, exist_ok=True)
    s = SHAPES[shape]
    config = dict(s, architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
                  max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=1,
                  eos_token_id=2, attention_bias=False, mlp_bias=False, torch_dtype="bfloat16",
                  rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                    original_max_position_embeddings=8192))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    hidden, inter = s["hidden_size"], s["intermediate_size"]
    kv = hidden // s["num_attention_heads"] * s["num_key_value_heads"]
    sizes = {"model.embed_tokens.weight": (s["vocab_size"], hidden)}
    for i in range(s["num_hidden_layers"]):
        p = f"model.layers.{i}."
        sizes |= {p + "self_attn.q_proj.weight": (hidden, hidden), p + "self_attn.k_proj.weight": (kv, hidden),
                  p + "self_attn.v_proj.weight": (kv, hidden), p + "self_attn.o_proj.weight": (hidden, hidden),
                  p + "mlp.gate_proj.weight": (inter, hidden), p + "mlp.up_proj.weight": (inter, hidden),
                  p + "mlp.down_proj.weight": (hidden, inter), p + "input_layernorm.weight": (hidden,),
                  p + "post_attention_layernorm.weight": (hidden,)}
    sizes |= {"model.norm.weight": (hidden,), "lm_head.weight": (s["vocab_size"], hidden)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    shards, held, weight_map = [{}], 0, {}
    for name, size in sizes.items():
        tensor = torch.ones(size, dtype=torch.bfloat16)
        if len(size) > 1:
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator).cpu()
        if held + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for s in shards for t in s.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Peer:
    def __init__(self, folder, attention="sdpa"):
        import torch
        from transformers import AutoModelForCausalLM
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention)
        self.model = self.model.to(self.device).eval()
        self.vocabulary = self.model.config.vocab_size

    def sync(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def prompt(self, length, seed):
        return self.torch.randint(3, self.vocabulary, (1, length), generator=self.torch.Generator().manual_seed(seed)).to(self.device)

    def greedy(self, prompts, length, tokens):
        """The prompts one after the other: ids, how far the two best logits are apart, and the logits."""
        rows, logits = [], []
        for seed in range(prompts):
            ids, cache, best, gap, steps = self.prompt(length, seed), None, [], [], []
            given = ids[0].tolist()
            for _ in range(tokens):
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                steps.append(out.logits[0, -1].float())
                top = steps[-1].topk(2)
                best.append(int(top.indices[0]))
                gap.append(float(top.values[0] - top.values[1]))
                ids = top.indices[:1].view(1, 1)
            rows.append(dict(prompt_ids=given, ids=best, gaps=gap))
            logits.append(self.torch.stack(steps))
        return rows, logits

    def distance(self, rows, logits):
        """The largest distance of a logit from that of this model, which is fed with the same tokens at once."""
        most = 0.0
        for row, theirs in zip(rows, logits, strict=True):
            ids = self.torch.tensor([row["prompt_ids"] + row["ids"][:-1]], device=self.device)
            own = self.model(input_ids=ids, logits_to_keep=len(row["ids"])).logits[0].float()
            most = max(most, float((own - theirs).abs().max()))
        return most

    def prefill_s(self, length, rounds):
        ids, times = self.prompt(length, 99), []
        for _ in range(rounds + 1):
            self.sync()
            begin = time.perf_counter()
            self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
            self.sync()
            times.append(time.perf_counter() - begin)
        return sorted(times[1:])[rounds // 2]

    def decode_s(self, batch, length, steps):
        """A step of `batch` sequences of that length, median; the model's own cache, eager."""
        ids = self.prompt(length, 7).expand(batch, -1)
        out = self.model(input_ids=ids[:1], use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(batch)
        step, times = out.logits[:, -1:].argmax(-1).expand(batch, 1), []
        for _ in range(steps):
            self.sync()
            begin = time.perf_counter()
            out = self.model(input_ids=step, past_key_values=cache, use_cache=True)
            step = out.logits[:, -1:].argmax(-1)
            self.sync()
            times.append(time.perf_counter() - begin)
        return sorted(times)[steps // 2]


def run(args):
    import torch
    with torch.inference_mode():
        peer = Peer(args.folder)
        rows, logits = peer.greedy(*map(int, args.greedy.split("x")))
        result = {"greedy": rows, "prefill_tokens": args.prefill, "prefill_s": peer.prefill_s(args.prefill, 3), "decode": {}}
        for shape in args.decode.split(","):
            batch, length = map(int, shape.split("x"))
            result["decode"][shape] = peer.decode_s(batch, length, 24)
        del peer.model
        # What rounding alone does to logits: another order of the same sums.
        result["noise"] = Peer(args.folder, "eager").distance(rows, logits)
    print(json.dumps({key: value for key, value in result.items() if key != "greedy"}))
    args.result_json.write_text(json.dumps(result))
    for i, row in enumerate(rows):
        (args.ids / f"prompt-{i}.ids").write_text(",".join(map(str, row["prompt_ids"])))
        (args.ids / f"answer-{i}.ids").write_text(",".join(map(str, row["ids"])))


def agreement(peer, out):
    """Positions, those whose best token is another one, and of these the widest gap between transformers' two best."""
    positions, others, widest = 0, 0, 0.0
    for i, row in enumerate(peer["greedy"]):
        lines = (out / f"ours-prompt-{i}.txt").read_text().splitlines()
        ours = json.loads(next(line for line in lines if line.startswith("{")))["best_ids"]
        for best, gap, mine in zip(row["ids"], row["gaps"], ours, strict=True):
            positions += 1
            if mine != best:
                others += 1
                widest = max(widest, gap)
    return positions, others, widest


def table(folder, out):
    peer = json.loads((out / "peer.json").read_text())
    weights = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    config = json.loads((folder / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 2
    embedding = config["vocab_size"] * config["hidden_size"] * 2
    positions, others, widest = agreement(peer, out)
    verdict = "yes" if widest <= peer["noise"] else "NO"
    print("| work | ours | transformers | ratio |\n|---|---|---|---|")
    print(f"| best tokens of {positions} positions | {others} others, transformers' two best at most {widest:.3f} apart there"
          f" | its eager attention moves a logit by up to {peer['noise']:.3f} | {verdict} |")
    for file in sorted(out.glob("ours-*-[0-9]*.json")):
        ours, (work, ranks) = json.loads(file.read_text()), file.stem.removeprefix("ours-").rsplit("-", 1)
        if work == "prefill":
            ms = ours["duration"] / ours["completed"] * 1e3
            print(f"| prefill {peer['prefill_tokens']}, {ranks} GPU | {ms:.1f} ms | {peer['prefill_s'] * 1e3:.1f} ms | "
                  f"{peer['prefill_s'] * 1e3 / ms:.2f} |")
        elif work.endswith(("decode", "batch")):
            shape = next(s for s in peer["decode"] if s.startswith("1x" if work.endswith("decode") else "32x"))
            whole = ", all weights on each" if work.startswith("whole") else ""
            batch, length = map(int, shape.split("x"))
            ms, theirs = ours["median_itl_ms"], peer["decode"][shape] * 1e3
            rate = (weights - embedding + batch * (length + 100) * token_bytes) / ms / 1e6
            print(f"| decode {shape}, {ranks} GPU{whole} | {ms:.3f} ms, {rate:.0f} GB/s of weights and keys | {theirs:.3f} ms | "
                  f"{theirs / ms:.2f} |")
        else:
            print(f"| {work}, {ranks} GPU | {ours['duration']:.2f} s, {ours['completed']} completed |  |  |")
    if verdict == "NO":
        raise SystemExit("cp_attn and transformers differ by more than rounding does")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["write", "run", "table"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--greedy", default="4x64x256", help="prompts x their length x tokens")
    parser.add_argument("--prefill", type=int, default=32768)
    parser.add_argument("--decode", default="1x8192,32x1024", help="batch x length")
    parser.add_argument("--result-json", type=pathlib.Path)
    parser.add_argument("--ids", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "write":
        write(args.folder, args.shape)
    elif args.command == "run":
        run(args)
    else:
        table(args.folder, args.out)


if __name__ == "__main__":
    main()
