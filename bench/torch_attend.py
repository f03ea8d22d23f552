#!/usr/bin/env python3
"""PyTorch's CPU attention on the shapes of `cp_attn bench attend`, in the same table.

scaled_dot_product_attention, grouped queries, keys and values contiguous (PyTorch has no paged cache). A case is
sequences x new tokens x context, causal; work and bytes are counted as in docs/PERFORMANCE.md. #wrong counts sampled
rows that differ from float64 by more than 2 * (error of attention in the dtype, computed row by row) + 1e-5."""
import argparse
import datetime
import json
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SAMPLED_TOKENS = 16


def count(text):
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1x1Kx1K,1x2Kx2K,1x8Kx8K,4x1x64K")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--heads", default="8/2")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--min-time", type=float, default=0.5)
    parser.add_argument("--json")
    return parser.parse_args()


def make_inputs(sequences, new, context, q_heads, kv_heads, dim, dtype):
    """Random rows; every 512th key shares a direction with every query."""
    generator = torch.Generator().manual_seed(1)

    def normal(heads, tokens):
        return torch.randn(sequences, heads, tokens, dim, generator=generator)

    q, k, v = normal(q_heads, new), normal(kv_heads, context), normal(kv_heads, context)
    direction = torch.randn(dim, generator=generator).sign()
    q += direction
    k[:, :, ::512] += 0.75 * direction
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attend(q, k, v):
    new, context = q.shape[2], k.shape[2]
    if new == 1:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if new == context:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def count_wrong(q, k, v, out):
    """Sampled tokens of the first sequence, all heads: (rows checked, rows wrong)."""
    new, context, q_heads, dim = q.shape[2], k.shape[2], q.shape[1], q.shape[3]
    n = min(new, SAMPLED_TOKENS)
    wrong = 0
    for i in range(n):
        token = (i + 1) * new // n - 1
        visible = context - new + token + 1
        for head in range(q_heads):
            kv_head = head // (q_heads // k.shape[1])
            row, keys, values = q[0, head, token], k[0, kv_head, :visible], v[0, kv_head, :visible]
            exact = torch.softmax(keys.double() @ row.double() / dim**0.5, 0) @ values.double()
            weights = torch.softmax(keys.float() @ row.float() / dim**0.5, 0).to(q.dtype).float()
            plain = (weights @ values.float()).to(q.dtype).double()
            tolerance = 2 * (plain - exact).abs().max() + 1e-5
            wrong += not bool((out[0, head, token].double() - exact).abs().max() <= tolerance)
    return n * q_heads, wrong


def time_runs(run, min_time):
    run()
    times = []
    while len(times) < 3 or sum(times) < min_time:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def measure(shape, arguments):
    sequences, new, context = (count(part) for part in shape.split("x"))
    q_heads, kv_heads = (int(part) for part in arguments.heads.split("/"))
    dim, dtype = arguments.head_dim, DTYPES[arguments.dtype]
    q, k, v = make_inputs(sequences, new, context, q_heads, kv_heads, dim, dtype)
    with torch.no_grad():
        times = time_runs(lambda: attend(q, k, v), arguments.min_time)
        checked, wrong = count_wrong(q, k, v, attend(q, k, v))
    seconds = statistics.median(times)
    pairs = new * (context - new) + new * (new + 1) / 2
    flops = sequences * pairs * q_heads * 4 * dim
    data = sequences * 2 * dim * q.element_size() * (context * kv_heads + new * q_heads)
    return {"shape": shape, "time_us": seconds * 1e6, "iterations": len(times), "gflops": flops / seconds * 1e-9,
            "gbytes_per_s": data / seconds * 1e-9, "read_gbytes_per_s": None, "checked": checked, "wrong": wrong}


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    output = open(arguments.json, "x") if arguments.json else None
    print(f"# PyTorch {torch.__version__} attend, {date}")
    print(f"# device: {torch.backends.cpu.get_cpu_capability()}")
    print(f"# threads {arguments.threads}, dtype {arguments.dtype}, heads {arguments.heads}, "
          f"head dim {arguments.head_dim}")
    print("# shape: sequences x new tokens x context (causal); time is the median")
    print(f"#{'shape':>21} {'time (us)':>12} {'iters':>8} {'GFLOP/s':>10} {'GB/s':>10} {'read GB/s':>11} "
          f"{'checked':>10} {'#wrong':>7}")
    rows = []
    for shape in arguments.shapes.split(","):
        row = measure(shape, arguments)
        rows.append(row)
        print(f"{shape:>22} {row['time_us']:>12.1f} {row['iterations']:>8} {row['gflops']:>10.2f} "
              f"{row['gbytes_per_s']:>10.2f} {'-':>11} {row['checked']:>10} {row['wrong']:>7}", flush=True)
    if output:
        json.dump({"version": torch.__version__, "benchmark": "attend", "date": date, "threads": arguments.threads,
                   "dtype": arguments.dtype, "heads": arguments.heads, "head_dim": arguments.head_dim, "rows": rows},
                  output, indent=2)
        output.write("\n")
        output.close()


if __name__ == "__main__":
    main()
