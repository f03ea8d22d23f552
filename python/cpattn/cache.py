"""The paged cache of one layer, over memory of the caller."""

from __future__ import annotations

from typing import Any

from . import _declarations as c
from ._device import Device, device_of
from ._library import lib
from ._names import dtype_of, layout_of
from ._tensors import DTYPES, Tensor, read, read_on, vector


class PagedCache:
    """A view of pools of key and value blocks. It keeps the tensors alive, and copies nothing.

    Plain caches: ``k`` is ``[num_blocks, block_size, kv_heads, k_dim]``, or with ``layout="head-major"``
    ``[num_blocks, kv_heads, block_size, k_dim]``, in fp32, bf16 or fp16, or in fp8_e4m3 or fp8_e5m2 with one ``k_scale`` and one
    ``v_scale`` for all keys and values; ``v`` alike with its own width. Any strides but that of the last dimension.

    Latents (multi-head latent attention): ``v=None`` and ``v_dim``; the value of a key is its first ``v_dim`` elements.

    Pools of other forms, with scales of rows or in vLLM's order, are bytes: see ``of_bytes``.
    """

    def __init__(self, k: Any, v: Any = None, *, v_dim: int | None = None, layout: str = "token-major",
                 k_scale: float = 0.0, v_scale: float = 0.0):
        order = layout_of(layout)
        if order == c.CPA_VLLM_X:
            raise ValueError(f"cpattn: layout {layout!r} of a plain cache; expected 'token-major' or 'head-major'")
        keys = read(k)
        values = read(v) if v is not None else None
        token, head = (1, 2) if order == c.CPA_TOKEN_MAJOR else (2, 1)
        self._check_plain(keys, values, v_dim, token, head, k_scale, v_scale)
        self.view = c.cpa_kv_view(
            k=keys.address, v=values.address if values else None, dtype=DTYPES[keys.dtype],
            block_size=keys.shape[token], num_blocks=keys.shape[0], kv_heads=keys.shape[head], k_dim=keys.shape[3],
            v_dim=values.shape[3] if values else v_dim, k_block_stride=keys.strides[0],
            k_token_stride=keys.strides[token], k_head_stride=keys.strides[head],
            v_block_stride=values.strides[0] if values else 0, v_token_stride=values.strides[token] if values else 0,
            v_head_stride=values.strides[head] if values else 0, k_scale=k_scale, v_scale=v_scale,
            layout=order, v_in_k=int(values is None))
        self._keep(k, v, keys)

    @staticmethod
    def _check_plain(keys: Tensor, values: Tensor | None, v_dim: int | None, token: int, head: int, k_scale: float,
                     v_scale: float) -> None:
        for name, t in (("k", keys), ("v", values)):
            if t is None:
                continue
            if len(t.shape) != 4 or (t.shape[3] > 1 and t.strides[3] != 1):
                raise ValueError(f"cpattn: {name} of a cache is {list(t.shape)} with strides {list(t.strides)}; "
                                 "expected 4 dimensions, the last contiguous")
            if t.dtype not in DTYPES:
                raise ValueError(f"cpattn: {name} of a cache is {t.dtype}; expected one of {', '.join(DTYPES)}")
        if (values is None) == (v_dim is None):
            raise ValueError("cpattn: a cache has either v, or v_dim for latents, whose values lie in their keys")
        if values is not None and (values.dtype != keys.dtype or values.shape[:3] != keys.shape[:3]
                                   or values[4:] != keys[4:]):
            raise ValueError(f"cpattn: k is {keys.dtype} {list(keys.shape)}, v {values.dtype} {list(values.shape)}; "
                             "expected the same but for the last dimension, on one device")
        if keys.dtype.startswith("fp8") and not (k_scale > 0 and (v_scale > 0 or values is None)):
            raise ValueError("cpattn: a cache of fp8 elements needs k_scale and v_scale; with scales of rows it is "
                             "PagedCache.of_bytes")

    @classmethod
    def of_bytes(cls, k: Any, v: Any = None, *, dtype: str, block_size: int, kv_heads: int, k_dim: int, v_dim: int,
                 layout: str = "token-major", k_scale: float = 0.0, v_scale: float = 0.0, k_scales: Any = None,
                 v_scales: Any = None) -> PagedCache:
        """A cache over bytes: ``k`` and ``v`` are uint8 ``[num_blocks, block_bytes]`` with the ``block_bytes`` of
        the module or more. ``v=None``: latents. ``k_scales``, ``v_scales``: fp32 ``[1]`` or ``[kv_heads]`` on the
        device, for fp8_e4m3 and fp8_e5m2."""
        scaled = k_scales is not None
        n_scales = read(k_scales).shape[0] if scaled else 0
        strides = []
        for name, x, dim, scale in (("k", k, k_dim, k_scale), ("v", v, v_dim, v_scale)):
            if x is None:
                strides.append(0)
                continue
            t = read(x)
            least = block_bytes(dtype, block_size, kv_heads, dim, part=name, tensor_scale=scaled or scale != 0)
            if t.dtype != "u8" or len(t.shape) != 2 or t.strides[1] != 1 or t.shape[1] < least:
                raise ValueError(f"cpattn: {name} of a cache is {t.dtype} {list(t.shape)}; expected u8 [num_blocks, "
                                 f"{least} or more]")
            strides.append(t.strides[0] // _element_bytes(dtype))
        keys = read(k)
        if v is not None and read_on(keys, v, "v").shape[0] != keys.shape[0]:
            raise ValueError(f"cpattn: {keys.shape[0]} blocks of k and {read(v).shape[0]} of v")
        self = cls.__new__(cls)
        self.view = c.cpa_kv_view(
            k=keys.address, v=read(v).address if v is not None else None, dtype=dtype_of(dtype), block_size=block_size,
            num_blocks=keys.shape[0], kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, k_block_stride=strides[0],
            v_block_stride=strides[1], k_scale=k_scale, v_scale=v_scale, layout=layout_of(layout), n_scales=n_scales,
            k_scales=vector(k_scales, "k_scales", "fp32", place=keys) if scaled else None,
            v_scales=(vector(v_scales, "v_scales", "fp32", n_scales, place=keys)
                      if scaled and v_scales is not None else None),
            v_in_k=int(v is None))
        self._keep(k, v, keys, k_scales, v_scales)
        return self

    def _keep(self, k: Any, v: Any, keys: Tensor, *others: Any) -> None:
        self.k, self.v = k, v
        self._others = others
        self.device: Device = device_of(keys)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.view.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.view.num_blocks

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.view.kv_heads

    @property
    def k_dim(self) -> int:
        """Width of a key head."""
        return self.view.k_dim

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.view.v_dim


def _element_bytes(dtype: str) -> int:
    return lib.cpa_dtype_bytes(dtype_of(dtype))


def block_bytes(dtype: str, block_size: int, kv_heads: int, dim: int, *, part: str = "k",
                tensor_scale: bool = False) -> int:
    """Bytes of a block of keys (``part="k"``) or values, the scales of its rows included unless all have one."""
    side = c.CPA_KEYS if part == "k" else c.CPA_VALUES
    return lib.cpa_kv_block_bytes(dtype_of(dtype), side, float(tensor_scale), block_size, kv_heads, dim)


__all__ = ["PagedCache", "block_bytes"]
