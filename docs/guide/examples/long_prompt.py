"""A long prompt through one layer of attention whose cache is sharded over the ranks of torchrun: prefill in chunks,
then one token of decode, compared with PyTorch's attention of the whole sequence.

    torchrun --nproc-per-node 2 docs/guide/examples/long_prompt.py [TOKENS]

On the host over gloo; with GPUs and a library with CUDA, there, in bf16: over NCCL with one for each rank, and where
ranks share one, through its memory.
"""
import os
import sys

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # the first launch of a kernel would wait for other ranks' work

import torch
import torch.distributed as dist
import torch.nn.functional as F

import cpattn
from cpattn import ops

Q_HEADS, KV_HEADS, DIM, BLOCK, CHUNK = 8, 2, 64, 16, 1024
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
GPUS = torch.cuda.device_count()
ON_GPU = GPUS > 0
ORDINAL = LOCAL_RANK % GPUS if ON_GPU else 0


def prompt_of(tokens):
    """Queries, keys and values of the whole sequence, [tokens, heads, DIM], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, heads, DIM, generator=generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]


def reference(q, k, v):
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def step(context, cache, table, tensors, start, end):
    """The new tokens [start, end): this rank's rows of the result, and their positions."""
    own = context.positions(start, end)
    first = context.tokens_on(start)  # of this rank, before them
    slots = torch.arange(first, first + len(own), device=tensors[0].device)  # its blocks lie in order
    q, k, v = (x[own].contiguous() for x in tensors)
    ops.kv_write(cache, k, v, slots)
    context.plan([cpattn.Chunk(start, end - start, table)])  # once a step
    return context.attend(q, cache), own  # once a layer


def main(tokens):
    place = f"cuda:{ORDINAL}" if ON_GPU else "cpu"
    if ON_GPU:
        torch.cuda.set_device(ORDINAL)  # of PyTorch's own messages too
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    dist.init_process_group("nccl" if GPUS >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    q, k, v = (x.to(place, dtype) for x in prompt_of(tokens + 1))
    want = reference(q, k, v)

    context = cpattn.Context(q_heads=Q_HEADS, kv_heads=KV_HEADS, k_dim=DIM, block_size=BLOCK, max_rows=CHUNK,
                             dtype="bf16" if ON_GPU else "fp32", backend="cuda" if ON_GPU else "host",
                             ordinal=ORDINAL)
    with context:
        blocks = -(-context.tokens_on(tokens + 1) // BLOCK)
        cache = cpattn.PagedCache(*(torch.zeros(blocks, BLOCK, KV_HEADS, DIM, dtype=dtype, device=place)
                                    for _ in "kv"))
        largest = 0.0
        for start in [*range(0, tokens, CHUNK), tokens]:  # the last one is a token of decode
            end = min(start + CHUNK, tokens) if start < tokens else tokens + 1
            out, own = step(context, cache, range(blocks), (q, k, v), start, end)
            if own:
                largest = max(largest, (out - want[own]).abs().max().item())
        print(f"rank {context.rank} of {context.size}: {context.tokens_on(tokens + 1)} of {tokens + 1} tokens, "
              f"differs from PyTorch's attention by {largest:.1e}", flush=True)
    dist.destroy_process_group()
    return 0 if largest < (0.05 if ON_GPU else 1e-4) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8192))
