"""Writes what an installation tells of the package beside its files: its name, version and entry points.

    entry_points.py PYPROJECT FOLDER
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
folder = Path(sys.argv[2]) / f"{project['name']}-{project['version']}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = project["entry-points"].items()
(folder / "entry_points.txt").write_text("".join(
    f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) for group, entries in groups))
