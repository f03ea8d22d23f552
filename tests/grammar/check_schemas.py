#!/usr/bin/env python3
"""Checks answers that are bound to JSON schemas by the package jsonschema (PyPI).

    pip install jsonschema rfc3339-validator fqdn
    check_schemas.py build/release/tests/schema_walks SUITE [walks]
    check_schemas.py http://localhost:8000 SUITE [samples]

SUITE is a copy of the JSON-Schema test suite: json/ of jsonschema's source distribution, or, without the newer drafts,
/usr/share/json-schema-test-suite of Debian's package. Every schema of drafts 7, 2019-09 and 2020-12 is answered, by
random walks or by a server (whose answers have 300 tokens at most), or refused by a line; every answer that is finished
has to be JSON and valid. Prints how many were answered, refused for which keyword, and wrong; exits 1 if any is.
"""
import collections
import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import jsonschema

DRAFTS = {
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


def schemas(suite):
    for draft, validator in DRAFTS.items():
        for path in sorted(glob.glob(os.path.join(suite, "**", draft, "**", "*.json"), recursive=True)):
            if "remotes" in path:
                continue
            for case in json.load(open(path)):
                yield "%s/%s: %s" % (draft, os.path.basename(path), case["description"]), case["schema"], validator


def walk(program, cases, walks):
    """The results of schema_walks."""
    lines = "".join(json.dumps({"json_schema": schema}) + "\n" for _, schema, _ in cases)
    ran = subprocess.run([program, walks], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.split("\n") if line]


def serve(url, cases, samples):
    """The same of a server: greedily, and at two temperatures."""

    def ask(number, schema):
        body = {"prompt": "Hello", "max_tokens": 300, "n": int(samples), "seed": number,
                "temperature": (0, 1, 1.5)[number % 3], "guided_json": json.dumps(schema)}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
        try:
            choices = json.load(urllib.request.urlopen(request, timeout=300))["choices"]
        except urllib.error.HTTPError as error:
            refusal = json.load(error)["error"]["message"]
            if error.code != 400:
                print("HTTP", error.code, refusal, json.dumps(schema)[:300])
                return {"answers": [], "defects": 1, "unfinished": 0}
            return {"refused": refusal.replace("guided_json: ", "", 1)}
        answers = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
        return {"answers": answers, "defects": 0, "unfinished": len(choices) - len(answers)}

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, range(len(cases)), [schema for _, schema, _ in cases]))


def main():
    source, suite = sys.argv[1:3]
    count = sys.argv[3] if len(sys.argv) > 3 else "8"
    cases = list(schemas(suite))
    results = (serve if source.startswith("http") else walk)(source, cases, count)
    assert len(results) == len(cases), "%d results of %d" % (len(results), len(cases))
    refused, answered, answers, wrong, unjudged, unfinished = collections.Counter(), 0, 0, 0, 0, 0
    for (name, schema, validator), result in zip(cases, results):
        if "refused" in result:
            refused[re.sub(r"^json_schema: (#\S*: )?", "", result["refused"])[:70]] += 1
            continue
        answered += 1
        wrong += result["defects"]
        unfinished += result["unfinished"]
        for answer in result["answers"]:
            answers += 1
            try:  # the package takes patterns as Python does, which knows neither \p nor \c
                validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(answer))
            except re.error:
                unjudged += 1
            except (ValueError, jsonschema.ValidationError) as error:
                wrong += 1
                print("WRONG", name, json.dumps(schema)[:300], "\n   ", answer[:200], "\n   ", str(error)[:100])
    for line, number in refused.most_common():
        print("%5d  %s" % (number, line))
    print("%d schemas: %d answered, %d answers (%d not judged), %d not finished; %d refused; %d wrong" %
          (len(cases), answered, answers, unjudged, unfinished, sum(refused.values()), wrong))
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
