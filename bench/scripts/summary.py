#!/usr/bin/env python3
"""Joins the JSON files of bench/scripts/host.sh (FOLDER/{ours,peer,merge}-DTYPE-ROUND.json) into one new file and prints a table
of the attend cases: ours beside the peer, and decode beside what one thread can read."""
import collections
import json
import pathlib
import statistics
import sys


def main(folder, output):
    runs, medians = [], collections.defaultdict(list)
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        who, dtype, _ = path.stem.split("-")
        run = json.loads(path.read_text())
        runs.append({"who": who, **run})
        for row in run["rows"]:
            medians[who, dtype, row["shape"]].append(row)
    with open(output, "x") as file:
        json.dump(runs, file, indent=2)
        file.write("\n")

    def median(who, dtype, shape, column):
        return statistics.median(row[column] for row in medians[who, dtype, shape])

    print("| dtype | case | ours GFLOP/s | PyTorch GFLOP/s | ours GB/s | PyTorch GB/s | ratio | of read bandwidth | #wrong |")
    print("|---|---|---|---|---|---|---|---|---|")
    for who, dtype, shape in medians:
        if who != "ours" or ("peer", dtype, shape) not in medians:
            continue
        figures = [f"{median(side, dtype, shape, column):.1f}" for column in ("gflops", "gbytes_per_s")
                   for side in ("ours", "peer")]
        ratio = median("peer", dtype, shape, "time_us") / median("ours", dtype, shape, "time_us")
        decode = shape.split("x")[1] == "1"
        share = f"{median('ours', dtype, shape, 'share_of_bandwidth'):.0%}" if decode else ""
        wrong = sum(row["wrong"] for row in medians["ours", dtype, shape])
        print(f"| {dtype} | {shape} | {' | '.join(figures)} | {ratio:.2f} | {share} | {wrong} |")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
