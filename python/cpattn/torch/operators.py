"""The operators of ``torch.ops.cpattn``."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch

from .. import ops
from .._rows import strides_like
from ..cache import PagedCache
from ..plan import AttendPlan, plan_numbered
from ..varlen import VarlenPlan

_library = torch.library.Library("cpattn", "DEF")


def _operator(schema: str, fake: Any) -> Any:
    """Registers a function as the operator of the schema, on the host and on CUDA; what calls it."""
    name = schema.partition("(")[0]

    def register(function: Any) -> Any:
        _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, function, key)
        torch.library.register_fake(f"cpattn::{name}", fake, lib=_library)
        return getattr(torch.ops.cpattn, name).default

    return register


class _View(NamedTuple):
    """The view of two pools, and by what it is known again: the tensors themselves, which it does not keep alive, their
    memory, their shapes, and what else was said of them."""

    k: Any
    v: Any
    known: tuple[Any, ...]
    cache: PagedCache


_views: dict[int, _View] = {}  # by the id of k
_MOST_VIEWS = 4096  # layers of the caches of a process, far more than there are


def _cache(k: torch.Tensor, v: torch.Tensor, layout: str, k_scale: float, v_scale: float) -> PagedCache:
    """The view of pools, which is made once for the same tensors."""
    found = _views.get(id(k))
    known = (k.data_ptr(), v.data_ptr(), k.shape, v.shape, layout, k_scale, v_scale)
    if found is not None:
        of_k, of_v, before, cache = found
        if before == known and of_k() is k and of_v() is v:
            return cache
    if len(_views) >= _MOST_VIEWS:
        _views.clear()
    cache = PagedCache(k, v, layout=layout, k_scale=k_scale, v_scale=v_scale)
    cache.k = cache.v = None
    _views[id(k)] = _View(weakref.ref(k), weakref.ref(v), known, cache)
    return cache


def _rules(softcap: float, alibi_slopes: Any, sink_logits: Any) -> ops.ScoreRules | None:
    if not softcap and alibi_slopes is None and sink_logits is None:
        return None
    return ops.ScoreRules(softcap=softcap, alibi_slopes=alibi_slopes, sink_logits=sink_logits)


@_operator("kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, "
           "str layout='token-major', float k_scale=0.0, float v_scale=0.0) -> ()", lambda *_, **__: None)
def _kv_write(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *, layout: str = "token-major",
              k_scale: float = 0.0, v_scale: float = 0.0) -> None:
    ops.kv_write(_cache(k_cache, v_cache, layout, k_scale, v_scale), k, v, slot_mapping)


_ATTEND = ("(Tensor q, Tensor k_cache, Tensor v_cache, int plan, *, str layout='token-major', bool causal=True, "
           "int window=0, int sinks=0, float scale=0.0, float softcap=0.0, Tensor? alibi_slopes=None, "
           "Tensor? sink_logits=None, float k_scale=0.0, float v_scale=0.0) -> ")


def _fake_result(q: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """What an attend of q gives, of this width: rows, or [sequences, heads, tokens, dim] as q lies."""
    shape = (*q.shape[:-1], dim)
    if q.dim() != 4:
        return q.new_empty(shape, dtype=dtype)
    return q.new_empty_strided(shape, strides_like(q.shape, q.stride(), dim), dtype=dtype)


def _fake_attend(q: Any, k_cache: Any, v_cache: Any, plan: int, **_: Any) -> Any:
    return _fake_result(q, v_cache.shape[3], q.dtype)


def _fake_attend_with_lse(q: Any, k_cache: Any, v_cache: Any, plan: int, **_: Any) -> Any:
    return _fake_attend(q, k_cache, v_cache, plan), _fake_result(q, 1, torch.float32)[..., 0]


def _run_attend(lse: Any, q: Any, k_cache: Any, v_cache: Any, plan: int, *, layout: str = "token-major",
                causal: bool = True, window: int = 0, sinks: int = 0, scale: float = 0.0, softcap: float = 0.0,
                alibi_slopes: Any = None, sink_logits: Any = None, k_scale: float = 0.0, v_scale: float = 0.0) -> Any:
    cache = _cache(k_cache, v_cache, layout, k_scale, v_scale)
    return ops.attend(plan_numbered(plan, AttendPlan), q, cache, lse=lse, causal=causal, window=window, sinks=sinks,
                      scale=scale, rules=_rules(softcap, alibi_slopes, sink_logits))


_attend = _operator("attend" + _ATTEND + "Tensor", _fake_attend)(functools.partial(_run_attend, None))
_attend_with_lse = _operator("attend_with_lse" + _ATTEND + "(Tensor, Tensor)", _fake_attend_with_lse)(
    functools.partial(_run_attend, True))


_VARLEN = ("(Tensor q, Tensor k, Tensor v, int plan, *, bool causal=False, int left=0, int right=0, float scale=0.0, "
           "float softcap=0.0) -> ")


def _fake_varlen(q: Any, k: Any, v: Any, plan: int, **_: Any) -> Any:
    return _fake_result(q, v.shape[-1], q.dtype)


def _fake_varlen_with_lse(q: Any, k: Any, v: Any, plan: int, **_: Any) -> Any:
    return _fake_varlen(q, k, v, plan), _fake_result(q, 1, torch.float32)[..., 0]


def _run_varlen(lse: Any, q: Any, k: Any, v: Any, plan: int, **options: Any) -> Any:
    return ops.varlen(plan_numbered(plan, VarlenPlan), q, k, v, lse=lse, **options)


_varlen = _operator("varlen" + _VARLEN + "Tensor", _fake_varlen)(functools.partial(_run_varlen, None))
_varlen_with_lse = _operator("varlen_with_lse" + _VARLEN + "(Tensor, Tensor)", _fake_varlen_with_lse)(
    functools.partial(_run_varlen, True))


def _fake_merge(o: Any, lse: Any) -> Any:
    return torch.empty_like(o[0]), torch.empty_like(lse[0])


@_operator("merge(Tensor[] o, Tensor[] lse) -> (Tensor, Tensor)", _fake_merge)
def _merge(o: Any, lse: Any) -> Any:
    return ops.merge(list(zip(o, lse)))


@_operator("rmsnorm(Tensor x, Tensor weight, *, float eps=1e-06, float weight_offset=0.0) -> Tensor",
           lambda x, weight, **_: x.new_empty(x.shape))
def _rmsnorm(x: Any, weight: Any, *, eps: float = 1e-6, weight_offset: float = 0.0) -> Any:
    return ops.rmsnorm(x, weight, eps=eps, weight_offset=weight_offset)


@_operator("rotate(Tensor x, Tensor positions, Tensor table, *, bool interleaved=False, int first=0) -> Tensor",
           lambda x, *_, **__: x.new_empty(x.shape))
def _rotate(x: Any, positions: Any, table: Any, *, interleaved: bool = False, first: int = 0) -> Any:
    return ops.rotate(x, positions, table, interleaved=interleaved, first=first)


@_operator("swiglu(Tensor gate_up) -> Tensor", lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)))
def _swiglu(gate_up: Any) -> Any:
    return ops.swiglu(gate_up)


@_operator("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
           lambda x, weight, bias=None: x.new_empty((x.shape[0], weight.shape[0])))
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return ops.linear(x, weight, bias)


def kv_write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             slot_mapping: torch.Tensor, **options: Any) -> None:
    """``cpattn.ops.kv_write`` into pools. ``options``: layout, k_scale, v_scale of ``cpattn.PagedCache``."""
    _kv_write(k, v, k_cache, v_cache, slot_mapping, **options)


def attend(plan: AttendPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           **options: Any) -> torch.Tensor:
    """``cpattn.ops.attend`` over pools; ``[rows, q_heads, v_dim]``, or ``[sequences, q_heads, tokens, v_dim]`` where q
    has four dimensions. ``options``: causal, window, sinks, scale,
    softcap, alibi_slopes, sink_logits, and layout, k_scale, v_scale of ``cpattn.PagedCache``."""
    return _attend(q, k_cache, v_cache, plan.number, **options)


def attend_with_lse(plan: AttendPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend`` with its LSE, fp32 ``[rows, q_heads]`` or ``[sequences, q_heads, tokens]``."""
    return _attend_with_lse(q, k_cache, v_cache, plan.number, **options)


def varlen(plan: VarlenPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """``cpattn.ops.varlen`` of rows or ``[segments, heads, tokens, dim]``. ``options``: causal, left, right, scale,
    softcap."""
    return _varlen(q, k, v, plan.number, **options)


def varlen_with_lse(plan: VarlenPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``varlen`` with its LSE, fp32 ``[rows, q_heads]`` or ``[segments, q_heads, tokens]``."""
    return _varlen_with_lse(q, k, v, plan.number, **options)


def merge(o: list[torch.Tensor], lse: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """``cpattn.ops.merge`` of states O ``[rows, heads, v_dim]`` and LSE ``[rows, heads]``."""
    return _merge(o, lse)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, weight_offset: float = 0.0) -> torch.Tensor:
    """``cpattn.ops.rmsnorm`` of ``[rows, width]``."""
    return _rmsnorm(x, weight, eps=eps, weight_offset=weight_offset)


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False,
           first: int = 0) -> torch.Tensor:
    """``cpattn.ops.rotate`` of ``[rows, heads, dim]``."""
    return _rotate(x, positions, table, interleaved=interleaved, first=first)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``cpattn.ops.swiglu`` of ``[rows, 2 * width]``."""
    return _swiglu(gate_up)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``cpattn.ops.linear`` of ``[rows, inputs]`` and ``[outputs, inputs]``."""
    return _linear(x, weight, bias)
