"""Operators on NumPy's arrays, against float64."""

import ctypes

import numpy as np
import pytest
from reference import Paged, attend, peaky

import cpattn
from cpattn import ops

HEADS, KV_HEADS, DIM = 4, 2, 32


def step(rng, lengths, queries, **shape):
    """Pages that are written, queries, and the plan of a step."""
    pages = Paged(rng, lengths, KV_HEADS, DIM, **shape)
    cache = cpattn.PagedCache(*pages.pools)
    for k, v, slots in zip(pages.k, pages.v, pages.slots):
        ops.kv_write(cache, k, v, slots)
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, cache.v_dim, block_size=cache.block_size)
    plan.set(queries, lengths, pages.tables)
    return pages, cache, plan, peaky(rng, sum(queries), HEADS, DIM)


def expected(pages, q, queries, **rules):
    out, lse, row = [], [], 0
    for k, v, n in zip(pages.k, pages.v, queries):
        o, s = attend(q[row:row + n], k, v, k.shape[0] - n, **rules)
        out.append(o), lse.append(s)
        row += n
    return np.concatenate(out), np.concatenate(lse)


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 20, "sinks": 3}])
def test_attend_of_prefill_and_decode(rng, mask):
    queries = [7, 1, 40]
    pages, cache, plan, q = step(rng, [100, 33, 40], queries, v_dim=16)
    out, lse = ops.attend(plan, q, cache, lse=True, **mask)
    want, want_lse = expected(pages, q, queries, **mask)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


def test_score_rules_and_scale(rng):
    pages, cache, plan, q = step(rng, [50], [5])
    sinks = np.array([0.5, -np.inf, 3, 0], np.float32)
    rules = ops.ScoreRules(softcap=20.0, sink_logits=sinks)
    out = ops.attend(plan, q, cache, rules=rules, scale=0.3)
    np.testing.assert_allclose(out, expected(pages, q, [5], softcap=20.0, sink_logits=sinks, scale=0.3)[0], atol=2e-5)
    plain = ops.attend(plan, q, cache)  # what one call asks for is not left for the next
    np.testing.assert_allclose(plain, expected(pages, q, [5])[0], atol=2e-5)


def test_plan_of_flashinfers_arrays_gives_the_same_bits(rng):
    pages, cache, plan, q = step(rng, [100, 33], [7, 1])
    want = ops.attend(plan, q, cache)
    arrays = [0, 7, 8], [0, 7, 10], np.array(sum(pages.tables, []), np.int32), [4, 1]
    for k_first in (None, [0, 0], np.zeros(2, np.int64)):
        plan.set_indices(*arrays, k_first=k_first)
        np.testing.assert_array_equal(ops.attend(plan, q, cache), want)
    with pytest.raises(ValueError, match="3 k_first of 2 sequences"):
        plan.set_indices(*arrays, k_first=[0, 0, 0])
    with pytest.raises(ValueError, match="1 last_page_len of 2 sequences"):
        plan.set_indices(*arrays[:3], [4])


def test_refused_lse_leaves_no_trace(rng):
    _, cache, plan, q = step(rng, [30, 20], [5, 5])
    want = ops.attend(plan, q, cache, lse=True)
    by_head = np.zeros((HEADS, 10), np.float32).T
    with pytest.raises(ValueError, match="lse is fp16 of 10 rows; expected fp32 of 10"):
        ops.attend(plan, q, cache, lse=by_head.astype(np.float16, order="K"))
    for lse in (None, np.zeros((10, HEADS), np.float32), by_head, None):
        np.testing.assert_array_equal(ops.attend(plan, q, cache, lse=lse), want[0])
        assert plan.args.lse_head_stride == (10 if lse is by_head else 0)
        if lse is not None:
            np.testing.assert_array_equal(lse, want[1])


def test_heads_that_overlap_are_refused(rng):
    _, cache, plan, q = step(rng, [30, 20], [5, 5])
    memory = np.zeros(10 * HEADS * DIM * 2, np.float32)

    def strided(row, head):
        return np.lib.stride_tricks.as_strided(memory, (10, HEADS, DIM), [4 * row, 4 * head, 4])

    for row, head in [(HEADS * DIM - 1, DIM), (DIM, DIM + 1), (DIM + 1, 2 * DIM), (3 * DIM, 2 * DIM)]:
        with pytest.raises(ValueError, match="contiguous heads that do not overlap"):
            ops.attend(plan, q, cache, out=strided(row, head))
    want = ops.attend(plan, q, cache)
    for row, head in [(HEADS * DIM, DIM), (DIM, 10 * DIM), (DIM + 8, 10 * (DIM + 8)), (2 * HEADS * DIM, 2 * DIM)]:
        np.testing.assert_array_equal(ops.attend(plan, q, cache, out=strided(row, head)), want)


def padded_tables(pages):
    """The block tables of two sequences, of five entries each."""
    tables = np.zeros((2, 5), np.int32)
    for s, table in enumerate(pages.tables):
        tables[s, :len(table)] = table
    return tables


def test_reserved_plan_follows_its_arrays(rng):
    pages, cache, plan, q = step(rng, [70, 33], [1, 1])
    want = ops.attend(plan, q, cache)
    reserved = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16)
    reserved.reserve(2, 80, cache.num_blocks)
    tables = padded_tables(pages)
    reserved.update(np.array([70, 33], np.int32), tables)
    np.testing.assert_array_equal(ops.attend(reserved, q, cache), want)


def test_reserved_plan_of_prefill_and_decode(rng):
    pages, cache, plan, q = step(rng, [70, 33], [40, 1])
    want = ops.attend(plan, q, cache)
    reserved = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16)
    reserved.reserve(2, 80, cache.num_blocks, rows=64, total_rows=41)
    tables = padded_tables(pages)
    reserved.update(np.array([70, 33], np.int32), tables, qo_indptr=np.array([0, 40, 41], np.int32))
    reserved.check_refused()
    np.testing.assert_array_equal(ops.attend(reserved, q, cache), want)
    reserved.update(np.array([70, 33], np.int32), tables, qo_indptr=np.array([0, 40, 42], np.int32))
    with pytest.raises(ValueError, match="refused sequence 1: it has more than 64 rows, or all have more than 41"):
        reserved.check_refused()


def test_reserved_plan_takes_rows_one_behind_the_other_alone(rng):
    pages, cache, plan, q = step(rng, [70, 33], [2, 2])
    want = ops.attend(plan, q, cache)
    reserved = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16)
    reserved.reserve(2, 80, cache.num_blocks, rows=2, total_rows=4)
    tables = padded_tables(pages)
    reserved.update(np.array([70, 33], np.int32), tables, qo_indptr=np.array([0, 2, 4], np.int32))
    batch = q.reshape(2, 2, HEADS, DIM).swapaxes(1, 2)
    np.testing.assert_array_equal(ops.attend(reserved, batch, cache), want.reshape(2, 2, HEADS, DIM).swapaxes(1, 2))
    with pytest.raises(ValueError, match=f"sequence 1 of q begins at row {2 * HEADS}, that of the plan at row 2"):
        ops.attend(reserved, np.ascontiguousarray(batch), cache)


def test_refused_state_is_not_written_later(rng):
    _, cache, plan, q = step(rng, [30], [2])
    o = np.full((2, HEADS, DIM), 7, np.float32)
    with pytest.raises(ValueError, match="lse is fp16"):
        ops.attend(plan, q, cache, state=(o, np.zeros((2, HEADS), np.float16)))
    ops.attend(plan, q, cache)
    assert (o == 7).all()


def test_halves_of_the_keys_merge_to_the_whole(rng):
    pages, cache, plan, q = step(rng, [96], [3])
    whole = ops.attend(plan, q, cache, lse=True, causal=False)
    states = []
    for table in (pages.tables[0][:2], pages.tables[0][2:]):
        plan.set([3], [len(table) * 16], [table])
        state = (np.empty((3, HEADS, DIM), np.float32), np.empty((3, HEADS), np.float32))
        assert ops.attend(plan, q, cache, state=state, causal=False) is state
        states.append(state)
    out, lse = ops.merge(states)
    np.testing.assert_allclose(out, whole[0], atol=1e-5)
    np.testing.assert_allclose(lse, whole[1], atol=1e-5)


@pytest.mark.parametrize("interleave", [1, 4, 32])
def test_shards_of_the_keys_merge_to_the_whole(rng, interleave):
    lengths, queries, window = [83, 40], [50, 1], 30
    k, v = ([peaky(rng, n, 2, 32) for n in lengths] for _ in range(2))
    q = peaky(rng, sum(queries), 4, 32)
    owners = [np.arange(n) // interleave % 3 for n in lengths]
    states = []
    for rank in range(3):
        own = [owner == rank for owner in owners]
        pools = [np.full((12, 16, 2, 32), np.nan, np.float32) for _ in range(2)]
        cache = cpattn.PagedCache(*pools)
        for s in (s for s in range(2) if own[s].any()):
            ops.kv_write(cache, k[s][own[s]], v[s][own[s]], np.arange(own[s].sum()) + 96 * s)
        plan = cpattn.AttendPlan(4, 2, 32, block_size=16)
        plan.set(queries, lengths, [range(6), range(6, 12)], shard=(rank, 3, interleave))
        order = list(range(51)) if plan.order is None else plan.order
        assert [owners[0][33:][i] for i in order[:50]] == sorted(owners[0][33:]) and order[50] == 50
        states.append(ops.attend(plan, q[order], cache, lse=True, window=window))
    out, lse = ops.merge(states)
    want = [attend(q[:50], k[0], v[0], 33, window=window), attend(q[50:], k[1], v[1], 39, window=window)]
    np.testing.assert_allclose(out, np.concatenate([w[0] for w in want])[order], atol=3e-5)
    np.testing.assert_allclose(lse, np.concatenate([w[1] for w in want])[order], atol=3e-5)


def layouts(dense):
    """Rows [2 * tokens, heads, dim] of two sequences as [2, heads, tokens, dim] in several orders in memory."""
    x = dense.reshape(2, -1, *dense.shape[1:])  # [2, tokens, heads, dim]
    yield "tokens that contain their heads", x.swapaxes(1, 2)
    yield "heads that contain their tokens", np.ascontiguousarray(x.swapaxes(1, 2))
    yield "heads that contain their sequences", np.ascontiguousarray(x.transpose(2, 0, 1, 3)).swapaxes(0, 1)
    product = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), np.nan, np.float32)
    product[:, :, 1:-2] = x
    yield "some of the heads of a product", product[:, :, 1:-2].swapaxes(1, 2)
    some = np.full((2, x.shape[2] + 3, *x.shape[1::2]), np.nan, np.float32)
    some[:, 1:-2] = x.swapaxes(1, 2)
    yield "some of the heads that contain their tokens", some[:, 1:-2]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("of_torch", [False, True])
def test_batches_of_heads_are_attended_as_they_lie(rng, which, of_torch):
    lengths, tokens = [70, 33], 20
    pages, cache, plan, dense = step(rng, lengths, [tokens] * 2, v_dim=16)
    want, want_lse = ops.attend(plan, dense, cache, lse=True)
    want, want_lse = (x.reshape(2, tokens, HEADS, *x.shape[2:]).swapaxes(1, 2) for x in (want, want_lse))
    q = dict(enumerate(x for _, x in layouts(dense)))[which]
    if of_torch:
        q = pytest.importorskip("torch").from_numpy(q)
    rows, starts = ops.as_rows(q)
    assert np.shares_memory(rows, q)
    plan.set([tokens] * 2, lengths, pages.tables, q_starts=starts)
    out, lse = ops.attend(plan, q, cache, lse=True)
    assert type(out) is type(lse) is type(q) and out.shape == (2, HEADS, tokens, 16) and lse.shape == out.shape[:3]
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    out[...], lse[...] = np.nan, np.nan
    assert ops.attend(plan, q, cache, out=out, lse=lse) is out
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


def test_batches_that_do_not_lie_as_the_plan_are_refused(rng):
    pages, cache, plan, dense = step(rng, [70, 33], [20] * 2)
    within = np.ascontiguousarray(dense.reshape(2, 20, HEADS, DIM).swapaxes(1, 2))
    for message, q, options in [
            ("sequence 1 of q begins at row 80, that of the plan at row 20; expected the same", within, {}),
            (r"q has 1 sequences of 20 rows; the plan has 2 of at most 20", within[:1], {}),
            (r"q has 2 sequences of 19 rows; the plan has 2 of at most 20", within[:, :, 1:], {}),
            (r"strides \[\d+, \d+, 32, 1\] of \[2, 4, 20, 32\]; expected sequences of whole rows",
             np.zeros(2 * (within[0].size + 1), np.float32).reshape(2, -1)[:, 1:].reshape(within.shape), {})]:
        with pytest.raises(ValueError, match=message):
            ops.attend(plan, q, cache, **options)
    plan.set([20] * 2, [70, 33], pages.tables, q_starts=ops.as_rows(within)[1])
    across = np.zeros((2, 20, HEADS, DIM), np.float32).swapaxes(1, 2)
    with pytest.raises(ValueError, match="sequence 1 of out begins at row 20, that of q at row 80"):
        ops.attend(plan, within, cache, out=across)
    with pytest.raises(ValueError, match="sequence 1 of lse begins at row 20, that of q at row 80"):
        ops.attend(plan, within, cache, lse=across[..., 0])
    with pytest.raises(TypeError, match="expected a tensor of PyTorch, NumPy or CuPy, or rows"):
        ops.attend(plan, Foreign(within), cache)
    assert not across.any()


@pytest.mark.parametrize("which", range(5))
def test_batches_of_heads_are_written_as_they_lie(rng, which):
    pages, cache, _, _ = step(rng, [40, 40], [1, 1], v_dim=16)
    again = cpattn.PagedCache(*[np.full_like(x, np.nan) for x in (cache.k, cache.v)])
    k, v = ([x for _, x in layouts(np.concatenate(of))][which] for of in (pages.k, pages.v))
    ops.kv_write(again, k, v, np.stack(pages.slots))
    np.testing.assert_array_equal(again.k, cache.k)
    np.testing.assert_array_equal(again.v, cache.v)
    v[1, 1, 7, 3], nonfinite = np.inf, np.zeros((2, 40), np.uint8)
    ops.kv_write(again, k, v, np.stack(pages.slots), nonfinite=nonfinite)
    assert np.argwhere(nonfinite).tolist() == [[1, 7]]
    with pytest.raises(ValueError, match=r"slot_mapping is \[80\]; expected \[2, 40\], as k is"):
        ops.kv_write(again, k, v, np.concatenate(pages.slots))
    with pytest.raises(ValueError, match="expected the same but for the width"):
        ops.kv_write(again, k, v[:1], np.stack(pages.slots))


def test_rows_are_gathered_from_any_token_and_blocks_swapped(rng):
    pages, cache, plan, _ = step(rng, [70, 33], [1, 1])
    k, v = ops.gather_rows(cache, pages.tables, [37, 5], [20, 28])
    np.testing.assert_array_equal(k, np.concatenate([pages.k[0][37:57], pages.k[1][5:33]]))
    np.testing.assert_array_equal(v, np.concatenate([pages.v[0][37:57], pages.v[1][5:33]]))
    half = ops.gather_rows(cache, pages.tables[:1], [1], [3], dtype="half")[0]
    np.testing.assert_array_equal(half, pages.k[0][1:4].astype(np.float16))
    for dtype in ("fp8", "int8"):
        with pytest.raises(ValueError, match=f"the dtype of rows is {dtype}; expected dtype= of fp32, bf16, fp16"):
            ops.gather_rows(cache, pages.tables[:1], [1], [3], dtype=dtype)
    with pytest.raises(ValueError, match="tokens 60 to 90 of sequence 0, which has 5 blocks"):
        ops.gather_rows(cache, pages.tables[:1], [60], [30])
    host = cpattn.PagedCache(*[np.full_like(x, np.nan) for x in (cache.k, cache.v)])
    first, second = pages.tables[0][:2]
    ops.kv_swap(cache, host, [(first, second)])
    np.testing.assert_array_equal(host.k[second], cache.k[first])
    np.testing.assert_array_equal(host.v[second], cache.v[first])


def test_formats_have_the_names_of_others(rng):
    pools = [np.zeros((2, KV_HEADS, 16, DIM), np.float32) for _ in range(2)]
    assert cpattn.PagedCache(*pools, layout="HND").view.layout == cpattn.PagedCache(*pools, layout="head-major").view.layout
    for ours, theirs in (("bf16", "bfloat16"), ("fp8_e4m3", "fp8"), ("fp16", "half"), ("fp16", "auto"),
                         ("tq_4bit", "turboquant_4bit_nc")):
        mine, other = (cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, dtype="float16", kv_dtype=name)
                       for name in (ours, theirs))
        assert mine.shape.kv_dtype == other.shape.kv_dtype
    with pytest.raises(ValueError, match="found 'turboquant_2bit'"):
        cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, kv_dtype="turboquant_2bit")
    with pytest.raises(ValueError, match="dtype: found 'int3'"):
        cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, dtype="int3")


def test_rows_may_be_slices_and_pools_head_major(rng):
    pages = Paged(rng, [40], KV_HEADS, DIM)
    head_major = [np.full((pages.num_blocks, KV_HEADS, 16, DIM), np.nan, np.float32) for _ in range(2)]
    cache = cpattn.PagedCache(*head_major, layout="head-major")
    joined = np.concatenate([pages.k[0], pages.v[0]], axis=1)  # rows of one product
    ops.kv_write(cache, joined[:, :KV_HEADS], joined[:, KV_HEADS:], pages.slots[0])
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16)
    plan.set([40], [40], pages.tables)
    q = np.full((40, HEADS + 2, DIM), np.nan, np.float32)
    q[:, :HEADS] = peaky(rng, 40, HEADS, DIM)
    out = ops.attend(plan, q[:, :HEADS], cache)
    np.testing.assert_allclose(out, expected(pages, q[:, :HEADS], [40])[0], atol=2e-5)


def test_quantised_cache_of_bytes(rng):
    pages = Paged(rng, [40], KV_HEADS, DIM)
    size = cpattn.block_bytes("int8", 16, KV_HEADS, DIM)
    assert size == 16 * KV_HEADS * (DIM + 4)
    cache = cpattn.PagedCache.of_bytes(*(np.full((pages.num_blocks, size + 16), 255, np.uint8) for _ in range(2)),
                                       dtype="int8", block_size=16, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM)
    ops.kv_write(cache, pages.k[0], pages.v[0], pages.slots[0])
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, kv_dtype="int8")
    plan.set([2], [40], pages.tables)
    q = rng.standard_normal((2, HEADS, DIM)).astype(np.float32)
    out = ops.attend(plan, q, cache)
    want = expected(pages, q, [2])[0]
    assert 1e-5 < np.abs(out - want).max() < 0.1


def test_blocks_are_copied_and_gathered(rng):
    pages, cache, plan, q = step(rng, [40, 20], [1, 1])
    want = ops.attend(plan, q, cache)
    gathered = cpattn.PagedCache(*(np.full((8, 16, KV_HEADS, DIM), np.nan, np.float32) for _ in range(2)))
    firsts = ops.kv_gather(cache, gathered, pages.tables, [40, 20])
    assert firsts == [0, 3]
    plan.set([1, 1], [40, 20], [[0, 1, 2], [3, 4]])
    np.testing.assert_array_equal(ops.attend(plan, q, gathered), want)
    ops.kv_copy(gathered, gathered, [(0, 7), (3, 6)])
    plan.set([1, 1], [40, 20], [[7, 1, 2], [6, 4]])
    np.testing.assert_array_equal(ops.attend(plan, q, gathered), want)


def test_writes_tell_what_is_not_finite_and_skip(rng):
    pages = Paged(rng, [4], KV_HEADS, DIM)
    cache = cpattn.PagedCache(*pages.pools)
    pages.v[0][2, 1, 5] = np.inf
    nonfinite = np.zeros(4, np.uint8)
    slots = pages.slots[0].copy()
    slots[3] = -1
    ops.kv_write(cache, pages.k[0], pages.v[0], slots, nonfinite=nonfinite)
    assert nonfinite.tolist() == [0, 0, 1, 0]
    block = pages.tables[0][0]
    np.testing.assert_array_equal(cache.k[block, :3], pages.k[0][:3])
    assert np.isnan(cache.k[block, 3]).all()


def test_operators_beside_attention(rng):
    x, w = peaky(rng, 5, 24), rng.standard_normal(24).astype(np.float32)
    x64 = x.astype(np.float64)
    norm = x64 / np.sqrt((x64 ** 2).mean(-1, keepdims=True) + 1e-5) * (w + 1)
    np.testing.assert_allclose(ops.rmsnorm(x, w, eps=1e-5, weight_offset=1), norm, rtol=1e-5, atol=1e-5)
    gate, up = x64[:, :12], x64[:, 12:]
    np.testing.assert_allclose(ops.swiglu(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)
    m, bias = rng.standard_normal((7, 24)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    np.testing.assert_allclose(ops.linear(x, m, bias), x64 @ m.T.astype(np.float64) + bias, rtol=1e-4, atol=1e-4)
    table = cpattn.rope_table(np.empty((50, 8), np.float32), 10000.0)
    heads, positions = peaky(rng, 5, 3, 8), np.array([0, 1, 7, 30, 49])
    angle = positions[:, None, None] * 10000.0 ** (-np.arange(4) / 4)
    a, b = heads[..., :4].astype(np.float64), heads[..., 4:].astype(np.float64)
    turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
    np.testing.assert_allclose(ops.rotate(heads, positions, table), turned, atol=1e-5)


def test_errors_are_the_librarys_lines(rng):
    pages, cache, plan, q = step(rng, [40], [2])
    with pytest.raises(cpattn.InvalidError, match="attend: scale is nan, expected a finite number") as caught:
        ops.attend(plan, q, cache, scale=float("nan"))
    assert caught.value.status == "invalid" and isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match=r"q has 1 rows; the plan has 2"):
        ops.attend(plan, q[:1], cache)
    with pytest.raises(ValueError, match=r"q is \[2, 3, 32\]; expected \[rows, 4, 32\]"):
        ops.attend(plan, q[:, :3], cache)
    with pytest.raises(TypeError, match="an array of float64"):
        ops.attend(plan, q.astype(np.float64), cache)
    with pytest.raises(ValueError, match="2 queries of sequence 0 of 49 tokens with 3 blocks of 16"):
        plan.set([2], [49], pages.tables)
    with pytest.raises(TypeError, match="a list in place of a tensor"):
        ops.attend(plan, [1.0], cache)
    with pytest.raises(ValueError, match="o is fp16 of 2 rows; expected fp32 of 2"):
        ops.attend(plan, q, cache, state=(q.astype(np.float16), q[..., 0]))


def test_rows_that_are_not_one_behind_the_other_are_refused(rng):
    pages, cache, plan, q = step(rng, [40], [2])
    k, v, slots = pages.k[0], pages.v[0], pages.slots[0]
    for rows in (q[::-1], np.broadcast_to(q[:1], q.shape)):
        with pytest.raises(ValueError, match=r"q has strides \[(-128|0), 32, 1\]"):
            ops.attend(plan, rows, cache)
        with pytest.raises(ValueError, match="x is .* with strides"):
            ops.rotate(rows, slots[:2], cpattn.rope_table(np.empty((2000, DIM), np.float32), 1e4))
    with pytest.raises(ValueError, match=r"v has strides \[-64, 32, 1\]"):
        ops.kv_write(cache, k, v[::-1], slots)
    last = q[1::-2]  # one row, whatever its stride
    assert last.strides[0] < 0
    plan.set([1], [40], pages.tables)
    np.testing.assert_array_equal(ops.attend(plan, last, cache), ops.attend(plan, q[1:], cache))
    np.testing.assert_array_equal(ops.swiglu(last.reshape(1, -1)), ops.swiglu(q[1:].reshape(1, -1)))


class Elsewhere:
    """An array that says it lies on a GPU, where nothing may be read."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **_):
        capsule = self.x.__dlpack__()
        ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
        address = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor")
        ctypes.c_int32.from_address(address + 8).value = 2  # device_type, kDLCUDA
        return capsule


def test_tensors_of_another_device_are_refused(rng):
    pages, cache, plan, q = step(rng, [40], [2])
    k, v, slots = pages.k[0], pages.v[0], pages.slots[0]
    far, lse = Elsewhere(q.copy()), np.zeros((2, HEADS), np.float32)
    there, row = Elsewhere(lse.copy()), np.ones((2, 8), np.float32)
    table = np.zeros((50, DIM), np.float32)
    calls = {
        "q": lambda: ops.attend(plan, far, cache, out=q.copy()), "out": lambda: ops.attend(plan, q, cache, out=far),
        "lse": lambda: ops.attend(plan, q, cache, lse=there), "o": lambda: ops.merge([(q, lse), (far, lse)]),
        "sink_logits": lambda: ops.attend(plan, q, cache, rules=ops.ScoreRules(
            sink_logits=Elsewhere(np.zeros(HEADS, np.float32)))),
        "v": lambda: ops.kv_write(cache, k, Elsewhere(v.copy()), slots),
        "slot_mapping": lambda: ops.kv_write(cache, k, v, Elsewhere(slots.copy())),
        "weight": lambda: ops.rmsnorm(row, Elsewhere(row[0].copy())),
        "positions": lambda: ops.rotate(q, Elsewhere(slots[:2].copy()), table),
        "table": lambda: ops.rotate(q, slots[:2], Elsewhere(table.copy())),
        "bias": lambda: ops.linear(row, row, Elsewhere(row[0, :2].copy())),
    }
    for what, call in calls.items():
        with pytest.raises(ValueError, match=f"^cpattn: {what} lies on cuda:0; expected host:0"):
            call()


def test_arrays_that_are_read_only_are_not_written(rng):
    pages, cache, plan, q = step(rng, [40], [2])
    kept = np.zeros_like(q)
    ops.attend(plan, q, cache, out=kept)  # what is known of an array that is writable
    before = kept.copy()
    kept.flags.writeable = False
    lse, row = kept[..., 0].copy(), kept.reshape(2, -1)
    lse.flags.writeable = False
    calls = [lambda: ops.attend(plan, q, cache, out=kept), lambda: ops.attend(plan, q, cache, lse=lse),
             lambda: ops.rmsnorm(q.reshape(2, -1), np.ones(128, np.float32), out=row),
             lambda: ops.rmsnorm(q.reshape(2, -1), np.ones(128, np.float32), residual=row),
             lambda: ops.swiglu(np.ones((2, 256), np.float32), out=row),
             lambda: cpattn.rope_table(row, 1e4)]
    for call in calls:
        with pytest.raises(ValueError, match="is read-only"):
            call()
    np.testing.assert_array_equal(kept, before)
    cache.k.flags.writeable = False
    with pytest.raises(ValueError, match="k of the cache is read-only"):
        ops.kv_write(cache, pages.k[0], pages.v[0], pages.slots[0])
    with pytest.raises(ValueError, match="k of dst is read-only"):
        ops.kv_copy(cache, cache, [(0, 1)])
    ops.attend(plan, q, cache)  # which reads it


def test_blocks_that_no_int32_holds_are_refused(rng):
    pages, cache, plan, q = step(rng, [40], [2])
    table = list(pages.tables[0])
    wide = [table[0] + 2**32, *table[1:]]
    for call in (lambda: plan.set([2], [40], [wide]), lambda: plan.set_indices([0, 2], [0, 3], wide, [8]),
                 lambda: ops.kv_gather(cache, cache, [wide], [40])):
        with pytest.raises(ValueError, match="expected what c_int holds"):
            call()


class Foreign:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **_):
        return self.x.__dlpack__()


def test_tensors_of_other_frameworks_come_by_dlpack(rng):
    pages, cache, plan, q = step(rng, [40], [2])
    out = np.empty((2, HEADS, DIM), np.float32)
    ops.attend(plan, Foreign(q), cache, out=Foreign(out))
    np.testing.assert_array_equal(out, ops.attend(plan, q, cache))
    with pytest.raises(TypeError, match="need a tensor that is given, out="):
        ops.swiglu(Foreign(np.zeros((2, 8), np.float32)))
