"""A model of transformers that generates with attention of cpattn; the pages of its cache are sharded over the ranks of
torchrun, and each rank runs the model on the same inputs.

    python3 docs/guide/examples/generate.py FOLDER
    torchrun --nproc-per-node 2 docs/guide/examples/generate.py FOLDER
"""
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import cpattn.transformers


def main(folder):
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group = dist.group.WORLD

    cpattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="cpattn", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("A prompt of some length. " * 40, return_tensors="pt")

    cache = cpattn.transformers.PagedCache(model.config, num_blocks=256, group=group)
    ids = model.generate(**inputs, cache=cache, max_new_tokens=8, do_sample=False)[0, inputs.input_ids.shape[1]:]

    model.set_attn_implementation("eager")  # the model's own attention, over a cache of its own
    own = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs.input_ids.shape[1]:]

    rank, size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    blocks = sum(len(table) for table in cache.tables)
    print(f"rank {rank} of {size}: {len(ids)} tokens after {inputs.input_ids.shape[1]}, {blocks} blocks here, "
          f"{'as with' if ids.tolist() == own.tolist() else 'not as with'} eager attention", flush=True)
    if group:
        dist.destroy_process_group()
    return ids.tolist() != own.tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
