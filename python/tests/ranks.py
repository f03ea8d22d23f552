"""Runs a function of a test in several processes, the ranks of a job."""

import multiprocessing
import os
import socket
import sys
import traceback


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(function, rank, size, port, failures, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size),
                      LOCAL_WORLD_SIZE=str(size))
    try:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        function(rank, size, *arguments)
    except BaseException:
        failures.put(f"rank {rank}: {traceback.format_exc()}")


def run(function, size, *arguments):
    """function(rank, size, *arguments) on every rank, with torchrun's environment; fails with what a rank raised."""
    spawn = multiprocessing.get_context("spawn")
    failures, port = spawn.Queue(), free_port()
    processes = [spawn.Process(target=_rank, args=(function, rank, size, port, failures, arguments))
                 for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.exitcode is None:
            process.kill()
    found = []
    while not failures.empty():
        found.append(failures.get())
    assert not found, "\n".join(found)
    assert [process.exitcode for process in processes] == [0] * size
