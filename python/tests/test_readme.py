"""What README.md shows runs."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_operators():
    section = README.read_text().split("## Operators")[1].split("\n## ")[0]
    names = {}
    for code, rows in zip(re.findall(r"```python\n(.*?)```", section, re.S), (4, 100), strict=True):
        exec(code, names)
        assert names["out"].shape == (rows, 8, 128) and abs(names["out"]).max() > 0
