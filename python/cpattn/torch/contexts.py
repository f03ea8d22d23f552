"""Contexts for the shapes of attention that calls turn out to have."""

from __future__ import annotations

from typing import Any

import torch

from ..communicator import Communicator
from ..context import Context

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dtype_of(*tensors: torch.Tensor) -> str:
    """The name of the one dtype of the tensors."""
    kinds = {x.dtype for x in tensors}
    if len(kinds) != 1 or not kinds <= DTYPES.keys():
        raise ValueError(f"cpattn: q, k and v are of {', '.join(sorted(map(str, kinds)))}; expected one of "
                         f"{', '.join(map(str, DTYPES))}")
    return DTYPES[tensors[0].dtype]


def place_of(x: torch.Tensor) -> dict[str, Any]:
    """The device of a tensor, as plans and contexts are told of it."""
    return {"backend": "cuda" if x.device.type == "cuda" else "host", "ordinal": x.device.index or 0}


class Contexts:
    """One context for each shape of attention over a communicator, made for twice the rows where they do not suffice.

    Ranks that call ``take`` with the same shapes and rows in the same order have the same contexts.
    """

    def __init__(self, communicator: Communicator, block_size: int, placement: str):
        self.communicator = communicator
        self._options: dict[str, Any] = {"block_size": block_size, "rows": placement}
        self._made: dict[tuple[Any, ...], Context] = {}

    def take(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int) -> Context:
        """The context for ``[batch, heads, tokens, dim]`` of these heads, widths, dtype and device, and ``rows`` rows
        of all ranks in a step. Collective."""
        heads, dims, dtype = (q.shape[1], k.shape[1]), (k.shape[3], v.shape[3]), dtype_of(q, k, v)
        key = (heads, dims, dtype, q.device)
        found = self._made.get(key)
        if found is None or found.max_rows < rows:
            if found is not None:
                del self._made[key]  # before what may fail
                found.close()
            found = self._made[key] = Context(self.communicator, q_heads=heads[0], kv_heads=heads[1], k_dim=dims[0],
                                              v_dim=dims[1], dtype=dtype, max_rows=1 << (rows - 1).bit_length(),
                                              **self._options, **place_of(q))
        return found
