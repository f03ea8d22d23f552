"""Dtypes and layouts of caches by name, also by those that other libraries have for them (cpattn/names.h)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ._library import call, lib


def _value(function: Any, name: str) -> int:
    value = ctypes.c_int()
    call(function, name.encode(), ctypes.byref(value))
    return value.value


@functools.cache
def dtype_of(name: str) -> int:
    """The number of a dtype. ValueError, or UnsupportedError for a format that is none of this library's."""
    return _value(lib.cpa_dtype_of_name, name)


@functools.cache
def layout_of(name: str) -> int:
    """The number of a layout. ValueError for no name of one."""
    return _value(lib.cpa_kv_layout_of_name, name)
