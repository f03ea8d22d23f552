"""What a call from Python costs beside the call of the library: attend of one query over one key.

    python tests/overhead.py

Prints the least and the median time of a call in µs, on the host and within a CUDA graph that is replayed, where there
is a GPU: the library's function by ctypes, ``cpattn.ops.attend`` into a tensor that is given, and, where PyTorch is
there, ``torch.ops.cpattn.attend``, which makes its result.
"""

import time

import cpattn
from cpattn import ops
from cpattn._library import lib

ROUNDS = 20_000
REPLAYS, CALLS = 1000, 100  # of a graph, and in it


def tell(name, times, digits=1):
    times = sorted(times)
    print(f"{name:24} {times[0]:8.{digits}f} {times[len(times) // 2]:8.{digits}f}", flush=True)


def measure(name, function):
    clock, times = time.perf_counter_ns, []
    for _ in range(ROUNDS):
        begin = clock()
        function()
        times.append((clock() - begin) / 1e3)
    tell(name, times)


def main():
    import numpy as np

    cpattn.set_host_threads(1)
    pools = [np.ones((1, 16, 1, 64), np.float32) for _ in range(2)]
    cache, plan = cpattn.PagedCache(*pools), cpattn.AttendPlan(1, 1, 64, block_size=16)
    plan.set([1], [1], [[0]])
    q, out = np.ones((1, 1, 64), np.float32), np.empty((1, 1, 64), np.float32)
    ops.attend(plan, q, cache, out=out)
    print(f"# {cpattn.device().description}; µs a call: least, median")
    stream = plan.device.stream()
    measure("cpa_attend", lambda: lib.cpa_attend(plan.handle, plan.args_ref, stream))
    measure("ops.attend, NumPy", lambda: ops.attend(plan, q, cache, out=out))
    try:
        import torch
    except ImportError:
        return
    import cpattn.torch as ct

    torch.set_num_threads(1)
    q, out, *pools = (torch.from_numpy(x) for x in (q, out, *pools))
    measure("ops.attend, PyTorch", lambda: ops.attend(plan, q, cache, out=out))
    measure("torch.ops.cpattn.attend", lambda: ct.attend(plan, q, *pools))
    if torch.cuda.is_available() and lib.cpa_device_count(1) > 0:
        measure_graphs(torch, ct)


def measure_graphs(torch, ct):
    """Replays graphs that hold nothing but the same attends, called in each of the ways, in turn."""
    pools = [torch.ones((1, 16, 1, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q, out = (torch.ones((1, 1, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cache = cpattn.PagedCache(*pools)
    plan = cpattn.AttendPlan(1, 1, 64, block_size=16, dtype="bf16", backend="cuda")
    plan.reserve(1, 16, 1)
    plan.update(torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros((1, 1), dtype=torch.int32, device="cuda"))

    def of_the_library():
        assert lib.cpa_attend(plan.handle, plan.args_ref, plan.device.stream()) == 0

    ways = {"cpa_attend": of_the_library,
            "ops.attend": lambda: ops.attend(plan, q, cache, out=out),
            "torch.ops.cpattn.attend": lambda: ct.attend(plan, q, *pools)}
    graphs, times = {}, {}
    for name, call in ways.items():
        ops.attend(plan, q, cache, out=out)  # loads the kernels, and sets what cpa_attend is given
        torch.cuda.synchronize()
        graphs[name], times[name] = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    print(f"# {plan.device.description}; µs a call in a graph of {CALLS} that is replayed: least, median")
    for name, of in times.items():
        tell(name, of, digits=2)


if __name__ == "__main__":
    main()
