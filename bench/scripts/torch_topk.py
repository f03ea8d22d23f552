#!/usr/bin/env python3
"""torch_topk.py --shapes ROWSxCOLUMNSxK,... --result-json F: torch.topk of random scores on one GPU, beside `cp_attn bench
topk`: the median time of a call that is given its results' memory."""
import argparse
import json
import pathlib
import statistics

import torch

ROUNDS = 20
UNITS = {"K": 1 << 10, "M": 1 << 20}


def number(text):
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def time_us(rows, columns, k):
    scores = torch.randn(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    out = torch.topk(scores, k, sorted=False)
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.topk(scores, k, sorted=False, out=out)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", required=True)
    parser.add_argument("--result-json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    rows = [{"shape": shape, "time_us": time_us(*map(number, shape.split("x")))} for shape in args.shapes.split(",")]
    for row in rows:
        print(f"{row['shape']:>20} {row['time_us']:10.1f} us")
    args.result_json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
