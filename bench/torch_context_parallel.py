#!/usr/bin/env python3
"""PyTorch's context parallelism on the prefill of `cp_attn bench scaling`: torchrun --nproc-per-node N, one causal
prefill of one layer, 32/8 heads of 128, bf16, cuDNN, keys and values by all-gather or by a ring; TFLOP/s a GPU. Where
it refuses grouped heads, keys and values are repeated for every query head, and the line says so."""
import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
except ImportError:
    from torch.distributed.tensor.experimental._context_parallel._attention import context_parallel, set_rotate_method

Q_HEADS, KV_HEADS, DIM, REPEATS = 32, 8, 128, 5


def time_call(run):
    """Seconds of the slowest rank, a median."""
    times = []
    for repeat in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) * 1e-3, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if repeat:
            times.append(slowest.item())
    return statistics.median(times)


def measure(context, rotate, mesh, grouped):
    set_rotate_method(rotate)
    q, k, v = (torch.randn(1, heads, context, DIM, device="cuda", dtype=torch.bfloat16)
               for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    if not grouped:
        k, v = (tensor.repeat_interleave(Q_HEADS // KV_HEADS, 1) for tensor in (k, v))
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION), \
            context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        seconds = time_call(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped))
    flops = 4 * DIM * Q_HEADS * context * (context + 1) / 2
    return {"context": context, "rotate": rotate, "grouped_heads": grouped, "time_us": seconds * 1e6,
            "gflops": flops / seconds / mesh.size() * 1e-9}


def measure_somehow(context, rotate, mesh):
    try:
        return measure(context, rotate, mesh, True)
    except (RuntimeError, AssertionError, TypeError):
        return measure(context, rotate, mesh, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--result-json")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh, rows = init_device_mesh("cuda", (ranks,)), []
    for rotate in ("allgather", "alltoall"):
        rows.append(measure_somehow(arguments.context, rotate, mesh))
        if rank == 0:
            print(f"context_parallel {rotate:>9} {arguments.context} tokens, {ranks} GPUs: "
                  f"{rows[-1]['time_us']:.1f} us, {rows[-1]['gflops'] * 1e-3:.1f} TFLOP/s a GPU"
                  + ("" if rows[-1]["grouped_heads"] else ", heads repeated"), flush=True)
    if rank == 0 and arguments.result_json:
        with open(arguments.result_json, "x") as file:
            json.dump({"version": torch.__version__, "benchmark": "context_parallel", "ranks": ranks, "rows": rows}, file,
                      indent=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
