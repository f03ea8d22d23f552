#!/usr/bin/env python3
"""host_llama.py DIR [--cp-attn FILE...] [--llama-bench FILE]: CPU time of a Llama in bf16 on the host, one request, in
rounds in turn: cp_attn, llama.cpp if its llama-bench is given, and transformers if it can be imported. DIR gets a model of
random weights (torch_llama.py) if it has none, and the same weights for llama.cpp. Of user and system time, which other
work on the machine disturbs less than it does the clock, the least of the rounds counts."""
import argparse
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import torch_llama

FEW = 8  # tokens of the runs whose time is subtracted: what loading takes


def cpu_s(command):
    """User and system time of a command, whose output is shown if it fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {child.returncode}\n{output.decode(errors='replace')}")
    return usage.ru_utime + usage.ru_stime


class Program:
    """What runs once for each pair of prompt and tokens: a phase is what a long run takes more than a short one."""
    def __init__(self, name, command, args):
        self.name, self.command, self.args = name, command, args
        self.few, self.prefill, self.decode = [], [], []

    def round(self):
        self.few.append(cpu_s(self.command(FEW, 1)))
        self.prefill.append(cpu_s(self.command(self.args.prompt, 1)))
        self.decode.append(cpu_s(self.command(self.args.prompt, 1 + self.args.tokens)))

    def phases(self):
        return min(self.prefill) - min(self.few), min(self.decode) - min(self.prefill)


class CpAttn(Program):
    def __init__(self, program, args):
        ids = random.Random(1).choices(range(3, torch_llama.SHAPES[args.shape]["vocab_size"]), k=args.prompt)
        super().__init__(program, lambda prompt, tokens: [
            program, "generate", "--device", "host", "--model-dir", str(args.folder), "--dtype", "bf16", "--threads",
            str(args.threads), "--prompt-ids", ",".join(map(str, ids[:prompt])), "--max-tokens", str(tokens),
            "--ignore-eos", "--verify", "0"], args)


class LlamaCpp(Program):
    def __init__(self, program, args):
        file = args.folder / "model.gguf"
        if not file.exists():
            write_gguf(args.folder, file)
        super().__init__(f"llama.cpp, {program}", lambda prompt, tokens: [
            program, "-m", str(file), "-p", "0", "-n", str(tokens), "-d", str(prompt), "-t", str(args.threads), "-r", "1",
            "--no-warmup", *args.llama_options.split()], args)


class Transformers:
    """In a process of its own, which tells the time of the phases: importing takes longer than they do."""
    name = "transformers"

    def __init__(self, args):
        self.args, self.times = args, []

    def round(self):
        a = self.args
        command = [sys.executable, __file__, str(a.folder), "--threads", str(a.threads), "--prompt", str(a.prompt),
                   "--tokens", str(a.tokens), "--transformers-only"]
        self.times.append([float(x) for x in subprocess.check_output(command, stderr=subprocess.DEVNULL).split()])

    def phases(self):
        return [min(x) for x in zip(*self.times, strict=True)]


def time_transformers(args):
    """Prints the CPU seconds of a prefill, less those of a short one, and of decode."""
    import torch
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        peer = torch_llama.Peer(args.folder)

        def generate(length, tokens):
            ids, cache, marks = peer.prompt(length, 1), None, [time.process_time()]
            for _ in range(tokens):
                out = peer.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                marks.append(time.process_time())
            return marks[1] - marks[0], marks[-1] - marks[1]

        generate(args.prompt, 4)  # warms what is made once
        few, _ = generate(FEW, 1)
        prefill, decode = generate(args.prompt, 1 + args.tokens)
    print(prefill - few, decode)


def write_gguf(folder, file):
    """The folder's weights for llama.cpp, without a tokenizer and the scale of long rotations. In its heads the pairs of a
    rotation lie side by side."""
    import gguf
    import numpy as np
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for shard in sorted(folder.glob("*.safetensors")):
        data = np.memmap(shard, np.uint8, "r")
        begin = 8 + int.from_bytes(data[:8], "little")
        tensors = json.loads(bytes(data[8:begin]))
        tensors.pop("__metadata__", None)
        for name, tensor in tensors.items():
            first, end = tensor["data_offsets"]
            words = data[begin + first:begin + end].view(np.uint16).reshape(tensor["shape"])
            if "q_proj" in name or "k_proj" in name:
                halves = words.reshape(heads if "q_proj" in name else kv_heads, 2, -1, words.shape[1])
                words = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(words.shape)
            to = names.get_name(name, try_suffixes=(".weight",))
            if words.ndim == 1:
                writer.add_tensor(to, (words.astype(np.uint32) << 16).view(np.float32))
            else:
                writer.add_tensor(to, words.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def table(rows, args):
    print(f"{args.shape}, bf16, one request: prompt of {args.prompt} tokens, {args.tokens} more, {args.threads} threads; "
          f"least of {args.rounds} rounds\n")
    print("| | CPU time a token, ms | prefill, tokens a CPU second |\n|---|---|---|")
    for row in rows:
        prefill, decode = row.phases()
        print(f"| {row.name} | {decode / args.tokens * 1e3:.1f} | {(args.prompt - FEW) / prefill:.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--shape", choices=torch_llama.SHAPES, default="200m")
    parser.add_argument("--cp-attn", nargs="+", default=["./cp_attn"], help="programs, as one before a change and one after it")
    parser.add_argument("--llama-bench")
    parser.add_argument("--llama-options", default="", help="more options of llama-bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers_only:
        time_transformers(args)
        return
    if not (args.folder / "config.json").exists():
        torch_llama.write(args.folder, args.shape)
    rows = [CpAttn(program, args) for program in args.cp_attn]
    if args.llama_bench:
        rows.append(LlamaCpp(args.llama_bench, args))
    if importlib.util.find_spec("transformers"):
        rows.append(Transformers(args))
    for i in range(args.rounds):
        for row in rows:
            row.round()
            prefill, decode = row.phases()
            print(f"round {i + 1}, {row.name}: {prefill:.2f} s, {decode:.2f} s", file=sys.stderr, flush=True)
    table(rows, args)


if __name__ == "__main__":
    main()
