"""Tables of rotary positions."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _declarations as c
from ._library import call, lib, sized
from ._tensors import THE_HOST, vector

SCALINGS = {"plain": c.CPA_ROPE_PLAIN, "linear": c.CPA_ROPE_LINEAR, "llama3": c.CPA_ROPE_LLAMA3,
            "yarn": c.CPA_ROPE_YARN}


def rope_table(table: Any, theta: float, *, scaling: str = "plain", factor: float = 1.0, **numbers: float) -> Any:
    """Fills ``table``, fp32 ``[max_position, dim]`` on the host: dim / 2 cosines, then dim / 2 sines of each position.

    ``scaling``: ``"plain"``, ``"linear"``, ``"llama3"`` or ``"yarn"``; ``numbers`` are the other fields of
    cpa_rope_config (cpattn/nn.h), such as ``original_max_position``. Computed in float64.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"cpattn: scaling {scaling!r}; expected one of {', '.join(SCALINGS)}")
    unknown = set(numbers) - {field[0] for field in c.cpa_rope_config._fields_}
    if unknown:
        raise TypeError(f"cpattn: rope_table knows no {', '.join(sorted(unknown))}")
    length, dim = table.shape
    config = sized(c.cpa_rope_config, scaling=SCALINGS[scaling], dim=dim, theta=theta, max_position=length,
                   factor=factor, **numbers)
    address = vector(table, "table", "fp32", length * dim, place=THE_HOST, written=True)
    call(lib.cpa_rope_table, ctypes.byref(config), address)
    return table
