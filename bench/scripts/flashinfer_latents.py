#!/usr/bin/env python3
"""FlashInfer's decode over latents on the shapes of `cp_attn bench attend` that have v-in-k, in the same table.

BatchMLAPagedAttentionWrapper over random pages of 64 tokens, planned once, 512 + 64 columns in bf16. A case is
sequences x new tokens x context, with options of its own after it (q-heads, shared: the first tokens of all sequences
lie in the same pages); others, and caches in codes, are left out with a line. Work is counted as `cp_attn bench` counts
it. #wrong counts sampled rows that differ from float64 by more than 2 * (error of attention in bf16, computed row by row)
+ 1e-5. Exits 77 where FlashInfer, PyTorch or a GPU is missing."""
import argparse
import datetime
import json
import os
import statistics
import sys

try:
    import flashinfer
    import torch

    from torch_attend import copy_bandwidth, count, time_runs
except ImportError as error:
    print(f"flashinfer_latents.py: {error}")
    sys.exit(77)

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = (128 + 64)**-0.5  # of the heads for which such latents stand
WORKSPACE_BYTES = 128 << 20
KNOWN = {"v-in-k", "q-heads", "shared", "cascade-attention"}


class Case:
    """A case of --shapes."""

    def __init__(self, text):
        numbers, *words = text.split(":")
        own = dict(word.split("=") for word in words)
        if own.get("v-in-k") != "true" or not own.keys() <= KNOWN:
            raise ValueError("not of latents in bf16")
        self.name = text
        self.sequences, self.new, self.context = (count(part) for part in numbers.split("x"))
        self.heads = int(own.get("q-heads", 128))
        self.shared = count(own.get("shared", "0")) // PAGE * PAGE
        self.rows = self.sequences * self.new


def page_tables(case):
    """[sequences, pages of one]: the shared ones first, then each sequence's own, anywhere."""
    pages, shared = -(-case.context // PAGE), case.shared // PAGE
    places = torch.randperm(shared + case.sequences * (pages - shared), generator=torch.Generator().manual_seed(1))
    common = places[:shared].expand(case.sequences, shared)
    return torch.cat((common, places[shared:].view(case.sequences, pages - shared)), 1)


def plan(case, tables):
    device = "cuda"
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device), backend="auto")
    first_rows = torch.arange(case.sequences + 1, dtype=torch.int32, device=device) * case.new
    first_pages = torch.arange(case.sequences + 1, dtype=torch.int32, device=device) * tables.shape[1]
    lengths = torch.full((case.sequences,), case.context, dtype=torch.int32, device=device)
    wrapper.plan(first_rows, first_pages, tables.flatten().int().to(device), lengths, case.heads, LATENT, ROPE, PAGE,
                 case.new > 1, SCALE, torch.bfloat16, torch.bfloat16)
    return wrapper


def count_wrong(case, tables, q, cache, out):
    """The last row of the first and the last sequence, all heads: (rows checked, rows wrong)."""
    wrong = 0
    for sequence in {0, case.sequences - 1}:
        keys = cache[tables[sequence].to("cuda")].view(-1, LATENT + ROPE)[:case.context]
        row = (sequence + 1) * case.new - 1
        for head in range(case.heads):
            scores = keys.double() @ q[row, head].double() * SCALE
            exact = torch.softmax(scores, 0) @ keys[:, :LATENT].double()
            weights = torch.softmax(keys.float() @ q[row, head].float() * SCALE, 0).to(q.dtype).float()
            plain = (weights @ keys[:, :LATENT].float()).to(q.dtype).double()
            tolerance = 2 * (plain - exact).abs().max() + 1e-5
            wrong += not bool((out[row, head].double() - exact).abs().max() <= tolerance)
    return min(case.sequences, 2) * case.heads, wrong


def measure(case, min_time):
    generator = torch.Generator("cuda").manual_seed(1)
    tables = page_tables(case)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    q, cache = normal(case.rows, case.heads, LATENT + ROPE), normal(int(tables.max()) + 1, PAGE, LATENT + ROPE)
    parts = [part.contiguous() for tensor in (q, cache) for part in tensor.split((LATENT, ROPE), -1)]
    wrapper = plan(case, tables)
    times = time_runs(lambda: wrapper.run(*parts), min_time, True)
    checked, wrong = count_wrong(case, tables, q, cache, wrapper.run(*parts))
    seconds = statistics.median(times)
    pairs = case.sequences * (case.new * (case.context - case.new) + case.new * (case.new + 1) / 2)
    flops = pairs * case.heads * 2 * (2 * LATENT + ROPE)
    tokens = case.sequences * case.context - max(case.sequences - 1, 0) * case.shared
    data = 2 * (tokens * (LATENT + ROPE) + case.rows * case.heads * (2 * LATENT + ROPE))
    return {"shape": case.name, "time_us": seconds * 1e6, "iterations": len(times), "gflops": flops / seconds * 1e-9,
            "gbytes_per_s": data / seconds * 1e-9, "checked": checked, "wrong": wrong}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", required=True)
    parser.add_argument("--min-time", type=float, default=0.5, help="seconds")
    parser.add_argument("--result-json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("flashinfer_latents.py: no GPU")
        sys.exit(77)
    if arguments.result_json and os.path.exists(arguments.result_json):
        sys.exit(f"{arguments.result_json} exists")
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    device, copied = torch.cuda.get_device_name(), copy_bandwidth("cuda")
    print(f"# FlashInfer {flashinfer.__version__} decode over latents, {date}")
    print(f"# device: {device}; memory: {copied:.1f} GB/s copied (read and written), measured in this run")
    print(f"#{'shape':>59} {'time (us)':>12} {'iters':>8} {'GFLOP/s':>11} {'GB/s':>9} {'checked':>10} {'#wrong':>7}")
    rows = []
    for shape in arguments.shapes.split(","):
        try:
            row = measure(Case(shape), arguments.min_time)
        except (RuntimeError, ValueError) as error:
            print(f"# {shape}: {str(error).splitlines()[0]}", flush=True)
            continue
        rows.append(row)
        print(f"{shape:>60} {row['time_us']:>12.1f} {row['iterations']:>8} {row['gflops']:>11.2f} "
              f"{row['gbytes_per_s']:>9.2f} {row['checked']:>10} {row['wrong']:>7}", flush=True)
    if arguments.result_json:
        with open(arguments.result_json, "x") as output:
            json.dump({"version": flashinfer.__version__, "benchmark": "attend", "date": date, "device": device,
                       "copy_gbytes_per_s": copied, "rows": rows}, output, indent=2)
            output.write("\n")


if __name__ == "__main__":
    main()
