"""Communicators: how the ranks of a group reach each other. No MPI: they meet over TCP."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

from . import _declarations as c
from ._library import call, create, lib, sized


class Communicator:
    """The ranks of a group, at most 64. Used by one thread at a time, as is what is created over it.

    Made by ``alone``, ``from_store``, ``from_env`` or ``from_group``. A rank that has ended, or of which nothing is
    heard for ``timeout_s``, ends the waits of the others with ``CommunicationError``, which names it.
    """

    def __init__(self, handle: ctypes.c_void_p, group: Any = None):
        self.handle = handle
        self.group = group  # of torch.distributed, with the same ranks; or None
        self.contexts: list[ctypes.c_void_p] = []  # over it that live, in the order in which they were made

    def __del__(self) -> None:
        if not hasattr(self, "handle") or sys.is_finalizing():
            return
        # Of a cycle the collector may end the communicator before its contexts, which have to go first.
        for context in list(self.contexts):
            self.destroy_context(context)
        lib.cpa_comm_destroy(self.handle)

    def destroy_context(self, context: ctypes.c_void_p) -> None:
        """Destroys a context over this communicator, or does nothing where that is done. Collective."""
        if any(own is context for own in self.contexts):
            self.contexts = [own for own in self.contexts if own is not context]
            lib.cpa_context_destroy(context)

    @classmethod
    def alone(cls) -> Communicator:
        """One rank, which has nobody to talk to."""
        return cls(create(lib.cpa_comm_alone))

    @classmethod
    def from_store(cls, host: str, port: int, rank: int, size: int, *, secret: str | None = None,
                   timeout_s: float = 0, join_s: float = 0) -> Communicator:
        """The ranks that meet at ``host:port``, where rank 0 listens. Collective.

        ``secret``: what all ranks are told and nobody else knows, 16 letters or more; without one whoever can connect
        may take a rank's place. ``timeout_s``, ``join_s``: how long a rank may be silent, and how long to wait for all
        to come; 0: 10 s and 60 s.
        """
        options = sized(c.cpa_comm_options, timeout_s=timeout_s, join_s=join_s,
                        secret=None if secret is None else secret.encode())
        return cls(create(lib.cpa_comm_from_store, host.encode(), port, rank, size, ctypes.byref(options)))

    @classmethod
    def from_env(cls, environment: Mapping[str, str], *, port_offset: int = 1, **options: Any) -> Communicator:
        """The ranks that MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE of ``os.environ`` name, as torchrun sets them.

        They meet at MASTER_PORT + ``port_offset``, since torchrun listens at MASTER_PORT itself. ``options`` are those
        of ``from_store``. Without RANK in the environment: one rank.
        """
        if "RANK" not in environment:
            return cls.alone()
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE") if name not in environment]
        if missing:
            raise ValueError(f"cpattn: RANK is in the environment, but not {', '.join(missing)}")
        return cls.from_store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]) + port_offset,
                              int(environment["RANK"]), int(environment["WORLD_SIZE"]), **options)

    @classmethod
    def from_group(cls, group: Any = None, *, timeout_s: float = 0, join_s: float = 0) -> Communicator:
        """The ranks of a process group of torch.distributed, by default that of all ranks, in its order. Collective.

        The group carries the address, a free port and a secret, which rank 0 chooses; messages go over TCP afterwards.
        """
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            self = cls.alone()
        else:
            told: list[Any] = [_meeting_place() if rank == 0 else None]
            first = dist.get_global_rank(group, 0) if group is not None else 0
            dist.broadcast_object_list(told, src=first, group=group)
            host, port, secret = told[0]
            self = cls.from_store(host, port, rank, size, secret=secret, timeout_s=timeout_s, join_s=join_s)
        self.group = group
        return self

    @property
    def rank(self) -> int:
        """This rank's number, from 0 on."""
        return lib.cpa_comm_rank(self.handle)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return lib.cpa_comm_size(self.handle)

    def barrier(self) -> None:
        """Returns once every rank has called it. Collective."""
        call(lib.cpa_comm_barrier, self.handle)

    def all_gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, the same number on each, in rank order. Collective."""
        out = ctypes.create_string_buffer(len(data) * self.size)
        call(lib.cpa_comm_all_gather, self.handle, data, len(data), out)
        return [out.raw[i * len(data):(i + 1) * len(data)] for i in range(self.size)]


def _meeting_place() -> tuple[str, int, str]:
    """Where the others reach this rank, a port that is free there, and a secret."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: it only asks for the route
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "9"))))
        host = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((host, 0))
        return host, listener.getsockname()[1], secrets.token_hex(16)
