"""Attention without a cache, against float64 of each segment."""

import numpy as np
import pytest
from reference import peaky

import cpattn
from cpattn import ops

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 24, 16


def attend_segment(q, k, v, causal=False, left=0, right=0, scale=None, softcap=0.0):
    """O and LSE of [rows, heads, dim] over [keys, kv_heads, dim] in float64, the last row at the last key."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    ahead = np.arange(len(k)) - (np.arange(len(q)) + len(k) - len(q))[:, None]  # of a key, before its row
    seen = (~causal | (ahead <= 0)) & ((left == 0) | (-ahead < left)) & ((right == 0) | (ahead < right))
    s = np.where(seen, s, -np.inf)
    top = s.max(-1, initial=-np.inf, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return np.einsum("hqk,khd->qhd", weights / np.where(total > 0, total, 1), v), lse[..., 0].T


def segments(rng, q_lens, k_lens):
    """q, k and v of segments with poisoned rows before and behind them, and where they begin."""
    starts = [np.cumsum([3, *lens]) for lens in (q_lens, k_lens)]
    tensors = []
    for lens, heads, dim in ((q_lens, HEADS, DIM), (k_lens, KV_HEADS, DIM), (k_lens, KV_HEADS, V_DIM)):
        x = np.full((sum(lens) + 5, heads, dim), np.nan, np.float32)
        x[3:-2] = peaky(rng, sum(lens), heads, dim)
        tensors.append(x)
    return starts, tensors


def check(out, lse, q, k, v, q_spans, k_spans, **rules):
    for (a, n), (b, m) in zip(q_spans, k_spans, strict=True):
        want, want_lse = attend_segment(q[a:a + n], k[b:b + m], v[b:b + m], **rules)
        np.testing.assert_allclose(out[a:a + n], want, atol=3e-5)
        np.testing.assert_allclose(lse[a:a + n], want_lse, atol=3e-5)


MASKS = [{}, {"causal": True}, {"left": 9}, {"left": 30, "right": 5}, {"softcap": 15.0, "scale": 0.4}]


@pytest.mark.parametrize("rules", MASKS)
def test_each_segment_attends_its_own_keys(rng, rules):
    q_lens, k_lens = [7, 0, 40, 1, 3], [20, 6, 40, 1, 0]
    (q_starts, k_starts), (q, k, v) = segments(rng, q_lens, k_lens)
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, DIM, V_DIM)
    plan.set(q_starts, k_starts, causal=rules.get("causal", False))
    out, lse = np.full((*q.shape[:2], V_DIM), 7, np.float32), np.full(q.shape[:2], 7, np.float32)
    assert ops.varlen(plan, q, k, v, out=out, lse=lse, **rules) is out
    check(out, lse, q, k, v, zip(q_starts, q_lens), zip(k_starts, k_lens), **rules)
    assert (out[:3] == 7).all() and (lse[-2:] == 7).all()  # rows of no segment
    again, again_lse = ops.varlen(plan, q, k, v, lse=True, **rules)
    np.testing.assert_array_equal(again[3:-2], out[3:-2])
    np.testing.assert_array_equal(again_lse[3:-2], lse[3:-2])


def test_keys_are_those_of_the_queries_and_parts_of_a_product(rng):
    lens, dim = [5, 30, 12], 32
    starts = [0, 5, 35, 47]
    product = peaky(rng, 47, HEADS + 2 * KV_HEADS, dim)
    q, k, v = np.split(product, [HEADS, HEADS + KV_HEADS], axis=1)
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, dim)
    for listed in (starts, tuple(starts), np.array(starts, np.int32)):
        plan.set(listed, causal=True)
        out, lse = ops.varlen(plan, q, k, v, lse=True, causal=True)
        check(out, lse, q, k, v, zip(starts, lens), zip(starts, lens), causal=True)


@pytest.mark.parametrize("inner", ["heads", "tokens"])
def test_batches_of_heads_are_attended_as_they_lie(rng, inner):
    def laid(x):
        return x.swapaxes(1, 2) if inner == "heads" else np.ascontiguousarray(x.swapaxes(1, 2))

    dense = [peaky(rng, 2 * n, heads, dim).reshape(2, n, heads, dim)
             for n, heads, dim in ((9, HEADS, DIM), (21, KV_HEADS, DIM), (21, KV_HEADS, V_DIM))]
    q, k, v = map(laid, dense)
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, DIM, V_DIM)
    plan.set(ops.as_rows(q)[1], ops.as_rows(k)[1], q_counts=[9, 9], k_counts=[21, 21])
    if inner == "tokens":
        with pytest.raises(ValueError, match="sequence 1 of v begins at row 21, that of the plan at row 42"):
            ops.varlen(plan, q, k, dense[2].swapaxes(1, 2))
    out, lse = ops.varlen(plan, q, k, v, lse=True, left=6)
    assert out.shape == (2, HEADS, 9, V_DIM) and lse.shape == (2, HEADS, 9)
    for s in range(2):
        want, want_lse = attend_segment(*(x[s] for x in dense), left=6)
        np.testing.assert_allclose(out[s].swapaxes(0, 1), want, atol=3e-5)
        np.testing.assert_allclose(lse[s].T, want_lse, atol=3e-5)


def test_states_of_parts_of_the_keys_are_resumed(rng):
    (q_starts, k_starts), (q, k, v) = segments(rng, [6, 2], [30, 11])
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, DIM, V_DIM)
    state = np.empty((8, HEADS, V_DIM), np.float32), np.empty((8, HEADS), np.float32)
    for begin, counts, resume in ((0, [10, 11], False), (10, [20, 0], True)):
        plan.set([0, 6], [k_starts[0] + begin, k_starts[1]], q_counts=[6, 2], k_counts=counts)
        ops.varlen(plan, q[3:-2], k, v, state=state, resume=resume)
    check(*state, q[3:-2], k, v, [(0, 6), (6, 2)], [(k_starts[0], 30), (k_starts[1], 11)])


def test_what_does_not_fit_is_refused(rng):
    (q_starts, k_starts), (q, k, v) = segments(rng, [6, 2], [30, 11])
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, DIM, V_DIM)
    with pytest.raises(cpattn.InvalidError, match="the plan has not been set"):
        ops.varlen(plan, q, k, v)
    plan.set(q_starts, k_starts)
    for message, call in {
            "2 segments of queries and 1 of keys; expected as many": lambda: plan.set([0, 3, 5], [0, 4]),
            "3 cu_seqlens_q and 1 q_counts": lambda: plan.set([0, 3, 5], q_counts=[3]),
            r"q_starts\[1\] is 5 and q_starts\[2\] is 3, expected no less": lambda: plan.set([0, 5, 3])}.items():
        with pytest.raises(ValueError, match=message):
            call()
    plan.set(q_starts, k_starts)
    for message, call in {
            r"q is \[13, 2, 24\]; expected \[rows, 4, 24\]": lambda: ops.varlen(plan, q[:, :2], k, v),
            r"k is fp32 \[40, 2, 24\]; expected fp32 of 44 rows or more": lambda: ops.varlen(plan, q, k[:40], v),
            r"v is fp16 .*; expected fp32 of 44": lambda: ops.varlen(plan, q, k, v.astype(np.float16)),
            "expected contiguous heads that do not overlap": lambda: ops.varlen(plan, q, k[::-1], v),
            "varlen: left is -1, expected": lambda: ops.varlen(plan, q, k, v, left=-1)}.items():
        with pytest.raises(ValueError, match=message):
            call()
    np.testing.assert_array_equal(ops.varlen(plan, q, k, v)[3:-2], ops.varlen(plan, q.copy(), k, v)[3:-2])
