#!/usr/bin/env python3
"""Writes the files *.safetensors beside this one: inputs, and what they must give, by float64 or byte for byte.

    python3 -m venv VENV && VENV/bin/pip install numpy
    VENV/bin/python tests/data/oracle/make_oracle.py [NAME...]

README.md says what every tensor is. These modules were written from papers and definitions alone: they share nothing
with the library, know no blocks, tiles, shards or threads, and check themselves where two ways lead to one result.

Each file is a list of cases. The tensors "ints" [cases, columns] and "floats" [cases, columns] hold what cases are made
of, the metadata name columns and cases, and the tensors of case i are called "i.NAME"; what cases share has no number.
"""
import sys

from formats import check_formats
from latents import expand, latent_attend, latent_write
from norms import rmsnorm
from rotary import rope_rows, rope_table
from routing import routing

FILES = (latent_write, latent_attend, expand, rope_table, rope_rows, rmsnorm, routing)

if __name__ == "__main__":
    check_formats()
    total = sum(make().write(make.__name__) for make in FILES if make.__name__ in sys.argv[1:] or len(sys.argv) == 1)
    print(f"{total:,} bytes")
