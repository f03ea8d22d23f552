"""Operators on arrays of JAX, which come by DLPack and are not written to."""

import numpy as np
import pytest
from reference import Paged, attend, peaky

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import cpattn  # noqa: E402
from cpattn import ops  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attend_of_arrays_of_jax(rng, dtype):
    pages = Paged(rng, [70], KV_HEADS, DIM)
    kind = jnp.dtype(dtype)
    cache = cpattn.PagedCache(*(np.nan_to_num(pool).astype(kind) for pool in pages.pools))
    k, v, q = (jnp.asarray(x, kind) for x in (pages.k[0], pages.v[0], peaky(rng, 5, HEADS, DIM)))
    ops.kv_write(cache, k, v, pages.slots[0])  # int64, which JAX has only where it is told to
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, dtype=dtype)
    plan.set([5], [70], pages.tables)
    out = np.zeros((5, HEADS, DIM), kind)
    ops.attend(plan, q, cache, out=out)
    want = attend(*(np.asarray(x, np.float32) for x in (q, k, v)), 65)[0]
    np.testing.assert_allclose(out.astype(np.float32), want, atol=2e-5 if dtype == "float32" else 0.06, rtol=0.01)
    pools = [jnp.asarray(x) for x in (cache.k, cache.v)]  # attended, not written
    again = np.zeros_like(out)
    ops.attend(plan, q, cpattn.PagedCache(*pools), out=again)
    np.testing.assert_array_equal(again, out)


def test_what_is_still_computed_is_waited_for(rng):
    x, w = jnp.asarray(peaky(rng, 2000, 2000)), jnp.ones(2000, jnp.float32)
    late = jax.jit(lambda x: x @ x @ x @ x)(x * 1e-4)
    out = np.zeros(late.shape, np.float32)
    ops.rmsnorm(late, w, out=out)
    y = np.asarray(late, np.float64)
    np.testing.assert_allclose(out, y / np.sqrt((y ** 2).mean(-1, keepdims=True) + 1e-6), rtol=1e-5, atol=1e-6)


def test_arrays_of_jax_are_not_written(rng):
    pages = Paged(rng, [20], KV_HEADS, DIM)
    pools = [jnp.zeros(pool.shape, jnp.float32) for pool in pages.pools]
    with pytest.raises(ValueError, match="k of the cache is an array of JAX, which is read-only; expected"):
        ops.kv_write(cpattn.PagedCache(*pools), pages.k[0], pages.v[0], pages.slots[0])
    rows = jnp.ones((3, 16), jnp.float32)
    with pytest.raises(ValueError, match="out is an array of JAX"):
        ops.swiglu(rows, out=jnp.zeros((3, 8), jnp.float32))
    with pytest.raises(TypeError, match="need a tensor that is given, out="):
        ops.swiglu(rows)
