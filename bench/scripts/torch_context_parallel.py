#!/usr/bin/env python3
"""PyTorch's context parallelism on the prefills of `cp_attn bench scaling`: torchrun --nproc-per-node N, causal prefills
of one layer, 32/8 heads of 128, bf16, cuDNN, keys and values by all-gather or by a ring; TFLOP/s a GPU. Where
it refuses grouped heads, keys and values are repeated for every query head, and the line says so."""
import argparse
import itertools
import json
import os
import statistics
import types

import torch
import torch.distributed as dist
import torch.nn.functional as functional  # context_parallel replaces a function in it: call it there
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_attend import Case, make_inputs

try:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
except ImportError:
    from torch.distributed.tensor.experimental._context_parallel._attention import context_parallel, set_rotate_method

MODEL = types.SimpleNamespace(heads="32/8", dtype="bf16", head_dim=128)
LEAST_REPEATS, ENOUGH_S = 3, 0.5  # calls, until they have taken so long in all
PEAK_FLOPS = 990e12  # H100 and H200, dense bf16


def time_call(run):
    """Seconds of the slowest rank, a median."""
    times = []
    while len(times) < 1 + LEAST_REPEATS or sum(times[1:]) < ENOUGH_S:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) * 1e-3, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times[1:])


def measure(shape, rotate, mesh, grouped):
    set_rotate_method(rotate)
    case = Case(shape, MODEL)
    q, k, v = make_inputs(case, "cuda")
    if not grouped:
        k, v = (tensor.repeat_interleave(case.q_heads // case.kv_heads, 1) for tensor in (k, v))
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION), \
            context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        seconds = time_call(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped))
    flops = 4 * case.dim * case.q_heads * case.context * (case.context + 1) / 2
    if flops / seconds / mesh.size() > PEAK_FLOPS:
        raise SystemExit(f"context_parallel: {seconds:.6f} s is less than the device can take: not the whole attention")
    return {"shape": shape, "rotate": rotate, "ranks": mesh.size(), "grouped_heads": grouped, "time_us": seconds * 1e6,
            "gflops": flops / seconds / mesh.size() * 1e-9}


def measure_somehow(shape, rotate, mesh):
    try:
        return measure(shape, rotate, mesh, True)
    except (RuntimeError, AssertionError, TypeError):
        return measure(shape, rotate, mesh, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1x128Kx128K", help="1 x C x C, as those of cp_attn bench")
    parser.add_argument("--result-json")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh, rows = init_device_mesh("cuda", (ranks,)), []
    for shape, rotate in itertools.product(arguments.shapes.split(","), ("allgather", "alltoall")):
        rows.append(measure_somehow(shape, rotate, mesh))
        torch.cuda.empty_cache()
        if rank == 0:
            print(f"context_parallel {rotate:>9} {shape}, {ranks} GPUs: "
                  f"{rows[-1]['time_us']:.1f} us, {rows[-1]['gflops'] * 1e-3:.1f} TFLOP/s a GPU"
                  + ("" if rows[-1]["grouped_heads"] else ", heads repeated"), flush=True)
    if rank == 0 and arguments.result_json:
        with open(arguments.result_json, "x") as file:
            json.dump({"version": torch.__version__, "benchmark": "context_parallel", "ranks": ranks, "rows": rows}, file,
                      indent=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
