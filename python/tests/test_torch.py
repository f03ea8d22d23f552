"""Operators of PyTorch: results, schemas, tracing."""

import numpy as np
import pytest
from reference import Paged, attend, peaky

torch = pytest.importorskip("torch")

import cpattn  # noqa: E402
import cpattn.torch as ct  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 32


@pytest.fixture
def step(rng):
    pages = Paged(rng, [70], KV_HEADS, DIM)
    pools = [torch.from_numpy(p) for p in pages.pools]
    new = [torch.from_numpy(x[0]) for x in (pages.k, pages.v, pages.slots)]
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16)
    plan.set([5], [70], pages.tables)
    return pages, pools, new, plan, torch.from_numpy(peaky(rng, 5, HEADS, DIM))


def layer(plan, q, k, v, k_cache, v_cache, slots):
    ct.kv_write(k, v, k_cache, v_cache, slots)
    return ct.attend(plan, q * 2, k_cache, v_cache, window=40) + 1


def test_compiled_layer_is_the_eager_one(step):
    pages, pools, (k, v, slots), plan, q = step
    want = attend(q.numpy() * 2, pages.k[0], pages.v[0], 65, window=40)[0] + 1
    np.testing.assert_allclose(layer(plan, q, k, v, *pools, slots), want, atol=2e-5)
    fresh = [torch.full_like(p, torch.nan) for p in pools]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    np.testing.assert_allclose(compiled(plan, q, k, v, *fresh, slots), want, atol=2e-5)
    np.testing.assert_array_equal(fresh[0].numpy(), pools[0].numpy())
    plan.set([5], [60], pages.tables)  # the same plan, another step: nothing is compiled again
    want = attend(q.numpy() * 2, pages.k[0][:60], pages.v[0][:60], 55, window=40)[0] + 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        np.testing.assert_allclose(compiled(plan, q, k, v, *fresh, slots), want, atol=2e-5)


def test_schemas_and_fakes_are_true(step):
    _, pools, (k, v, slots), plan, q = step
    ct.kv_write(k, v, *pools, slots)
    pools = [p.nan_to_num() for p in pools]  # opcheck compares what must be alike
    empty = [torch.zeros_like(p) for p in pools]  # what is written has to change
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    calls = {"kv_write": (k, v, *empty, slots), "attend": (q, *pools, plan.number),
             "attend_with_lse": (q, *pools, plan.number), "swiglu": (q.view(5, -1),),
             "merge": ([q, q], [q[..., 0].contiguous()] * 2), "rmsnorm": (q.view(5, -1), torch.ones(HEADS * DIM)),
             "linear": (q.view(5, -1), torch.ones(3, HEADS * DIM)),
             "rotate": (q, slots[:5], cpattn.rope_table(torch.empty(2000, DIM), 1e4))}
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.cpattn, name).default, arguments, test_utils=checks)


@pytest.mark.parametrize("contiguous", [False, True])
def test_compiled_attend_of_batches_of_heads(step, contiguous):
    pages, pools, (k, v, slots), plan, q = step
    ct.kv_write(k, v, *pools, slots)
    plan.set([5, 5], [70, 60], pages.tables * 2)
    heads_first = torch.stack([q, q * 2]).transpose(1, 2)
    if contiguous:
        heads_first = heads_first.contiguous()
        plan.set([5, 5], [70, 60], pages.tables * 2, q_starts=cpattn.ops.as_rows(heads_first)[1])

    def both(q, k_cache, v_cache):
        out, lse = ct.attend_with_lse(plan, q, k_cache, v_cache)
        return out + ct.attend(plan, q, k_cache, v_cache), lse * 2

    out, lse = torch.compile(both, backend="aot_eager", fullgraph=True)(heads_first, *pools)
    assert out.is_contiguous() == contiguous and out.shape == (2, HEADS, 5, DIM)
    for s, tokens in enumerate((70, 60)):
        want, want_lse = attend(q.numpy() * (s + 1), pages.k[0][:tokens], pages.v[0][:tokens], tokens - 5)
        np.testing.assert_allclose(out[s].transpose(0, 1), want * 2, atol=4e-5)
        np.testing.assert_allclose(lse[s].T, want_lse * 2, atol=4e-5)


def test_compiled_varlen(rng):
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, DIM)
    plan.set([0, 6, 20])
    product = torch.from_numpy(peaky(rng, 20, HEADS + 2 * KV_HEADS, DIM))

    def layer(product):
        q, k, v = product.split([HEADS, KV_HEADS, KV_HEADS], 1)
        out, lse = ct.varlen_with_lse(plan, q, k, v, left=4)
        return out + ct.varlen(plan, q, k, v, left=4), lse

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out, lse = compiled(product)
    for a, b in ((0, 6), (6, 20)):
        q, k, v = product[a:b].split([HEADS, KV_HEADS, KV_HEADS], 1)
        want, want_lse = attend(q, k, v, 0, window=4, causal=False)
        np.testing.assert_allclose(out[a:b], want * 2, atol=4e-5)
        np.testing.assert_allclose(lse[a:b], want_lse, atol=4e-5)
    arguments = (*product.split([HEADS, KV_HEADS, KV_HEADS], 1), plan.number)
    torch.library.opcheck(torch.ops.cpattn.varlen.default, arguments,
                          test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
    with pytest.raises(ValueError, match=f"plan {plan.number} is of VarlenPlan; expected AttendPlan"):
        torch.ops.cpattn.attend(product[:, :HEADS], *torch.zeros(2, 1, 16, KV_HEADS, DIM), plan.number)


def test_lse_merge_and_half_precision(step):
    pages, pools, (k, v, slots), plan, q = step
    half = [torch.full_like(p, torch.nan, dtype=torch.bfloat16) for p in pools]
    ct.kv_write(k.bfloat16(), v.bfloat16(), *half, slots)
    out, lse = ct.attend_with_lse(plan, q.bfloat16(), *half)
    want, want_lse = attend(q.bfloat16().float().numpy(), *(x.bfloat16().float().numpy() for x in (k, v)), 65)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    np.testing.assert_allclose(out.float(), want, atol=0.05)
    merged, merged_lse = ct.merge([out, out], [lse, lse])
    np.testing.assert_allclose(merged.float(), out.float(), atol=1e-3)
    np.testing.assert_allclose(merged_lse, lse + np.log(2), atol=1e-5)


def test_a_plan_that_is_gone_is_refused(step):
    _, pools, _, _, q = step
    number = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16).number  # which nobody keeps
    with pytest.raises(ValueError, match=f"no plan of number {number}"):
        torch.ops.cpattn.attend(q, *pools, number)
