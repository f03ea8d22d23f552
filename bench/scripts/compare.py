#!/usr/bin/env python3
"""compare.py BASELINE TABLE [--slack 0.02]: a table of bench/scripts/gpu_table.py (its table.json) beside an earlier
one, or beside a baseline of bench/results/. Prints every work that is slower by more than the slack, and every goal that
was met and is missed; exits 1 if there is one. compare.py --baseline TABLE prints TABLE as a baseline."""
import argparse
import json
import pathlib
import sys

FASTER_IS_LESS = {"us", "ms", "s"}


def rows_of(path):
    """{work: {"ours": "561 TFLOP/s", "met": "yes"}} of a table or a baseline; a work with two goals meets both or not."""
    rows = json.loads(pathlib.Path(path).read_text())["rows"]
    if isinstance(rows, dict):
        return rows
    joined = {}
    for row in rows:
        if row["met"] == "not run":
            continue
        kept = joined.setdefault(row["work"], {"ours": row["ours"], "met": row["met"]})
        if row["met"] not in ("yes", ""):
            kept["met"] = row["met"]
    return joined


def speed(text):
    """A figure such as "561 TFLOP/s" or "5.8 us" as a number that is larger where it is faster; None if it is none."""
    number, _, unit = text.partition(" ")
    try:
        value = float(number)
    except ValueError:
        return None
    if value <= 0:
        return None
    return 1 / value if unit.split(",")[0] in FASTER_IS_LESS else value


def compare(before, after, slack):
    worse = []
    for work, old in before.items():
        new = after.get(work)
        if new is None:
            continue
        if old["met"] == "yes" and new["met"] != "yes":
            worse.append(f"goal missed that was met: {work}: {new['ours']}, was {old['ours']}")
        then, now = speed(old["ours"]), speed(new["ours"])
        if then and now and now < then * (1 - slack):
            worse.append(f"slower by {100 * (1 - now / then):.1f}%: {work}: {new['ours']}, was {old['ours']}")
    return worse


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--slack", type=float, default=0.02)
    parser.add_argument("files", nargs="+")
    given = parser.parse_args()
    if given.baseline:
        table = json.loads(pathlib.Path(given.files[0]).read_text())
        lines = ",\n".join(f"{json.dumps(work)}: {json.dumps(row)}" for work, row in rows_of(given.files[0]).items())
        print(f'{{"machine": {json.dumps(table["machine"])}, "rows": {{\n{lines}\n}}}}')
        return 0
    if len(given.files) != 2:
        parser.error("expected BASELINE and TABLE")
    before, after = (rows_of(path) for path in given.files)
    worse = compare(before, after, given.slack)
    print("\n".join(worse + [f"compared {len(set(before) & set(after))} figures, {len(worse)} worse"]))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
