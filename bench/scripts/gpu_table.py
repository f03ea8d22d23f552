#!/usr/bin/env python3
"""gpu_table.py OUT: joins the JSON files that bench/scripts/gpu.sh left in OUT into one table, printed and written to
OUT/table.json with all that was measured: work, ours, peer, ratio, goal, met. What was not measured, for want of GPUs or
because its step was left out, stands there as "not run". Exits 1 if a result of ours was wrong."""
import json
import pathlib
import statistics
import sys

import gpu_cases as cases

LONG_US = 50  # what takes at least so long at full bandwidth is held to a share of it, else to SMALL times the floor
SMALL = 1.3
NOT_RUN = "not run"


class Runs:
    """The measurements of a folder; a case that was measured in several rounds is the median of them."""

    def __init__(self, folder):
        self.files = {path.stem: json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))
                      if path.stem != "table"}

    def rounds(self, name):
        return [run for stem, run in self.files.items() if stem == name or stem.rpartition("-")[0] == name and
                stem.rpartition("-")[2].isdigit()]

    def run(self, name):
        return next(iter(self.rounds(name)), None)

    def case(self, name, shape, **where):
        """A row by its shape, and by other columns; None if it was not measured."""
        rows = [row for run in self.rounds(name) for row in run["rows"]
                if row["shape"] == shape and all(row[key] == value for key, value in where.items())]
        if not rows:
            return None
        merged = {key: statistics.median(row[key] for row in rows) if isinstance(value, (int, float)) else value
                  for key, value in rows[0].items()}
        return merged | {"wrong": sum(row.get("wrong", 0) for row in rows)}

    def wrong(self):
        return sum(row.get("wrong", 0) for stem, run in self.files.items() if stem.startswith("ours-")
                   for row in run.get("rows", [])) + sum(
                       run["verify"]["violations"] for run in self.files.values() if "verify" in run)


class Table:
    def __init__(self):
        self.rows = []

    def add(self, work, ours, peer, ratio, goal, holds, used=()):
        """`holds` says whether the goal is met, None that there is none; a row of `used` that is None was not run."""
        if any(row is None for row in used):
            ours, peer, ratio, met = "", "", None, NOT_RUN
        elif any(row.get("wrong") for row in used):
            met = "WRONG"
        else:
            met = {True: "yes", False: "NO", None: ""}[holds]
        self.rows.append({"work": work, "ours": ours, "peer": peer, "ratio": ratio, "goal": goal, "met": met})

    def compare(self, work, ours, peer, peer_name, least, unit):
        """Rates side by side: ours over the peer's is to be `least`."""
        if ours is None or peer is None:
            return self.add(work, "", "", None, f">= {least:.2f} x", None, (None,))
        ratio = unit.rate(ours) / unit.rate(peer)
        self.add(work, unit.text(ours), f"{peer_name} {unit.text(peer)}", ratio, f">= {least:.2f} x", ratio >= least,
                 (ours, {"wrong": 0} if peer_name.startswith("cuDNN") else peer))

    def at_least(self, work, row, value, text, peer, goal, goal_text):
        """A figure of one row that is to reach the goal."""
        if row is None:
            return self.add(work, "", "", None, goal_text, None, (None,))
        self.add(work, text(row), peer(row), value(row), goal_text, value(row) >= goal, (row,))

    def print(self):
        print("| work | ours | peer | ratio | goal | met |\n|---|---|---|---|---|---|")
        for row in self.rows:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
            print(f"| {row['work']} | {row['ours']} | {row['peer']} | {ratio} | {row['goal']} | {row['met']} |")


class Flops:
    rate = staticmethod(lambda row: row["gflops"])
    text = staticmethod(lambda row: f"{row['gflops'] * 1e-3:.0f} TFLOP/s")


class Calls:
    rate = staticmethod(lambda row: 1 / row["time_us"])
    text = staticmethod(lambda row: f"{row['time_us']:.1f} us")


def prefill_rows(runs, table):
    def ours(case):
        return runs.case("ours-prefill", case)

    for case, peer in cases.BESIDE_CUDNN:
        bf16_causal = "mask" not in case and "head-dim" not in case and "dtype" not in case
        table.compare(f"prefill {case}", ours(case), runs.case("peer-cudnn", peer), "cuDNN", 1 if bf16_causal else 0.97,
                      Flops)
    for size, pages_of_16 in zip(cases.SIZES, cases.PAGES_OF_16):
        contiguous = ours(cases.prefill(size, cases.CONTIGUOUS))
        for case, least in ((cases.prefill(size), 0.97), (pages_of_16, 0.94)):
            table.compare(f"cost of pages, prefill {case}", ours(case), contiguous, "contiguous", least, Flops)
    table.compare(f"prefill {cases.CONTINUING}, a long prefix", ours(cases.CONTINUING), ours("1x64Kx64K"), "64K causal",
                  0.97, Flops)
    steps, one = (runs.case("ours-varlen", case) for case in cases.LISTS["varlen"])
    table.compare("varlen prefill, 64 prompts in steps of 8K", steps, one, "one sequence", 0.9, Flops)
    for size in cases.SIZES[1:]:
        table.at_least(f"prefill {size} causal, pages of 64", ours(cases.prefill(size)), Flops.rate, Flops.text,
                       lambda row: "", 300e3, ">= 300 TFLOP/s")
        table.rows[-1]["ratio"] = None


def encoder_rows(runs, table):
    def ours(case):
        return runs.case("ours-encoders", case)

    for dim, least in ((64, 0.97), (128, 1)):
        case = cases.ENCODERS[dim]
        table.compare(f"without a cache {case}", ours(case), runs.case("peer-encoders", case), "cuDNN", least, Flops)
    for dim in (72, 80):
        table.compare(f"without a cache {cases.ENCODERS[dim]}", ours(cases.ENCODERS[dim]), ours(cases.ENCODERS[128]),
                      "width 128", 0.85 * 80 / 96, Flops)
    table.compare(f"without a cache {cases.IMAGES}", ours(cases.IMAGES), runs.case("peer-encoders", cases.IMAGES),
                  "cuDNN", 0.97, Flops)
    table.compare(f"without a cache {cases.IMAGES}", ours(cases.IMAGES), ours(cases.ENCODERS[64]), "long segments", 0.8,
                  Flops)


def decode_rows(runs, table):
    for name, shape in [("ours-decode", case) for case in cases.DECODE] + [
            ("ours-decode-large", case) for case in cases.LARGE_DECODE]:
        work, row, run = f"decode {shape}", runs.case(name, shape), runs.run(name)
        if row is None:
            table.add(work, "", "", None, ">= 0.90 x", None, (None,))
            continue
        floor_us, share = row["time_us"] * row["share_of_bandwidth"], row["share_of_bandwidth"]
        peer = f"{run['read_gbytes_per_s']:.0f} GB/s read"
        if floor_us > LONG_US:
            table.add(work, f"{row['gbytes_per_s']:.0f} GB/s", peer, share, ">= 0.90 x", share >= 0.9, (row,))
        else:
            limit = SMALL * (floor_us + run["launch_us"])
            table.add(work, f"{row['time_us']:.1f} us", f"{floor_us:.1f} us read + {run['launch_us']:.1f} us launch",
                      share, f"<= {limit:.1f} us", row["time_us"] <= limit, (row,))
    table.at_least("decode 64x1x16K, pages of 64", runs.case("ours-decode", "64x1x16K"),
                   lambda row: row["share_of_bandwidth"], lambda row: f"{row['gbytes_per_s']:.0f} GB/s",
                   lambda row: "read bandwidth", 0.7, ">= 0.70 x")


def cascade_rows(runs, table):
    def ours(case):
        return runs.case("ours-cascade", case)

    for case, most in cases.CASCADE.items():
        row, flat = ours(case), ours(case + cases.FLAT)
        table.add(f"decode {case}", row and Calls.text(row), flat and f"each by itself {Calls.text(flat)}",
                  row and flat and flat["time_us"] / row["time_us"], f"<= {most} us",
                  row and row["time_us"] <= most, (row, flat))
    for case in cases.LITTLE_SHARED:
        table.compare(f"decode {case}", ours(case), ours(case + cases.FLAT), "each by itself", 0.97, Calls)


def quantised_rows(runs, table):
    def ours(case):
        return runs.case("ours-quantised", case)

    for goal, unit, work, plain in ((1.8, Calls, "decode", cases.DECODE_BESIDE_BF16),
                                    (0.85, Flops, "prefill", cases.PREFILL_BESIDE_BF16)):
        for case in plain:
            for dtype in cases.QUANTISED:
                table.compare(f"{work} {case}, cache in {dtype}", ours(f"{case}:kv-cache-dtype={dtype}"), ours(case),
                              "bf16", goal, unit)


def least_rows(runs, table, name, flops, read):
    def ours(case):
        return runs.case(f"ours-{name}", case)

    for case, least in flops.items():
        table.at_least(f"{name} {case}", ours(case), Flops.rate, Flops.text, lambda row: "", least * 1e3,
                       f">= {least} TFLOP/s")
        table.rows[-1]["ratio"] = None
    for case, least in read.items():
        table.at_least(f"{name} {case}", ours(case), lambda row: row["share_of_bandwidth"],
                       lambda row: f"{row['gbytes_per_s']:.0f} GB/s", lambda row: "read bandwidth", least,
                       f">= {least:.2f} x")


def sparse_rows(runs, table):
    least_rows(runs, table, "sparse", cases.SPARSE_FLOPS, cases.SPARSE_READ)
    dense, chosen = runs.case("ours-decode", "64x1x128K"), runs.case("ours-sparse", "64x8Mx2K")
    table.compare("2K of 128K keys each, 64 rows", chosen, dense, "all keys", 20, Calls)


def xattn_rows(runs, table):
    dense_of = {size: runs.case("ours-xattn-dense", case) for size, case in cases.XATTN_DENSE.items()}
    for case in cases.ATTEND_BLOCKS:
        table.compare(f"attention over blocks at random {case}", runs.case("ours-attend_blocks", case),
                      dense_of[case.split("x")[0]], "dense", 0.9, Flops)
    beside, chunk, decode = (runs.case(f"ours-{name}", case) for name, case in (
        ("attend_beside", cases.BESIDE), ("beside-chunk", cases.BESIDE_CHUNK), ("beside-decode", cases.BESIDE_DECODE)))
    apart = chunk and decode and {"time_us": chunk["time_us"] + decode["time_us"]}
    share = beside and apart and apart["time_us"] / beside["time_us"]
    table.add(f"blocks at random and decode {cases.BESIDE}", beside and Calls.text(beside),
              apart and f"apart {Calls.text(apart)}", share, ">= 0.95 x", share and share >= 0.95, (beside, chunk, decode))
    for case, size in cases.XATTN.items():
        dense, whole = dense_of[size], runs.case("ours-xattn", case)
        table.compare(f"estimate of XAttention {case}", runs.case("ours-xattn_estimate", case), dense, "dense", 0.85, Flops)
        # Its work is (density + 2 / 2 stride) of dense: the rates are to be as the times would.
        table.compare(f"XAttention {case}", whole, dense, "dense", 0.85, Flops)
        table.add(f"XAttention {case}, whole", whole and Calls.text(whole), dense and f"dense {Calls.text(dense)}",
                  whole and dense and dense["time_us"] / whole["time_us"], "", None, (whole, dense))


def offload_rows(runs, table):
    """Prefill is held to the slower of attention in memory and the link, decode to the link."""
    run = runs.run("ours-offload")
    for case in cases.OFFLOADED_PREFILL:
        ours, memory = runs.case("ours-offload", case), runs.case("ours-offload-memory", case)
        ratio, peer = None, ""
        if ours and memory:
            on_link_us = ours["gbytes_per_s"] * ours["time_us"] / run["link_gbytes_per_s"]
            ratio = max(memory["time_us"], on_link_us) / ours["time_us"]
            peer = f"in memory {memory['time_us']:.0f} us, link {on_link_us:.0f} us"
        table.add(f"prefill {case} over a cache on the host", ours and Calls.text(ours), peer, ratio, ">= 0.90 x",
                  ratio and ratio >= 0.9, (ours, memory))
    for case in cases.OFFLOADED_DECODE:
        table.at_least(f"decode {case} over a cache on the host", runs.case("ours-offload", case),
                       lambda row: row["share_of_bandwidth"], lambda row: f"{row['gbytes_per_s']:.1f} GB/s",
                       lambda row: f"link {run['link_gbytes_per_s']:.1f} GB/s", 0.8, ">= 0.80 of the link")


def skip_rows(runs, table):
    def ours(case):
        return runs.case("ours-skip-tiles", case)

    for case in cases.SKIPPING:
        table.compare(f"attend {case}, tiles left out if any were", ours(f"{case}:skip-tiles=1000"), ours(case), "without",
                      cases.SKIPPING_NONE, Calls)
        for light, (distance, least) in cases.LIGHT.items():
            row = ours(case + light + distance)
            left_out = row and row["tiles_left_out"]  # None where no kernel leaves any out
            share = f", {left_out:.2f} of its tiles left out" if left_out is not None else ""
            table.compare(f"attend {case}{light}{share}", row, ours(case + light), "all tiles", least, Calls)


def selection_rows(runs, table):
    def share(row):
        return row["share_of_bandwidth"]

    def rate(row):
        return f"{row['gbytes_per_s']:.0f} GB/s"

    least_rows(runs, table, "index_logits", cases.INDEX_FLOPS, cases.INDEX_READ)
    for case, least in cases.TOPK.items():
        table.at_least(f"topk {case}, one read", runs.case("ours-topk", case), share, rate, lambda row: "read bandwidth",
                       least, f">= {least:.2f} x")
        table.compare(f"topk {case}", runs.case("ours-topk", case), runs.case("peer-topk", case), "torch.topk", 3, Calls)
    layer = [runs.case("ours-index_logits", "1x1x128K"), runs.case("ours-topk", "1x128Kx2K"),
             runs.case("ours-sparse", cases.latents("1x128Kx2K", 128))]
    chosen = None if None in layer else {"time_us": sum(row["time_us"] for row in layer),
                                         "wrong": sum(row["wrong"] for row in layer)}
    table.compare("1 x 128K under 128 heads: logits, the best 2K, attention", chosen,
                  runs.case("ours-latents", cases.latents("1x1x128K", 128)), "all keys", 3, Calls)
    for name, shape in (cases.INDEX_ROWS | cases.ENTRIES).items():
        run = runs.run(f"ours-{name}")
        table.at_least(f"{name} {shape}", runs.case(f"ours-{name}", shape), share, rate,
                       lambda row, run=run: f"{run['copy_gbytes_per_s']:.0f} GB/s copied", 0.9, ">= 0.90 x")


def latent_rows(runs, table):
    least_rows(runs, table, "latents", cases.LATENT_FLOPS, cases.LATENT_READ)
    for case in cases.BESIDE_FLASHINFER:
        ours = runs.case("ours-latents", case) or runs.case("ours-cascade", case)
        table.compare(f"latents {case}", ours, runs.case("peer-flashinfer", case), "FlashInfer", 1, Calls)
    for case in cases.EXPANDED:
        table.compare(f"expanded latents {case}", runs.case("ours-expanded", case), runs.case("peer-expanded", case),
                      "cuDNN", 1, Flops)


def expert_rows(runs, table):
    dense = runs.case("ours-dense-product", cases.DENSE_PRODUCT)
    for case in cases.EXPERT_PRODUCTS:
        table.compare(f"experts {case}", runs.case("ours-experts", case), dense, "cuBLASLt, dense", 0.7, Flops)


def rule_rows(runs, table):
    def ours(case):
        return runs.case("ours-rules", case)

    for name, goals in cases.RULES.items():
        for case, least, unit in zip((cases.RULED_PREFILL, cases.RULED_DECODE), goals, (Flops, Calls)):
            table.compare(f"{case}:rules={name}", ours(f"{case}:rules={name}"), ours(case), "without", least, unit)
    one = ours(cases.ONE_TOKEN)
    for case, most in cases.DRAFTED.items():
        row = ours(case)
        ratio = row and one and row["time_us"] / one["time_us"]
        table.add(f"decode {case}, drafts and all", row and Calls.text(row), one and f"one token {Calls.text(one)}", ratio,
                  f"<= {most:.2f} x", ratio and ratio <= most, (row, one))


    for case, name in cases.RULED_CACHES.items():
        with_rule, without = (runs.case("ours-ruled-caches", case + rule) for rule in (f":rules={name}", ""))
        table.compare(f"{case}:rules={name}", with_rule, without, "without", cases.RULED_CACHES_RATE, Calls)


def short_prompt_rows(runs, table):
    for case, least in cases.SHORT_PROMPTS.items():
        table.at_least(f"prefill {case}", runs.case("ours-short-prompts", case), Flops.rate, Flops.text, lambda row: "",
                       least * 1e3, f">= {least} TFLOP/s")
        table.rows[-1]["ratio"] = None


def small_block_rows(runs, table):
    def ours(case):
        return runs.case("ours-small-blocks", case)

    for pages in cases.FEW_TOKENS:
        for case in cases.FEW_PREFILL:
            table.compare(f"prefill {case}{pages}", ours(case + pages), ours(case), "pages of 64", 0.9, Flops)
        for case in cases.FEW_DECODE:
            table.at_least(f"decode {case}{pages}", ours(case + pages), lambda row: row["share_of_bandwidth"],
                           lambda row: f"{row['gbytes_per_s']:.0f} GB/s", lambda row: "read bandwidth", 0.85, ">= 0.85 x")


def memory_rows(runs, table):
    for case in cases.LISTS["layouts"]:
        table.at_least(f"decode {case}", runs.case("ours-layouts", case), lambda row: row["share_of_bandwidth"],
                       lambda row: f"{row['gbytes_per_s']:.0f} GB/s", lambda row: "read bandwidth", 0.8, ">= 0.80 x")
    for name in ("merge", "kv_write", "kv_pack", "kv_convert"):
        for shape in cases.LISTS[name]:
            goals = (0.9,) if name in ("kv_pack", "kv_convert") else (0.9, 0.85)
            for goal in goals:
                run = runs.run(f"ours-{name}")
                table.at_least(f"{name} {shape}", runs.case(f"ours-{name}", shape),
                               lambda row: row["share_of_bandwidth"], lambda row: f"{row['gbytes_per_s']:.0f} GB/s",
                               lambda row: f"{run['copy_gbytes_per_s']:.0f} GB/s copied", goal, f">= {goal:.2f} x")


def exchange_rows(runs, table):
    for peer, nccl in zip(cases.LISTS["exchange"][::2], cases.LISTS["exchange"][1::2]):
        ours, other = runs.case("ours-exchange", peer), runs.case("ours-exchange", nccl)
        if ours and other:
            table.add(f"exchange of {peer.split(':')[0]} with each peer, {runs.run('ours-exchange')['ranks']} GPUs",
                      Calls.text(ours), f"NCCL {Calls.text(other)}", other["time_us"] / ours["time_us"], "", None,
                      (ours, other))


def scaling_rows(runs, table):
    def ours(shape):
        return runs.case("ours-scaling", shape, ranks=4)

    others = runs.run("peer-context_parallel")
    for shape, least in cases.SCALING.items():
        row, work = ours(shape), f"causal prefill {shape} over 4 GPUs"
        table.at_least(work, row, lambda row: row["efficiency"], lambda row: f"{Flops.text(row)} a GPU",
                       lambda row: "one GPU", least, f">= {least:.2f} x")
        fastest = max((other for other in others["rows"] if others["ranks"] == 4 and other["shape"] == shape),
                      key=Flops.rate, default=None) if others else None
        table.compare(work, row, fastest, f"context_parallel {fastest['rotate'] if fastest else ''}", 1.1, Flops)
    long = ours("1x128Kx128K")
    table.at_least("causal prefill 1x128Kx128K over 4 GPUs", long, lambda row: row["efficiency"],
                   lambda row: f"{Flops.text(row)} a GPU", lambda row: "one GPU", 0.92, ">= 0.92 x")
    table.add("the same, waiting for messages", long and f"{long['exposed_share']:.2%}", "", None, "< 3%",
              long and long["exposed_share"] < 0.03, (long,))
    table.at_least(f"decode {cases.DECODE_SCALING} over 4 GPUs", ours(cases.DECODE_SCALING), lambda row: row["speedup"],
                   lambda row: f"{row['gbytes_per_s']:.0f} GB/s a GPU", lambda row: "one GPU", 3.3, ">= 3.30 x")
    for shape in (*cases.SHORT_DECODE, cases.DECODE_SCALING):
        row = ours(shape)
        goal = cases.DECODE_ADDED_GOALS[shape]
        added = row and row["added_us"] - row["differ_us"]
        table.add(f"decode {shape} over 4 GPUs, exchange and merge of a layer", row and f"{added:.1f} us",
                  row and f"attention {row['shard_us']:.1f} us, layers differ by {row['differ_us']:.1f}", None,
                  f"<= {goal} us", row and added <= goal, (row,))


def service_rows(runs, table):
    one, four, million = (runs.run(f"ours-{name}") for name in ("step-1", "step-4", "million"))
    used = tuple(run and {"wrong": run["verify"]["violations"]} for run in (one, four, million))
    step = "decode step of 32 layers, one sequence of 8K"
    table.add(f"{step}, one GPU", one and f"{one['median_itl_ms']:.2f} ms", "", None, "", None, used[:1])
    ratio = one and four and four["median_itl_ms"] / one["median_itl_ms"]
    table.add(f"{step}, 4 GPUs", four and f"{four['median_itl_ms']:.2f} ms",
              one and f"one GPU {one['median_itl_ms']:.2f} ms", ratio, "<= 1.10 x", ratio and ratio <= 1.1, used[:2])
    table.add("1,000,000 tokens over 4 GPUs, a layer", million and f"{million['duration']:.1f} s",
              million and f"staging {million['cp']['staging_bytes'] >> 20} MiB", None, "runs, staging <= 1024 MiB",
              million and million["completed"] == 1 and million["cp"]["size"] == 4 and
              million["cp"]["staging_bytes"] <= 1 << 30, used[2:])


def main(folder):
    runs, table = Runs(folder), Table()
    for add_rows in (prefill_rows, encoder_rows, decode_rows, cascade_rows, quantised_rows, latent_rows, sparse_rows,
                     xattn_rows, skip_rows, offload_rows, selection_rows, expert_rows, rule_rows, short_prompt_rows,
                     small_block_rows, memory_rows,
                     exchange_rows, scaling_rows, service_rows):
        add_rows(runs, table)
    table.print()
    met = [row["met"] for row in table.rows if row["goal"]]
    wrong = runs.wrong()
    print(f"\n{met.count('yes')} goals met, {met.count('NO') + met.count('WRONG')} missed, {met.count(NOT_RUN)} not run; "
          f"{wrong} wrong results")
    summary = {"machine": runs.files.pop("machine", None), "wrong": wrong, "rows": table.rows, "runs": runs.files}
    pathlib.Path(folder, "table.json").write_text(json.dumps(summary, indent=1) + "\n")
    return wrong > 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
