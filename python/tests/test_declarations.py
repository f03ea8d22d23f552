"""What declarations.py makes of the headers is what a compiler makes of them."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cpattn import _declarations as c

INCLUDE = Path(__file__).resolve().parents[2] / "include"
STRUCTS = [s for s in vars(c).values()
           if isinstance(s, type) and issubclass(s, ctypes.Structure) and s is not ctypes.Structure]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_structs_have_the_compilers_layout(tmp_path):
    lines = []
    for struct in STRUCTS:
        lines.append(f'printf("{struct.__name__} %zu\\n", sizeof({struct.__name__}));')
        for name, _ in struct._fields_:
            lines.append(f'printf("{struct.__name__}.{name} %zu\\n", offsetof({struct.__name__}, {name}));')
    source = tmp_path / "layout.c"
    headers = ("cpattn/cpattn.h", "cpattn/llm.h", "stddef.h", "stdio.h")
    source.write_text("".join(f"#include <{header}>\n" for header in headers)
                      + "int main(void) {" + "\n".join(lines) + "return 0; }\n")
    program = str(tmp_path / "layout")
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", f"-I{INCLUDE}", str(source), "-o", program], check=True)
    compiled = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
    ours = []
    for struct in STRUCTS:
        ours.append(f"{struct.__name__} {ctypes.sizeof(struct)}")
        ours += [f"{struct.__name__}.{name} {getattr(struct, name).offset}" for name, _ in struct._fields_]
    assert ours == compiled[:-1]
    assert len(STRUCTS) > 60


def test_constants_are_those_of_the_enums():
    assert (c.CPA_OK, c.CPA_BUSY, c.CPA_FP8_E4M3, c.CPA_VLLM_X, c.CPA_HIGHEST_EXPONENT) == (0, 10, 3, 2, 1 << 27)
