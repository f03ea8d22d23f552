#!/usr/bin/env python3
"""The time of a causal prefill in one layer by cpattn.Context under torchrun, one GPU a rank, 32/8 heads of 128 in bf16:
    torchrun --nproc-per-node N bench/scripts/torch_prefill.py [TOKENS]
Rank 0 prints the median of some rounds; keys and values are in the cache when a round begins."""
import os
import statistics
import sys

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # the first launch of a kernel would wait for other ranks' work

import torch
import torch.distributed as dist

import cpattn
from cpattn import ops

Q_HEADS, KV_HEADS, DIM, BLOCK, ROUNDS = 32, 8, 128, 64, 5


def main(tokens):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    context = cpattn.Context(q_heads=Q_HEADS, kv_heads=KV_HEADS, k_dim=DIM, block_size=BLOCK, max_rows=tokens,
                             dtype="bf16", backend="cuda", ordinal=rank)
    with context:
        own = context.tokens_on(tokens)
        q, k, v = (torch.randn(own, heads, DIM, dtype=torch.bfloat16, device="cuda") for heads in
                   (Q_HEADS, KV_HEADS, KV_HEADS))
        blocks = -(-own // BLOCK)
        cache = cpattn.PagedCache(*(torch.zeros(blocks, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
                                    for _ in "kv"))
        ops.kv_write(cache, k, v, torch.arange(own, device="cuda"))
        times = []
        for _ in range(ROUNDS + 2):
            context.plan([cpattn.Chunk(0, tokens, range(blocks))])
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            context.attend(q, cache)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        slowest = torch.tensor(statistics.median(times[2:]), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"prefill of {tokens} tokens on {context.size} GPUs: {slowest.item():.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128 << 10)
