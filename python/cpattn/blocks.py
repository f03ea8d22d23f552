"""Blocks of a cache in and out of a process (cpattn/blocks.h): by their ids, between caches and rows of bytes; and
stores, in which engines keep what they have computed of prompts, and where others find it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _declarations as c
from ._device import Device, device_of
from ._library import call, create, integers, lib, raise_status, sized
from ._tensors import check_writable, empty_like, read, vector
from .cache import PagedCache

__all__ = ["BlockEvent", "FolderStore", "MemoryStore", "export_blocks", "import_blocks", "row_bytes"]


def _views(layers: PagedCache | Sequence[PagedCache]) -> tuple[Any, list[PagedCache]]:
    """The caches of layers, as the library takes them. ValueError for those of several devices, or none."""
    caches = [layers] if isinstance(layers, PagedCache) else list(layers)
    if len({cache.device for cache in caches}) != 1:
        raise ValueError(f"cpattn: {len(caches)} caches on {len({cache.device for cache in caches})} devices; expected "
                         "one or more on one device")
    return (c.cpa_kv_view * len(caches))(*(cache.view for cache in caches)), caches


def row_bytes(layers: PagedCache | Sequence[PagedCache]) -> int:
    """Bytes of one token's keys and values in all of these caches, one for each layer."""
    views, _ = _views(layers)
    return lib.cpa_blocks_row_bytes(views, len(views))


def _move(function: Any, layers: Any, ids: Any, rows: Any, stream: int | None, written: bool) -> None:
    views, caches = _views(layers)
    blocks = integers(c.c_int32, ids, "ids")
    place: Device = caches[0].device
    t = read(rows)
    on_device = t.backend != "host"
    if on_device and device_of(t) is not place:
        raise ValueError(f"cpattn: rows lie on {t.backend}:{t.ordinal}; expected {place.backend}:{place.ordinal}, or "
                         "the host")
    length = len(blocks) * caches[0].block_size * lib.cpa_blocks_row_bytes(views, len(views))
    args = sized(c.cpa_blocks_args, layers=ctypes.addressof(views), n_layers=len(views), ids=ctypes.addressof(blocks),
                 n=len(blocks), rows=vector(rows, "rows", "u8", length, place=t, written=written),
                 rows_on_device=int(on_device))
    handle = place.stream(stream)
    status = function(ctypes.byref(args), handle)
    if status:
        raise_status(status, lib.cpa_stream_error(handle))


def export_blocks(layers: PagedCache | Sequence[PagedCache], ids: Sequence[int], *, rows: Any = None,
                  stream: int | None = None) -> Any:
    """The rows of blocks: uint8 ``[len(ids) * block_size, row_bytes(layers)]``, new ones where the caches lie, or in
    ``rows``, there or on the host. ``layers``: the cache of a layer, or those of several, of one block size. Rows are
    the same bytes whatever layout the caches have. Waits for what is enqueued before, and for itself.
    """
    caches = _views(layers)[1]
    if rows is None:
        rows = empty_like(caches[0].k, (len(ids) * caches[0].block_size, row_bytes(caches)), "u8")
    _move(lib.cpa_blocks_export, layers, ids, rows, stream, written=True)
    return rows


def import_blocks(layers: PagedCache | Sequence[PagedCache], ids: Sequence[int], rows: Any, *,
                  stream: int | None = None) -> None:
    """Puts rows of ``export_blocks`` into the blocks ``ids``, none of them twice. Waits likewise."""
    for cache in _views(layers)[1]:
        check_writable(cache.k, "k of the cache")
        check_writable(cache.v, "v of the cache")
    _move(lib.cpa_blocks_import, layers, ids, rows, stream, written=False)


class _Store:
    """A store of the library, which lasts as long as it, or an engine that has it."""

    def __init__(self, kind: str, *arguments: Any):
        self._destroy = getattr(lib, f"cpa_{kind}_store_destroy")
        self.handle = create(getattr(lib, f"cpa_{kind}_store_create"), *arguments)
        self.table = c.cpa_block_store()
        getattr(lib, f"cpa_{kind}_store_table")(self.handle, ctypes.byref(self.table))

    def __del__(self) -> None:
        if hasattr(self, "handle") and not sys.is_finalizing():
            self._destroy(self.handle)


class MemoryStore(_Store):
    """A store in memory of this process, of up to ``most_bytes`` (0: as many as come), the oldest parts forgotten for
    new ones. Any thread may call its functions."""

    def __init__(self, most_bytes: int = 0):
        super().__init__("memory", most_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of all parts, as they count."""
        return lib.cpa_memory_store_bytes(self.handle)

    def send(self, file: Any) -> None:
        """Writes all parts to a file, a pipe or a socket, given by its number or as what has a ``fileno()``; blocks."""
        call(lib.cpa_memory_store_send, self.handle, _number(file))

    def receive(self, file: Any) -> None:
        """Takes in what ``send`` has written, up to its end; blocks. ``cpattn.Error`` where what comes is no such
        stream, or ends early, with what came before kept."""
        call(lib.cpa_memory_store_receive, self.handle, _number(file))


class FolderStore(_Store):
    """A store of files in a folder, which is there, and stays. Processes and threads may use one folder at once."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__("folder", os.fsencode(path))


def _number(file: Any) -> int:
    return file if isinstance(file, int) else file.fileno()


@dataclass(frozen=True)
class BlockEvent:
    """Tokens whose keys and values an engine's cache has from now on, ``"stored"``, or no longer, ``"removed"``.

    ``digest`` is that of the prompt up to the end of these tokens, ``parent`` that of the tokens before, None for the
    first of a prompt; ``group``, a group of layers. Of what is removed only ``digest`` and ``group`` are told.
    """

    kind: str
    group: int
    digest: bytes
    parent: bytes | None = None
    first_token: int = 0
    token_ids: tuple[int, ...] = ()


_EVENT_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(c.cpa_block_event))


def event_function(called: Callable[[BlockEvent], None]) -> Any:
    """What the library calls for every event, for as long as it is kept."""

    def take(_: Any, at: Any) -> None:
        event = at.contents
        if event.kind == c.CPA_BLOCK_REMOVED:
            called(BlockEvent("removed", event.group, bytes(event.digest)))
            return
        parent = bytes(event.parent)
        ids = tuple((ctypes.c_uint32 * event.n_tokens).from_address(event.tokens)) if event.n_tokens else ()
        called(BlockEvent("stored", event.group, bytes(event.digest), parent if any(parent) else None,
                          event.first_token, ids))

    return _EVENT_FUNCTION(take)
