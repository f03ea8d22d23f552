"""What took the time of a run, from the file of --timeline: the spans of each rank that took most of it.

    python3 docs/guide/examples/time_by_span.py timeline.json [ROWS]

Spans of one row do not overlap, so the shares of compute of a rank add up to at most 100%.
"""
import collections
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    events = json.load(file)
rows = int(sys.argv[2]) if len(sys.argv) > 2 else 5

processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
spans = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
begin = min(event["ts"] for event in spans)
length = max(event["ts"] + event["dur"] for event in spans) - begin

taken = collections.defaultdict(collections.Counter)
for event in spans:
    name = event["name"].rstrip("0123456789 ")  # the number is the round of an exchange
    taken[event["pid"]][name] += event["dur"]

for pid in sorted(taken):
    print(f"{processes[pid]}, of {length / 1e3:.1f} ms")
    for name, time in taken[pid].most_common(rows):
        print(f"  {name:16} {time / 1e3:10.1f} ms {100 * time / length:6.1f} %")
