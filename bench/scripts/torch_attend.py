#!/usr/bin/env python3
"""PyTorch's attention on the shapes of `cp_attn bench attend`, in the same table: its own on the CPU, cuDNN's on CUDA.

scaled_dot_product_attention, grouped queries, keys and values contiguous (PyTorch has no paged cache). A case is
sequences x new tokens x context, with options of its own after it (dtype, head-dim, v-head-dim, q-heads, kv-heads, mask); work and bytes
are counted as in docs/PERFORMANCE.md. #wrong counts sampled rows that differ from float64 by more than
2 * (error of attention in the dtype, computed row by row) + 1e-5. On CUDA a case that cuDNN refuses is left out."""
import argparse
import contextlib
import datetime
import itertools
import json
import os
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SAMPLED_TOKENS = 16
BATCH_S = 5e-3  # CUDA: calls between two waits
COLD_BYTES = 256 << 20  # CUDA: calls take turns over copies of keys and values, so much in all, that no cache holds


def count(text):
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1x1Kx1K,1x2Kx2K,1x8Kx8K,4x1x64K")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--heads", default="8/2")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--min-time", type=float, default=0.5, help="seconds")
    parser.add_argument("--result-json")
    return parser.parse_args()


class Case:
    """A case of --shapes: its numbers, and options that hold for it alone."""

    def __init__(self, text, arguments):
        numbers, *words = text.split(":")
        own = dict(word.split("=") for word in words)
        self.name = text
        self.sequences, self.new, self.context = (count(part) for part in numbers.split("x"))
        self.q_heads, self.kv_heads = (int(part) for part in arguments.heads.split("/"))
        self.q_heads, self.kv_heads = int(own.get("q-heads", self.q_heads)), int(own.get("kv-heads", self.kv_heads))
        self.dtype = DTYPES[own.get("dtype", arguments.dtype)]
        self.dim = int(own.get("head-dim", arguments.head_dim))
        self.v_dim = int(own.get("v-head-dim", self.dim))
        self.full = own.get("mask", "causal") == "full"


def make_inputs(case, device):
    """Random rows; every 512th key shares a direction with every query."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(heads, tokens, dim):
        return torch.randn(case.sequences, heads, tokens, dim, generator=generator, device=device).to(case.dtype)

    q, k = normal(case.q_heads, case.new, case.dim), normal(case.kv_heads, case.context, case.dim)
    v = normal(case.kv_heads, case.context, case.v_dim)
    direction = torch.randn(case.dim, generator=generator, device=device).sign().to(case.dtype)
    q += direction
    k[:, :, ::512] += 0.75 * direction
    return q, k, v


def attend(case, q, k, v):
    if case.new == 1 or case.full:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if case.new == case.context:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.ones(case.new, case.context, dtype=torch.bool, device=q.device).tril(case.context - case.new)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def count_wrong(case, q, k, v, out):
    """Sampled tokens of the first sequence, all heads: (rows checked, rows wrong)."""
    n = min(case.new, SAMPLED_TOKENS)
    wrong = 0
    for i in range(n):
        token = (i + 1) * case.new // n - 1
        visible = case.context if case.full else case.context - case.new + token + 1
        for head in range(case.q_heads):
            kv_head = head // (case.q_heads // case.kv_heads)
            row, keys, values = q[0, head, token], k[0, kv_head, :visible], v[0, kv_head, :visible]
            exact = torch.softmax(keys.double() @ row.double() / case.dim**0.5, 0) @ values.double()
            weights = torch.softmax(keys.float() @ row.float() / case.dim**0.5, 0).to(q.dtype).float()
            plain = (weights @ values.float()).to(q.dtype).double()
            tolerance = 2 * (plain - exact).abs().max() + 1e-5
            wrong += not bool((out[0, head, token].double() - exact).abs().max() <= tolerance)
    return n * case.q_heads, wrong


def time_runs(run, min_time, cuda):
    """Seconds of a call: on CUDA a mean over batches of calls that are long enough."""

    def batch(calls):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    batch(1)
    calls = int(BATCH_S / batch(3)) + 1 if cuda else 1
    times = []
    while len(times) < 3 or sum(times) * calls < min_time:
        times.append(batch(calls))
    return times


def measure(case, arguments):
    cuda = arguments.device == "cuda"
    q, k, v = make_inputs(case, arguments.device)
    backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cuda else contextlib.nullcontext()
    n_copies = -(-COLD_BYTES // (k.nbytes + v.nbytes)) if cuda else 1
    copies = itertools.cycle([(k, v)] + [(k.clone(), v.clone()) for _ in range(n_copies - 1)])
    with torch.no_grad(), backend:
        times = time_runs(lambda: attend(case, q, *next(copies)), arguments.min_time, cuda)
        checked, wrong = count_wrong(case, q, k, v, attend(case, q, k, v))
    seconds = statistics.median(times)
    pairs = case.new * case.context if case.full else case.new * (case.context - case.new) + case.new * (case.new + 1) / 2
    flops = case.sequences * pairs * case.q_heads * 2 * (case.dim + case.v_dim)
    data = (case.sequences * (case.dim + case.v_dim) * q.element_size() *
            (case.context * case.kv_heads + case.new * case.q_heads))
    return {"shape": case.name, "time_us": seconds * 1e6, "iterations": len(times), "gflops": flops / seconds * 1e-9,
            "gbytes_per_s": data / seconds * 1e-9, "checked": checked, "wrong": wrong}


def copy_bandwidth(device):
    """GB/s of copying memory larger than any cache, read and written."""
    source = torch.ones(1 << 31 if device == "cuda" else 1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(time_runs(lambda: target.copy_(source), 0.05, device == "cuda"))
    return 2 * source.numel() / seconds * 1e-9


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if arguments.result_json and os.path.exists(arguments.result_json):
        sys.exit(f"{arguments.result_json} exists")
    cuda = arguments.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    copied = copy_bandwidth(arguments.device)
    print(f"# PyTorch {torch.__version__} attend, {date}")
    print(f"# device: {device}" + (f", cuDNN {torch.backends.cudnn.version()}" if cuda else ""))
    print(f"# threads {arguments.threads}, dtype {arguments.dtype}, heads {arguments.heads}, "
          f"head dim {arguments.head_dim}")
    print(f"# memory: {copied:.1f} GB/s copied (read and written), measured in this run")
    print("# shape: sequences x new tokens x context; time is the median")
    print(f"#{'shape':>49} {'time (us)':>12} {'iters':>8} {'GFLOP/s':>11} {'GB/s':>9} {'checked':>10} {'#wrong':>7}")
    rows = []
    for shape in arguments.shapes.split(","):
        try:
            row = measure(Case(shape, arguments), arguments)
        except RuntimeError as error:
            if not cuda:
                raise
            print(f"# {shape}: {str(error).splitlines()[0]}", flush=True)
            continue
        rows.append(row)
        print(f"{shape:>50} {row['time_us']:>12.1f} {row['iterations']:>8} {row['gflops']:>11.2f} "
              f"{row['gbytes_per_s']:>9.2f} {row['checked']:>10} {row['wrong']:>7}", flush=True)
    if arguments.result_json:
        with open(arguments.result_json, "x") as output:
            json.dump({"version": torch.__version__, "benchmark": "attend", "date": date, "device": device,
                       "threads": arguments.threads, "dtype": arguments.dtype, "heads": arguments.heads,
                       "head_dim": arguments.head_dim, "copy_gbytes_per_s": copied, "rows": rows}, output, indent=2)
            output.write("\n")


if __name__ == "__main__":
    main()
