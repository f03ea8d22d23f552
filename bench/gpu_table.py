#!/usr/bin/env python3
"""gpu_table.py OUT: joins the JSON files of bench/gpu.sh into one table: work, ours, peer, ratio, goal, met or not.
gpu_table.py peer-shapes: the cases of `cp_attn bench attend` that have a goal beside the peer, as it wants them."""
import json
import pathlib
import sys

# case of ours, case of the peer (None: the same), least ratio of the rates
PREFILL = [(f"1x{n}Kx{n}K{pages}", f"1x{n}Kx{n}K", goal) for pages, goal in ((":pages=ordered", 1.0), ("", 0.97))
           for n in (8, 16, 32, 64)] + [
    ("1x16Kx16K:block-size=16", "1x16Kx16K", 0.94),
    ("1x16Kx16K:mask=full", None, 0.97),
    ("1x16Kx16K:dtype=fp16", None, 0.97),
    ("1x16Kx16K:head-dim=64", None, 0.97),
    ("1x16Kx16K:head-dim=64:mask=full", None, 0.97),
    ("1x16Kx16K:head-dim=256", None, 0.97),
    ("1x16Kx16K:head-dim=256:mask=full", None, 0.97),
    ("1x16Kx16K:head-dim=192:v-head-dim=128", None, None),
]
# case, other case of ours, least ratio of the rates
AMONG_OURS = [("16x1Kx8K:ragged=true", "1x16Kx16K", 0.9), ("1x8Kx128K", "1x64Kx64K", 0.97)]
LONG_US, LAUNCH_US = 50, 5  # decode below LONG_US is held to 1.3 x (bytes / bandwidth + LAUNCH_US)
MET = {True: "yes", False: "NO", None: ""}


def load(folder, name):
    path = pathlib.Path(folder) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def by_shape(run):
    return {row["shape"]: row for row in run["rows"]} if run else {}


def line(work, ours, peer="", ratio=None, goal="", met=None):
    print(f"| {work} | {ours} | {peer} | {'' if ratio is None else f'{ratio:.2f}'} | {goal} | {MET[met]} |")


def tflops(row):
    return f"{row['gflops'] / 1e3:.0f} TFLOP/s"


def prefill_rows(ours, peer):
    for case, other, goal in PREFILL:
        beside = peer.get(other or case)
        if case not in ours:
            continue
        ratio = ours[case]["gflops"] / beside["gflops"] if beside else None
        met = None if ratio is None or goal is None else ratio >= goal
        line(f"prefill {case}", tflops(ours[case]), f"cuDNN {tflops(beside)}" if beside else "", ratio,
             "" if goal is None else f">= {goal:.2f} x", met)
    for case, other, goal in AMONG_OURS:
        if case in ours and other in ours:
            ratio = ours[case]["gflops"] / ours[other]["gflops"]
            line(f"prefill {case}", tflops(ours[case]), f"ours {other} {tflops(ours[other])}", ratio,
                 f">= {goal:.2f} x", ratio >= goal)


def is_decode(shape):
    return shape.split(":")[0].split("x")[1] == "1"


def decode_rows(run):
    for row in run["rows"] if run else []:
        if not is_decode(row["shape"]):
            continue
        floor_us = row["time_us"] * row["share_of_bandwidth"]
        bandwidth = f"{run['read_gbytes_per_s']:.0f} GB/s read"
        if floor_us > LONG_US:
            line(f"decode {row['shape']}", f"{row['gbytes_per_s']:.0f} GB/s", bandwidth, row["share_of_bandwidth"],
                 ">= 0.90 x", row["share_of_bandwidth"] >= 0.9)
        else:
            limit = 1.3 * (floor_us + LAUNCH_US)
            line(f"decode {row['shape']}", f"{row['time_us']:.1f} us", bandwidth, row["share_of_bandwidth"],
                 f"<= {limit:.1f} us", row["time_us"] <= limit)


def copy_rows(run):
    for row in run["rows"] if run else []:
        large = row["time_us"] > LONG_US
        line(f"{run['benchmark']} {row['shape']}", f"{row['gbytes_per_s']:.0f} GB/s",
             f"{run['copy_gbytes_per_s']:.0f} GB/s copied", row["share_of_bandwidth"], ">= 0.90 x" if large else "",
             row["share_of_bandwidth"] >= 0.9 if large else None)


def exchange_rows(run):
    for row in run["rows"] if run else []:
        line(f"exchange {row['shape']} to each peer, {run['ranks']} GPUs", f"{row['time_us']:.1f} us",
             f"{row['gbytes_per_s']:.0f} GB/s")


def scaling_rows(run, peer):
    for row in run["rows"] if run else []:
        if row["ranks"] == 1:
            continue
        work = f"{row['work']} {row['sequences']} x {row['context']} on {row['ranks']} GPUs"
        if row["work"] == "prefill":
            line(work, f"{tflops(row)} a GPU", "one GPU", row["efficiency"], ">= 0.92 x", row["efficiency"] >= 0.92)
            line(f"{work}, exposed", f"{row['exposed_share']:.1%} of the time", "", None, "< 3%",
                 row["exposed_share"] < 0.03)
            if peer:
                ratio = row["gflops"] / peer["gflops"]
                line(work, f"{tflops(row)} a GPU", f"context_parallel ({peer['rotate']}) {tflops(peer)}", ratio,
                     ">= 1.10 x", ratio >= 1.1)
        else:
            goal = 3.3 / 4 * row["ranks"]
            line(work, f"{row['gbytes_per_s']:.0f} GB/s a GPU", "one GPU", row["speedup"], f">= {goal:.2f} x",
                 row["speedup"] >= goal)


def main(folder):
    names = ("attend", "merge", "kv_write", "kv_pack", "exchange", "scaling")
    runs = {name: load(folder, f"ours-{name}") for name in names}
    print("| work | ours | peer | ratio | goal | met |")
    print("|---|---|---|---|---|---|")
    prefill_rows(by_shape(runs["attend"]), by_shape(load(folder, "peer-attend")))
    decode_rows(runs["attend"])
    for name in ("merge", "kv_write", "kv_pack"):
        copy_rows(runs[name])
    exchange_rows(runs["exchange"])
    context_parallel = load(folder, "peer-context_parallel")
    fastest = max(context_parallel["rows"], key=lambda row: row["gflops"]) if context_parallel else None
    scaling_rows(runs["scaling"], fastest)
    wrong = sum(row["wrong"] for run in runs.values() if run for row in run["rows"])
    print(f"\n{wrong} wrong results")
    return wrong > 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "peer-shapes":
        print(",".join(dict.fromkeys(other or case for case, other, _ in PREFILL)))
    else:
        sys.exit(main(sys.argv[1]))
