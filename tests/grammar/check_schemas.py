#!/usr/bin/env python3
"""Checks the answers of schema_walks by the package jsonschema (PyPI).

    pip install jsonschema rfc3339-validator fqdn
    check_schemas.py build/release/tests/schema_walks SUITE [walks]

SUITE is a copy of the JSON-Schema test suite: json/ of jsonschema's source distribution, or, without the newer drafts,
/usr/share/json-schema-test-suite of Debian's package. Every schema of drafts 7, 2019-09 and 2020-12 is walked, or refused
by a line; every answer has to be JSON and valid. Prints how many were walked, refused for which keyword, and wrong; exits 1 if any is.
"""
import collections
import glob
import json
import os
import re
import subprocess
import sys

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


def main():
    program, suite = sys.argv[1:3]
    walks = sys.argv[3] if len(sys.argv) > 3 else "8"
    cases = list(schemas(suite))
    lines = "".join(json.dumps({"json_schema": schema}) + "\n" for _, schema, _ in cases)
    ran = subprocess.run([program, walks], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    results = [json.loads(line) for line in ran.stdout.split("\n") if line]
    assert len(results) == len(cases), "%d results of %d" % (len(results), len(cases))
    refused, walked, answers, wrong, unjudged, unfinished = collections.Counter(), 0, 0, 0, 0, 0
    for (name, schema, validator), result in zip(cases, results):
        if "refused" in result:
            refused[re.sub(r"^json_schema: (#\S*: )?", "", result["refused"])[:70]] += 1
            continue
        walked += 1
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
    for line, count in refused.most_common():
        print("%5d  %s" % (count, line))
    print("%d schemas: %d walked with %d answers (%d not judged, %d walks unfinished), %d refused, %d wrong" %
          (len(cases), walked, answers, unjudged, unfinished, sum(refused.values()), wrong))
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
