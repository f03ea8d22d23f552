"""Context-parallel attention over paged caches: the library libcpattn from Python.

``cpattn.ops`` has the operators, ``cpattn.Communicator`` and ``cpattn.Context`` attention of several ranks,
``cpattn.blocks`` takes blocks of caches from process to process,
``cpattn.Engine`` answers prompts by the model of a folder (its library is loaded when it is first asked for),
``cpattn.torch`` operators that torch.compile takes and ``context_parallel``, ``cpattn.transformers`` the attention
``"cpattn"`` of transformers with its cache, ``cpattn.vllm`` and ``cpattn.sglang`` back ends for these. Only the last
four import PyTorch.
"""

from typing import TYPE_CHECKING, Any

from . import blocks, ops
from ._device import Device, device, set_host_threads, synchronise
from ._library import (CommunicationError, Error, InvalidError, OutOfMemoryError, UnsupportedError, version)
from .cache import PagedCache, block_bytes
from .communicator import Communicator
from .context import Chunk, Context
from .plan import AttendPlan
from .rope import rope_table
from .varlen import VarlenPlan

if TYPE_CHECKING:
    from .engine import Engine, Sampling

__version__ = version()
__all__ = ["AttendPlan", "Chunk", "CommunicationError", "Communicator", "Context", "Device", "Error", "InvalidError",
           "OutOfMemoryError", "PagedCache", "UnsupportedError", "VarlenPlan", "block_bytes", "blocks", "device", "ops",
           "rope_table", "set_host_threads", "synchronise", "version"]


def __getattr__(name: str) -> Any:
    if name not in ("Engine", "Sampling"):
        raise AttributeError(f"module 'cpattn' has no attribute {name!r}")
    from . import engine
    return getattr(engine, name)
