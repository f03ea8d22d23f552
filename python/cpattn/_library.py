"""The shared library: how it is loaded and called, and its errors as exceptions."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from . import _declarations as c


class Error(RuntimeError):
    """A call of the library failed; the text is its line: what, where, what was found and what is expected.

    ``status`` is the library's name of what kind of failure it is, such as ``"invalid"``.
    """

    status = "internal"

    def __init__(self, message: str, status: str | None = None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InvalidError(Error, ValueError):
    """An argument is wrong; nothing was changed."""

    status = "invalid"


class UnsupportedError(Error, NotImplementedError):
    """The arguments are valid, but this back end cannot do it."""

    status = "unsupported"


class OutOfMemoryError(Error, MemoryError):
    """Host or device memory ran out."""

    status = "no memory"


class CommunicationError(Error, ConnectionError):
    """A transport or another rank failed."""

    status = "comm"


_ERRORS: dict[int, type[Error]] = {
    c.CPA_INVALID: InvalidError,
    c.CPA_UNSUPPORTED: UnsupportedError,
    c.CPA_NO_MEMORY: OutOfMemoryError,
    c.CPA_COMM: CommunicationError,
}


def _load(file: str, functions: list[Any]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(__file__).with_name(file)))
    for name, result, arguments in functions:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


lib = _load("libcpattn.so", c.FUNCTIONS)


def load_beside(what: str, file: str, functions: list[Any]) -> ctypes.CDLL:
    """A library that stands on more than this one, for ``what``. ImportError, with one line, where it cannot be had."""
    if not Path(__file__).with_name(file).exists():
        raise ImportError(f"{what}: this package was built without {file}, for want of the packages that it stands on")
    try:
        return _load(file, functions)
    except OSError as error:
        raise ImportError(f"{what}: {error}") from None


def raise_status(status: int, message: bytes | None) -> None:
    """Raises the exception of a status that is not CPA_OK."""
    name = lib.cpa_status_name(status).decode()
    text = (message or b"").decode(errors="replace") or name
    kind = _ERRORS.get(status, Error)
    raise kind(text, name)


def create(function: Any, *arguments: Any, out: ctypes.c_void_p | None = None) -> ctypes.c_void_p:
    """Calls a function whose last arguments are ``T **out, cpa_error *err``; what it made.

    In the caller's ``out`` that stands even where an exception such as KeyboardInterrupt comes right behind the call.
    """
    out = ctypes.c_void_p() if out is None else out
    err = c.cpa_error()
    status = function(*arguments, ctypes.byref(out), ctypes.byref(err))
    if status:
        raise_status(status, err.message)
    return out


def call(function: Any, *arguments: Any) -> None:
    """Calls a function whose last argument is ``cpa_error *err``."""
    err = c.cpa_error()
    status = function(*arguments, ctypes.byref(err))
    if status:
        raise_status(status, err.message)


def sized(struct: Any, **fields: Any) -> Any:
    """A struct that begins with its size. ValueError for an integer that does not fit, which ctypes would wrap."""
    made = struct(ctypes.sizeof(struct), **fields)
    for name, value in fields.items():
        if type(value) is int and (getattr(made, name) or 0) != value:
            kind = dict(struct._fields_)[name].__name__
            raise ValueError(f"cpattn: {name} is {value}; expected what {kind} holds")
    return made


def integers(kind: Any, values: Any, what: str) -> Any:
    """An array of C's integers. ValueError for one that does not fit, which ctypes would wrap."""
    if hasattr(values, "tolist"):  # of an array or a tensor
        values = values.tolist()
    values = values if isinstance(values, (list, range)) else list(values)
    least, most = kind(-1).value, 1 << 8 * ctypes.sizeof(kind)
    least, most = (0, most) if least > 0 else (-most // 2, most // 2)
    if values and not (least <= min(values) and max(values) < most):
        raise ValueError(f"cpattn: {what} are {min(values)} to {max(values)}; expected what {kind.__name__} holds")
    return (kind * len(values))(*values)


def version() -> str:
    """The version of the library, ``"major.minor.patch"``."""
    return lib.cpa_version().decode()
