"""Operators of PyTorch, which torch.compile and CUDA graphs take; and ``context_parallel``. Inference only.

The functions here call ``torch.ops.cpattn.*``, and have what tracing needs: schemas that say what is written, and fake
implementations. Pools of a cache are tensors, as ``cpattn.PagedCache`` takes them, and a plan is a
``cpattn.AttendPlan`` or a ``cpattn.VarlenPlan``. A CUDA graph holds a plan's addresses: capture over one that is
reserved (``AttendPlan.reserve``), and ``update`` it.
"""

from .context_parallel import context_parallel, context_parallel_unshard
from .operators import (attend, attend_with_lse, kv_write, linear, merge, rmsnorm, rotate, swiglu, varlen,
                        varlen_with_lse)

__all__ = ["attend", "attend_with_lse", "context_parallel", "context_parallel_unshard", "kv_write", "linear", "merge",
           "rmsnorm", "rotate", "swiglu", "varlen", "varlen_with_lse"]
