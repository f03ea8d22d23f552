#!/usr/bin/env python3
"""How many questions about a long prompt are answered rightly with each lossy option, beside none.

    accuracy.py [--program PROGRAM] [--model-dir DIR] [--lengths N,...] [--prompts N] [--options NAME...] [--check]

PROGRAM is cp_attn. Without a folder the model is tests/data/retrieval, with two sets of prompts: needles in a haystack,
and the same with needles in whose block sums along antidiagonals cancel, which XAttention has to lose. A folder with a
tokenizer is asked for numbers in English sentences. For each option and length a server answers; a line has

    right      share of right answers, of plain needles and of cancelled ones
    error      mean distance of the right answer's log-probability from the one without options; where it is not among
               the 20 best, it counts as the last of these (a folder with a tokenizer: of the first token's)
    attended   share of the blocks of keys that prompts attend, or of the tiles that are not left out
    left out   mean and largest mass of a softmax that blocks left out have, of the rows that --verify samples

--check fails unless all answers without options are right, as are those over caches of 8 bits, and XAttention at 0.9 loses
most cancelled needles and keeps most plain ones.
"""
import argparse
import json
import random
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data" / "retrieval"
sys.path.insert(0, str(DATA))
import prompts  # noqa: E402  (of the retrieval model)

# Every lossy option. What the program does not have is told, and left out.
OPTIONS = {
    "none": [],
    "fp8_e4m3": ["--kv-cache-dtype", "fp8_e4m3"],
    "fp8_e5m2": ["--kv-cache-dtype", "fp8_e5m2"],
    "int8": ["--kv-cache-dtype", "int8"],
    "tq_k8v4": ["--kv-cache-dtype", "tq_k8v4"],
    "tq_4bit": ["--kv-cache-dtype", "tq_4bit"],
    "tq_k3v4": ["--kv-cache-dtype", "tq_k3v4"],
    "tq_3bit": ["--kv-cache-dtype", "tq_3bit"],
    "tq_3bit, not layer 0": ["--kv-cache-dtype", "tq_3bit", "--kv-cache-dtype-skip-layers", "0"],
    "tq_3bit, not layer 1": ["--kv-cache-dtype", "tq_3bit", "--kv-cache-dtype-skip-layers", "1"],
    "tq_3bit, first 64": ["--kv-cache-dtype", "tq_3bit", "--precise-first-tokens", "64"],
    "xattn:0.9": ["--sparse", "xattn:0.9"],
    "xattn:0.9,16": ["--sparse", "xattn:0.9,16"],
    "xattn:0.99": ["--sparse", "xattn:0.99"],
    "skip-tiles": ["--skip-tiles", "8"],
}
TOP = 20
HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORDS = ["apple", "river", "stone", "garden", "window", "music", "paper", "silver", "forest", "candle"]


class Server:
    """cp_attn serve with some options, for the time of a `with`."""

    def __init__(self, program, folder, options):
        self.command = [program, "serve", "--model-dir", str(folder), "--port", "0", "--skip-self-test", *options]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = ""
        for line in self.process.stdout:
            said += line
            address = re.search(r"(\S+) on (http://\S+)", line)
            if address:
                self.name, self.url = address.groups()
                return self
        self.process.wait()
        raise RuntimeError(said.strip())

    def post(self, path, fields):
        body = json.dumps({"model": self.name, **fields}).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def answer(self, prompt, tokens):
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP,
                                             "return_token_ids": True})["choices"][0]

    def report(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate()[0]

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def logprob(choice, token):
    best = choice["logprobs"]["top_logprobs"][0]
    return best.get(token, min(best.values()))


def ask_ids(server, length, seed, cancelled):
    """Whether the answer is right, and its log-probability."""
    ids, right = prompts.prompt(seed, length, cancelled=cancelled)
    choice = server.answer(ids, 1)
    return choice["token_ids"] == [right], logprob(choice, f"token_id:{right}")


def ask_text(server, length, seed, _cancelled):
    """The same of a text of about `length` tokens."""
    rng = random.Random(f"{seed} {length}")
    numbers = {word: str(rng.randrange(1000, 10000)) for word in WORDS}
    asked = rng.choice(WORDS)
    unit = len(server.post("/tokenize", {"prompt": HAY})["tokens"])
    lines = [HAY] * max(1, length // unit)
    for word, number in numbers.items():
        lines.insert(rng.randrange(len(lines)), f"The number of {word} is {number}.")
    choice = server.answer("\n".join(lines) + f"\nThe number of {asked} is", 8)
    return choice["text"].strip().startswith(numbers[asked]), choice["logprobs"]["token_logprobs"][0]


def measure(args, name, length, ask):
    """Answers of each set, and what the server reports of blocks."""
    sparse = name.startswith("xattn")
    options = [*OPTIONS[name], "--verify", "0.01" if sparse else "0"]
    with Server(args.program, args.model_dir, options) as server:
        answers = {cancelled: [ask(server, length, seed, cancelled) for seed in range(args.prompts)]
                   for cancelled in args.sets}
        report = server.report()
    attended = re.search(r"attend (\S+) of the blocks", report)
    skipped = re.search(r"(\S+) of \d+ tiles of keys are left out", report)
    left_out = re.search(r"leave out (\S+) of their softmax on average, (\S+) at most", report)
    share = f"{1 - float(skipped[1]):.3g}" if skipped else attended and attended[1]
    return answers, share, left_out and f"{left_out[1]}, {left_out[2]}"


def rate(answers):
    return sum(right for right, _ in answers) / len(answers)


def line(name, length, measured, dense):
    answers, attended, left_out = measured
    moved = [abs(a[1] - b[1]) for cancelled in answers for a, b in zip(answers[cancelled], dense[0][cancelled])]
    right = [f"{100 * rate(answers[cancelled]):.0f}%" if cancelled in answers else "" for cancelled in (False, True)]
    cells = [name, str(length), *right, f"{sum(moved) / len(moved):.2g}", attended or "", left_out or ""]
    return "| " + " | ".join(cells) + " |"


def check(results):
    """What is wrong with results, by option and length."""
    wrong = []
    for (name, length), (answers, _, _) in results.items():
        plain, cancelled = rate(answers[False]), rate(answers[True])
        if name in ("none", "fp8_e4m3", "fp8_e5m2", "int8") and (plain < 1 or cancelled < 1):
            wrong.append(f"{name}, {length} tokens: found {plain:.2f} and {cancelled:.2f} right, expected all")
        if name == "xattn:0.9" and (plain < 0.5 or cancelled > 0.5):
            wrong.append(f"{name}, {length} tokens: found {plain:.2f} and {cancelled:.2f} right, expected at least "
                         "half of plain needles, at most half of cancelled ones")
    return wrong


def absent(program):
    """Names of options that the program does not know."""
    known = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    return [name for name, words in OPTIONS.items()
            if any(word not in known for word in words if word.startswith(("--", "tq_")))]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="cp_attn")
    parser.add_argument("--model-dir", type=Path, default=DATA)
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS), metavar="NAME")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    args.is_text = any((args.model_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    if args.check and args.is_text:
        parser.error("--check: found a folder with a tokenizer, expected the retrieval model")
    args.sets = (False,) if args.is_text else (False, True)
    return args


def main():
    args, results = parse(), {}
    missing = absent(args.program)
    for name in args.options:
        if name in missing:
            print(f"{name}: {args.program} does not have {' '.join(OPTIONS[name])}")
    print("| option | tokens | right | right, cancelled | error | attended | left out: mean, largest |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for length in map(int, args.lengths.split(",")):
        dense = measure(args, "none", length, ask_text if args.is_text else ask_ids)
        for name in args.options:
            if name in missing:
                continue
            same = name == "none"
            measured = dense if same else measure(args, name, length, ask_text if args.is_text else ask_ids)
            results[name, length] = measured
            print(line(name, length, measured, dense), flush=True)
    wrong = check(results) if args.check else []
    print("".join(f"wrong: {text}\n" for text in wrong), end="")
    return 1 if wrong else 0


try:
    sys.exit(main())
except RuntimeError as why:  # what a server has said instead of where it serves
    sys.exit(f"accuracy.py: {why}")
