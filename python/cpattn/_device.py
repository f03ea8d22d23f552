"""Devices and streams: found by the tensors of a call."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from . import _declarations as c
from ._library import create, lib, raise_status, sized
from ._tensors import CUDA, HOST, torch

_BACKENDS = {HOST: c.CPA_BACKEND_HOST, CUDA: c.CPA_BACKEND_CUDA}


class _Stream:
    """A stream of the library, which ends with the thread that it belongs to."""

    def __init__(self, function: Any, *arguments: Any):
        self.handle = create(function, *arguments)

    def __del__(self) -> None:
        if hasattr(self, "handle") and not sys.is_finalizing():
            lib.cpa_stream_destroy(self.handle)


class Device:
    """A device of this process: the host and its threads, or one CUDA device.

    Devices live as long as the process. Thread-safe.
    """

    def __init__(self, backend: str, ordinal: int, threads: int):
        options = sized(c.cpa_device_options, backend=_BACKENDS[backend], ordinal=ordinal, threads=threads)
        self.backend = backend
        self.ordinal = ordinal
        self.handle = create(lib.cpa_device_open, ctypes.byref(options))
        self._local = threading.local()

    @property
    def description(self) -> str:
        """One line: the device, its instruction set and its threads."""
        return lib.cpa_device_description(self.handle).decode()

    def __repr__(self) -> str:
        return f"<cpattn.Device {self.backend}:{self.ordinal}, {self.description}>"

    def stream(self, native: int | None = None) -> ctypes.c_void_p:
        """The library's stream of this thread: of a cudaStream_t, or the current one of PyTorch or CuPy."""
        local = self._local
        if self.backend == HOST:
            if not hasattr(local, "host"):
                local.host = _Stream(lib.cpa_stream_create, self.handle)
            return local.host.handle
        if native is None:
            native = self._current()
        native = native or 1  # cudaStreamLegacy, the default stream, where frameworks say 0
        streams = local.__dict__.setdefault("streams", {})
        if native not in streams:
            streams[native] = _Stream(lib.cpa_stream_wrap, self.handle, native)
        return streams[native].handle

    def _current(self) -> int:
        framework = torch()
        if framework is not None:
            return framework.cuda.current_stream(self.ordinal).cuda_stream
        cupy = sys.modules.get("cupy")
        return cupy.cuda.get_current_stream().ptr if cupy is not None else 0


_devices: dict[tuple[str, int], Device] = {}
_threads: int | None = None
_lock = threading.Lock()


def set_host_threads(threads: int) -> None:
    """Threads that operators on the host use, the caller's included; without, one for each CPU of the process, which
    ranks that torchrun starts on one machine share.

    Before the first call on the host: RuntimeError afterwards.
    """
    global _threads
    with _lock:
        if (HOST, 0) in _devices:
            raise RuntimeError("cpattn: set_host_threads comes after the first use of the host")
        _threads = threads


def device(backend: str = HOST, ordinal: int = 0) -> Device:
    """The device of a back end, ``"host"`` or ``"cuda"``, opened when it is first asked for."""
    if backend == "cpu":
        backend = HOST
    found = _devices.get((backend, ordinal))
    if found is not None:
        return found
    if backend not in _BACKENDS:
        raise ValueError(f"cpattn: a device of {backend!r}; expected 'host' or 'cuda'")
    with _lock:
        if (backend, ordinal) not in _devices:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine, where torchrun started them
            threads = _threads or max(len(os.sched_getaffinity(0)) // ranks, 1)
            _devices[backend, ordinal] = Device(backend, ordinal, threads if backend == HOST else 0)
        return _devices[backend, ordinal]


def device_of(x: Any) -> Device:
    """The device on which a tensor lies, as described by _tensors.read."""
    return _devices.get((x.backend, x.ordinal)) or device(x.backend, x.ordinal)


def enqueue(function: Any, args: Any, on: Device, stream: int | None) -> None:
    """Calls ``function(args, stream)`` on a stream of the device."""
    handle = on.stream(stream)
    status = function(ctypes.byref(args), handle)
    if status:
        raise_status(status, lib.cpa_stream_error(handle))


def synchronise(on: Device | None = None, stream: int | None = None) -> None:
    """Waits for what is enqueued on the stream, and raises its first failure. The host has nothing to wait for."""
    on = on or device()
    handle = on.stream(stream)
    status = lib.cpa_stream_sync(handle)
    if status:
        raise_status(status, lib.cpa_stream_error(handle))
