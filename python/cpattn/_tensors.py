"""What the operators need to know of a tensor: PyTorch's and NumPy's by their own attributes, which is fastest, and any
other by DLPack (https://dmlc.github.io/dlpack/latest/c_api.html)."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

from . import _declarations as c

HOST, CUDA = "host", "cuda"


class Tensor(NamedTuple):
    """Where a tensor lies and how. ``dtype`` names an element, such as ``"bf16"`` or ``"i32"``; strides count these."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    backend: str
    ordinal: int


class Place(NamedTuple):
    """A device: its back end and its number."""

    backend: str
    ordinal: int


THE_HOST = Place(HOST, 0)
DTYPES = {"fp32": c.CPA_F32, "bf16": c.CPA_BF16, "fp16": c.CPA_F16, "fp8_e4m3": c.CPA_FP8_E4M3,
          "fp8_e5m2": c.CPA_FP8_E5M2}
PLAIN_DTYPES = ("fp32", "bf16", "fp16")
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8_e4m3",
            "float8_e5m2": "fp8_e5m2", "int8": "i8",
            "uint8": "u8", "int32": "i32", "int64": "i64", "uint32": "u32", "bool": "bool"}
NAMES = {ours: name for name, ours in _ALIASES.items()}
_BY_TYPE = {(2, 32): "fp32", (2, 16): "fp16", (4, 16): "bf16", (10, 8): "fp8_e4m3", (12, 8): "fp8_e5m2",
            (0, 8): "i8", (1, 8): "u8", (0, 32): "i32", (0, 64): "i64", (1, 32): "u32", (6, 8): "bool"}

_torch: Any = None
_plain_tensor: Any = None  # its class, as that of a tensor that is nothing more
_torch_dtypes: dict[Any, str] = {}
_numpy_dtypes: dict[Any, str] = {}
_new = tuple.__new__  # of Tensor, in a third of the time

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def torch() -> Any:
    """PyTorch if the program has imported it, else None."""
    global _torch, _plain_tensor
    if _torch is None and hasattr(sys.modules.get("torch"), "Tensor"):
        _torch = sys.modules["torch"]
        _plain_tensor = _torch.Tensor
        _torch_dtypes.update({getattr(_torch, name): ours for name, ours in _ALIASES.items()})
    return _torch


def read(x: Any) -> Tensor:
    """Describes a tensor. TypeError for what is none, or one of a dtype or device that is not known here."""
    framework = _torch or torch()
    if framework is not None and isinstance(x, framework.Tensor):
        dtype = _torch_dtypes.get(x.dtype)
        if dtype is None:
            raise TypeError(f"cpattn: a tensor of {x.dtype}; expected one of {', '.join(_ALIASES)}")
        if x.is_cpu:
            return _new(Tensor, (x.data_ptr(), dtype, tuple(x.shape), x.stride(), HOST, 0))
        if x.is_cuda:
            return _new(Tensor, (x.data_ptr(), dtype, tuple(x.shape), x.stride(), CUDA, x.get_device()))
        raise TypeError(f"cpattn: a tensor on {x.device}; expected the CPU or CUDA")
    if hasattr(x, "__array_struct__"):
        return _read_array(x)
    if hasattr(x, "__dlpack__"):
        return _read_dlpack(x)
    raise TypeError(f"cpattn: a {type(x).__name__} in place of a tensor")


def read_on(place: Any, x: Any, what: str, *, written: bool = False) -> Tensor:
    """Describes a tensor that is to lie on the device ``place``, or where the tensor ``place`` does, and is ``written``
    to. ValueError for another."""
    t = read(x)
    if (t.backend, t.ordinal) != (place.backend, place.ordinal):
        raise ValueError(f"cpattn: {what} lies on {t.backend}:{t.ordinal}; expected {place.backend}:{place.ordinal}")
    if written:
        check_writable(x, what)
    return t


def check_writable(x: Any, what: str) -> None:
    """ValueError for an array that NumPy would not write to, or one of JAX, whose arrays never change."""
    if hasattr(x, "__array_struct__"):
        if not x.flags.writeable:
            raise ValueError(f"cpattn: {what} is read-only")
    elif type(x).__module__.startswith("jax"):
        raise ValueError(f"cpattn: {what} is an array of JAX, which is read-only; expected one of NumPy or PyTorch")


def signature(x: Any) -> tuple[int, tuple[Any, ...]]:
    """The address of a tensor, and what else there is to know of it: equal to that of another tensor of the same
    dtype, shape, strides and device, as writable. A cheaper ``read`` for calls that find what they have checked
    before."""
    if type(x) is _plain_tensor:
        return x.data_ptr(), (x.dtype, x.shape, x.stride(), x.get_device())
    if hasattr(x, "__array_struct__"):
        address, writable = _memory_of(x)
        return address, (x.dtype, x.shape, x.strides, writable)
    t = read(x)
    return t[0], (*t[1:], type(x))


def address_of(x: Any) -> int:
    """The address of a tensor that ``empty_like`` has made."""
    return x.data_ptr() if type(x) is _plain_tensor else read(x)[0]


class _ArrayInterface(ctypes.Structure):
    """The first fields of PyArrayInterface, NumPy's (https://numpy.org/doc/stable/reference/arrays.interface.html)."""

    _fields_ = [("two", ctypes.c_int), ("nd", ctypes.c_int), ("typekind", ctypes.c_char), ("itemsize", ctypes.c_int),
                ("flags", ctypes.c_int), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("data", ctypes.c_void_p)]


_WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE of its flags


def _memory_of(x: Any) -> tuple[int, int]:
    """The address of an array, and whether it may be written to: 0, or not 0."""
    capsule = x.__array_struct__  # which frees what it points to when it goes
    array = _ArrayInterface.from_address(_pointer(capsule, None))
    return array.data or 0, array.flags & _WRITEABLE


def _read_array(x: Any) -> Tensor:
    dtype, size = x.dtype, x.itemsize
    known = _numpy_dtypes.get(dtype)
    if known is None:
        known = _ALIASES.get(dtype.name) if dtype.isnative else None
        if known is None:
            raise TypeError(f"cpattn: an array of {dtype}; expected one of {', '.join(_ALIASES)}")
        _numpy_dtypes[dtype] = known
    return _new(Tensor, (_memory_of(x)[0], known, x.shape, tuple([s // size for s in x.strides]), HOST, 0))


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


def _read_dlpack(x: Any) -> Tensor:
    capsule = x.__dlpack__()  # which frees what it holds when it goes: x itself keeps the memory
    tensor = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    backend = {1: HOST, 2: CUDA, 3: HOST, 13: CUDA}.get(tensor.device_type)
    dtype = _BY_TYPE.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if backend is None or dtype is None:
        raise TypeError(f"cpattn: a tensor of DLPack's device type {tensor.device_type} and dtype ({tensor.code}, "
                        f"{tensor.bits} bits, {tensor.lanes} lanes); expected the host or CUDA, and a plain dtype")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:
        strides = contiguous(shape)
    ordinal = tensor.device_id if backend == CUDA else 0  # of pinned memory it is that of a GPU
    return Tensor((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, backend, ordinal)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def rows(t: Tensor, what: str, *inner: int) -> int:
    """The stride from row to row of a tensor [rows, *inner] whose rows are contiguous, one behind the other.
    ValueError for another."""
    shape, strides = t[2], t[3]
    if shape[1:] != inner or len(shape) != len(inner) + 1:
        raise ValueError(f"cpattn: {what} is {list(shape)}; expected [rows, {', '.join(map(str, inner))}]")
    step = 1
    for length, stride in zip(inner[::-1], strides[:0:-1]):
        if stride != step and length != 1:
            raise ValueError(f"cpattn: a row of {what} is not contiguous, strides {list(strides)} of {list(shape)}")
        step *= length
    if shape[0] > 1 and strides[0] < step:
        raise ValueError(f"cpattn: rows of {what} are {strides[0]} elements apart; expected {step} or more")
    return strides[0] if strides[0] > step else step


def heads(t: Tensor, what: str, count: int, dim: int) -> tuple[int, int]:
    """The strides from row to row and from head to head of a tensor [rows, count, dim] whose heads are contiguous, each
    by itself; that of heads is 0 where they lie one behind the other. ValueError for another tensor."""
    shape, strides = t[2], t[3]
    if shape[1:] != (count, dim) or len(shape) != 3:
        raise ValueError(f"cpattn: {what} is {list(shape)}; expected [rows, {count}, {dim}]")
    head = strides[1] if count > 1 else dim
    row = strides[0] if shape[0] > 1 else max(strides[0], count * dim)
    mixed = shape[0] > 1 and row < (count - 1) * head + dim and head < row + dim  # neither holds the other
    if (dim > 1 and strides[2] != 1) or head < dim or row < dim or mixed:
        raise ValueError(f"cpattn: {what} has strides {list(strides)} of {list(shape)}; expected contiguous heads that "
                         "do not overlap")
    return row, 0 if head == dim else head


def vector(x: Any, what: str, dtype: str, length: int | None = None, *, place: Any = None,
           written: bool = False) -> int:
    """The address of a contiguous tensor of one dtype, [length]; ``place`` and ``written`` as ``read_on`` has them."""
    t = read_on(place, x, what, written=written) if place is not None else read(x)
    count = math.prod(t.shape)
    holes = any(n > 1 and s != step for n, s, step in zip(t.shape, t.strides, contiguous(t.shape)))
    if t.dtype != dtype or (length is not None and count != length) or (count and holes):
        raise ValueError(f"cpattn: {what} is {t.dtype} {list(t.shape)}; expected {dtype}, contiguous"
                         + (f", {length} elements" if length is not None else ""))
    return t.address


def plain_dtype(t: Tensor, what: str) -> int:
    """The dtype of queries, keys, values and results."""
    if t.dtype not in PLAIN_DTYPES:
        raise ValueError(f"cpattn: {what} is {t.dtype}; expected fp32, bf16 or fp16")
    return DTYPES[t.dtype]


def empty_like(x: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """New memory of the kind of x; of `dtype`, such as "fp32", or that of x."""
    framework = torch()
    if framework is not None and isinstance(x, framework.Tensor):
        if dtype is None:
            return framework.empty_like(x) if x.shape == shape and x.is_contiguous() else x.new_empty(shape)
        return x.new_empty(shape, dtype=getattr(framework, NAMES[dtype]))
    module = sys.modules.get(type(x).__module__.partition(".")[0])
    if module is None or module.__name__ not in ("numpy", "cupy"):
        raise TypeError(f"cpattn: results for a {type(x).__module__}.{type(x).__name__} need a tensor that is given, "
                        "out=")
    return module.empty(shape, dtype=x.dtype if dtype is None else NAMES[dtype])
