"""What README.md shows runs."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_operators():
    section = README.read_text().split("## Operators")[1].split("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.S).group(1)
    names = {}
    exec(code, names)
    assert names["out"].shape == (4, 8, 128) and abs(names["out"]).max() > 0
