"""Number formats, and the files that the other modules fill with cases."""
import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FP32, FP16, BF16 = 0, 1, 2  # columns that hold a dtype
E4M3_MAX = np.float32(448)
FLT_MIN = np.finfo(np.float32).tiny


class Tensor:
    """Elements as they are stored, and the name that safetensors has for their type."""

    def __init__(self, tag, raw):
        self.tag, self.raw = tag, np.ascontiguousarray(raw)

    @property
    def values(self):
        """float64, exact."""
        if self.tag == "BF16":
            return (self.raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.raw.astype(np.float64)

    def bytes(self):
        return self.raw.view(np.uint8).reshape(*self.raw.shape[:-1], -1)


def round_to(dtype, x):
    """x rounded to fp32 (a no-op for what is in fp32), then to dtype: to nearest, ties to even."""
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(np.float32)
        if dtype == FP32:
            return Tensor("F32", x)
        if dtype == FP16:
            return Tensor("F16", x.astype(np.float16))
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return Tensor("BF16", np.where(np.isnan(x), np.uint16(0x7FC0), rounded))


def e4m3_values():
    """Magnitudes of codes 0 .. 0x7E: bias 7, 3 bits of mantissa, subnormal step 2^-9; 0x7F would be NaN."""
    code = np.arange(0x7F)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def to_e4m3(x):
    """Codes of fp32 x: nearest, ties to the even code, beyond 448 and infinite: 448, NaN: 0. The sign of zero stays."""
    x, table = np.asarray(x, np.float32).astype(np.float64), e4m3_values()
    magnitude = np.minimum(np.nan_to_num(np.abs(x), nan=0, posinf=448), 448)
    above = np.searchsorted(table, magnitude).clip(1)
    low, high = table[above - 1], table[above]
    middle = (low + high) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    return np.where(np.signbit(x) & ~np.isnan(x), code | 0x80, code).astype(np.uint8)


def from_e4m3(code):
    """float32, exact."""
    return np.where(code & 0x80, -1, 1).astype(np.float32) * e4m3_values()[code & 0x7F].astype(np.float32)


def finite_absmax(x):
    """Greatest finite magnitude of each last axis, 0 if there is none."""
    return np.max(np.where(np.isfinite(x), np.abs(x), np.float32(0)), axis=-1)


def power_of_two_above(ratio):
    """2^ceil(log2 ratio), exact: the exponent of a UE8M0 scale (Open Compute Project, Microscaling Formats, 2023)."""
    mantissa, exponent = np.frexp(ratio.astype(np.float64))
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)


def check_formats():
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    assert (to_e4m3(from_e4m3(codes)) == codes).all()
    x = np.random.default_rng(1).standard_normal((200, 22)) * 2.0 ** np.arange(-12, 10)
    x = x.ravel().astype(np.float32).clip(-448, 448).astype(np.float64)
    assert (np.abs(from_e4m3(to_e4m3(x)) - x) == np.abs(x[:, None] - from_e4m3(codes)).min(1)).all()
    ties = {1.0625: 1.0, 1.1875: 1.25, 2.0**-10: 0, 3 * 2.0**-10: 2.0**-8, 432: 448, 416: 416, 464: 448, np.inf: 448}
    assert all(from_e4m3(to_e4m3(x)) == y and from_e4m3(to_e4m3(-x)) == -y for x, y in ties.items())
    assert round_to(BF16, [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38]).values.tolist() == [1, 1 + 2**-6, np.inf]
    assert power_of_two_above(np.float32([1, 1.0000001, 0.75, 2.0**-20])).tolist() == [1, 2, 1, 2.0**-20]


class File:
    """Cases of one subject; make_oracle.py says how they lie in the file."""

    def __init__(self, about, ints, floats):
        self.about, self.ints, self.floats = about, ints.split(), floats.split()
        self.names, self.rows, self.tensors = [], [], {}

    def case(self, name, numbers, tensors):
        unknown = set(numbers) - set(self.ints) - set(self.floats)
        assert not unknown, unknown
        self.tensors.update({f"{len(self.names)}.{key}": value for key, value in tensors.items()})
        self.names.append(name)
        self.rows.append(numbers)

    def share(self, name, tensor):
        """A tensor that several cases read."""
        self.tensors[name] = tensor

    def table(self, columns, dtype):
        return np.array([[row.get(column, 0) for column in columns] for row in self.rows], dtype)

    def write(self, name):
        tags = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8"}
        tensors = {**self.tensors, "ints": self.table(self.ints, np.int32),
                   "floats": self.table(self.floats, np.float64)}
        tensors = {key: value if isinstance(value, Tensor) else Tensor(tags[str(value.dtype)], value)
                   for key, value in tensors.items()}
        header, data, offset = {"__metadata__": {
            "about": self.about, "ints": " ".join(self.ints), "floats": " ".join(self.floats),
            "names": json.dumps(self.names)}}, [], 0
        # The widest elements first: every tensor is aligned.
        for key in sorted(tensors, key=lambda key: (-tensors[key].raw.itemsize, key)):
            tensor = tensors[key]
            data.append(tensor.raw.astype(tensor.raw.dtype.newbyteorder("<")).tobytes())
            header[key] = {"dtype": tensor.tag, "shape": list(tensor.raw.shape),
                           "data_offsets": [offset, offset + len(data[-1])]}
            offset += len(data[-1])
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = HERE / f"{name}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
        print(f"{path.name}: {len(self.names)} cases, {path.stat().st_size:,} bytes")
        return path.stat().st_size


def peaky(rng, *shape, spread=1.0):
    """Normal numbers with outliers: one in eight is four times as large."""
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 1 / 8, 4, 1) * spread
