"""What a call from Python costs beside the call of the library: attend of one query over one key, on the host.

    python tests/overhead.py

Prints the least and the median time of a call in µs: the library's function by ctypes, ``cpattn.ops.attend`` into a
tensor that is given, and, where PyTorch is there, ``torch.ops.cpattn.attend``, which makes its result.
"""

import time

import cpattn
from cpattn import ops
from cpattn._library import lib

ROUNDS = 20_000


def measure(name, function):
    clock, times = time.perf_counter_ns, []
    for _ in range(ROUNDS):
        begin = clock()
        function()
        times.append(clock() - begin)
    times.sort()
    print(f"{name:24} {times[0] / 1e3:8.1f} {times[ROUNDS // 2] / 1e3:8.1f}")


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


if __name__ == "__main__":
    main()
