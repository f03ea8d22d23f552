"""Whether an installed package, with nothing beside it, computes, and loads the libraries that it holds from itself."""

import pathlib
import sys

import cpattn

package = pathlib.Path(cpattn.__file__).parent
plan = cpattn.AttendPlan(q_heads=8, kv_heads=2, k_dim=128, block_size=16)
plan.set(query_lens=[4], seq_lens=[100], block_tables=[range(7)])
if (package / "libcpattn_llm.so").exists():
    cpattn.Engine  # which loads it

held = {file.name for file in package.glob("*.so*")}
loaded = {pathlib.Path(line.split(maxsplit=5)[5].strip()) for line in open("/proc/self/maps") if "/" in line}
wrong = [f"{file} is loaded, expected that of {package}" for file in loaded if file.name in held and file.parent != package]
wrong += [f"{package / name} is not loaded" for name in held - {file.name for file in loaded}]
sys.exit("\n".join(wrong) or None)
