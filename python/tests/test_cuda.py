"""On a GPU: PyTorch's current stream, CUDA graphs over a reserved plan, contexts."""

import os

import numpy as np
import pytest
import ranks
from reference import Paged, attend, peaky

torch = pytest.importorskip("torch")

import cpattn  # noqa: E402
import cpattn.torch as ct  # noqa: E402
from cpattn import Chunk, ops  # noqa: E402
from cpattn._library import lib  # noqa: E402
from cpattn.torch.steps import Pages, StepPlans  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or lib.cpa_device_count(1) == 0,
                                reason="no GPU, or a library without CUDA")
HEADS, KV_HEADS, DIM = 8, 2, 128
CUDA = {"dtype": "bf16", "backend": "cuda"}


def on_device(x):
    return torch.from_numpy(x).cuda().bfloat16() if x.dtype == np.float32 else torch.from_numpy(x).cuda()


def written(pages):
    pools = [on_device(np.nan_to_num(p)) for p in pages.pools]  # tensor cores multiply what they do not see by 0
    for k, v, slots in zip(pages.k, pages.v, pages.slots):
        ct.kv_write(on_device(k), on_device(v), *pools, on_device(slots))
    return pools


def rounded(x):
    return torch.from_numpy(x).bfloat16().float().numpy()


@pytest.mark.parametrize("queries", [[40, 1], [1, 1]])
def test_attend_on_the_current_stream(rng, queries):
    pages = Paged(rng, [100, 33], KV_HEADS, DIM)
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, **CUDA)
    plan.set(queries, [100, 33], pages.tables)
    q = peaky(rng, sum(queries), HEADS, DIM)
    with torch.cuda.stream(torch.cuda.Stream()):
        pools = written(pages)
        out, lse = ct.attend_with_lse(plan, on_device(q), *pools, window=50)
        out, lse = out.float().cpu().numpy(), lse.cpu().numpy()
    row = 0
    for k, v, n in zip(pages.k, pages.v, queries):
        want, want_lse = attend(rounded(q[row:row + n]), rounded(k), rounded(v), len(k) - n, window=50)
        np.testing.assert_allclose(out[row:row + n], want, atol=0.06, rtol=0.02)
        np.testing.assert_allclose(lse[row:row + n], want_lse, atol=0.02, rtol=0.01)
        row += n


@pytest.mark.parametrize("contiguous", [False, True])
def test_batches_of_heads_are_attended_as_they_lie(rng, contiguous):
    lengths, tokens = [100, 64], 32
    pages = Paged(rng, lengths, KV_HEADS, DIM)
    pools, rows = written(pages), on_device(peaky(rng, 2 * tokens, HEADS, DIM))
    q = rows.view(2, tokens, HEADS, DIM).transpose(1, 2)
    q = q.contiguous() if contiguous else q
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, **CUDA)
    plan.set([tokens] * 2, lengths, pages.tables, q_starts=ops.as_rows(q)[1])
    out, lse = ct.attend_with_lse(plan, q, *pools)
    assert out.shape == q.shape and out.stride() == q.stride()
    for s, n in enumerate(lengths):
        rows = q[s].transpose(0, 1).float().cpu()
        want, want_lse = attend(rows, rounded(pages.k[s]), rounded(pages.v[s]), n - tokens)
        np.testing.assert_allclose(out[s].transpose(0, 1).float().cpu(), want, atol=0.06, rtol=0.02)
        np.testing.assert_allclose(lse[s].T.cpu(), want_lse, atol=0.02, rtol=0.01)


def test_varlen_of_parts_of_a_product(rng):
    starts = [0, 50, 50, 178]
    product = on_device(peaky(rng, 178, HEADS + 2 * KV_HEADS, DIM))
    q, k, v = product.split([HEADS, KV_HEADS, KV_HEADS], 1)
    plan = cpattn.VarlenPlan(HEADS, KV_HEADS, DIM, backend="cuda")
    plan.set(torch.tensor(starts, dtype=torch.int32, device="cuda"), causal=True)
    out, lse = ct.varlen_with_lse(plan, q, k, v, causal=True, left=40)
    for a, b in zip(starts, starts[1:]):
        if a < b:
            want, want_lse = attend(*(x[a:b].float().cpu() for x in (q, k, v)), 0, window=40)
            np.testing.assert_allclose(out[a:b].float().cpu(), want, atol=0.06, rtol=0.02)
            np.testing.assert_allclose(lse[a:b].cpu(), want_lse, atol=0.02, rtol=0.01)


def test_graph_of_a_reserved_plan_follows_its_arrays(rng):
    pages = Paged(rng, [100, 33], KV_HEADS, DIM)
    pools, q = written(pages), on_device(peaky(rng, 2, HEADS, DIM))
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, **CUDA)
    plan.reserve(2, 112, pages.num_blocks)
    tables = torch.zeros((2, 7), dtype=torch.int32)
    for s, table in enumerate(pages.tables):
        tables[s, :len(table)] = torch.tensor(table)
    lengths, tables = torch.tensor([50, 20], dtype=torch.int32).cuda(), tables.cuda()
    plan.update(lengths, tables)
    ct.attend(plan, q, *pools)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(lengths, tables)
        out = ct.attend(plan, q, *pools)
    for tokens in ([100, 33], [64, 1]):
        lengths.copy_(torch.tensor(tokens, dtype=torch.int32))
        graph.replay()
        for s, n in enumerate(tokens):
            want = attend(q[s:s + 1].float().cpu(), rounded(pages.k[s][:n]), rounded(pages.v[s][:n]), n - 1)[0]
            np.testing.assert_allclose(out[s:s + 1].float().cpu(), want, atol=0.06, rtol=0.02)


def test_steps_are_set_from_tables_on_the_device(rng):
    pages = Paged(rng, [100, 33], KV_HEADS, DIM)
    heads_first = [x.transpose(1, 2) for x in written(pages)]
    steps = StepPlans(lambda: cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, **CUDA))
    tables = torch.full((2, 7), -1, dtype=torch.int32)
    for s, table in enumerate(pages.tables):
        tables[s, :len(table)] = torch.tensor(table)
    tables, view = tables.cuda(), Pages("head-major")
    results = []
    for queries in ([40, 1], [1, 1], [100, 33]):  # the third sets the plan of the first again
        plan = steps.take()
        plan.set(queries, [100, 33], tables, num_blocks=pages.num_blocks)
        q = on_device(peaky(rng, sum(queries), HEADS, DIM))
        results.append((queries, q, ops.attend(plan, q, view.of(*heads_first, 1.0, 1.0))))
    for queries, q, out in results:
        for k, v, rows, got in zip(pages.k, pages.v, q.split(queries), out.split(queries)):
            want = attend(rows.float().cpu(), rounded(k), rounded(v), len(k) - len(rows))[0]
            np.testing.assert_allclose(got.float().cpu(), want, atol=0.06, rtol=0.02)


def test_shards_merge_to_the_whole(rng):
    k, v, q = peaky(rng, 200, KV_HEADS, DIM), peaky(rng, 200, KV_HEADS, DIM), on_device(peaky(rng, 60, HEADS, DIM))
    states = []
    for rank in range(2):
        own = np.arange(200) % 2 == rank
        pools = [torch.zeros((7, 16, KV_HEADS, DIM), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        ct.kv_write(on_device(k[own]), on_device(v[own]), *pools, torch.arange(100, device="cuda"))
        plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, **CUDA)
        plan.set([60], [200], [range(7)], shard=(rank, 2, 1))
        states.append(ops.attend(plan, q[plan.order], cpattn.PagedCache(*pools), lse=True))
    out = ops.merge(states)[0].float().cpu()
    want = attend(q.float().cpu(), rounded(k), rounded(v), 140)[0][plan.order]
    np.testing.assert_allclose(out, want, atol=0.06, rtol=0.02)


def context_on_devices(rank, size):
    ordinal = rank % torch.cuda.device_count()  # ranks may share a GPU
    torch.cuda.set_device(ordinal)
    pages = Paged(np.random.default_rng(3), [200], KV_HEADS, DIM)
    communicator = cpattn.Communicator.from_env(os.environ, secret="x" * 16)
    with cpattn.Context(communicator, q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM, ordinal=ordinal, **CUDA) as context:
        own = context.positions(0, 200)
        pools = [torch.zeros((13, 16, KV_HEADS, DIM), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        k, v = (on_device(x[0][own]) for x in (pages.k, pages.v))
        ct.kv_write(k, v, *pools, torch.arange(len(own), device="cuda"))
        q = peaky(np.random.default_rng(4), 200, HEADS, DIM)
        for algorithm in ("pass-kv", "pass-q"):
            context.plan([Chunk(0, 200, range(-(-len(own) // 16)), algorithm)])
            out = context.attend(on_device(q[own]), cpattn.PagedCache(*pools))
            cpattn.synchronise(context.device)
            want = attend(rounded(q), rounded(pages.k[0]), rounded(pages.v[0]), 0)[0][own]
            np.testing.assert_allclose(out.float().cpu(), want, atol=0.06, rtol=0.02)


@pytest.mark.parametrize("size", [1, 2])
def test_context(size):
    ranks.run(context_on_devices, size)


def test_quantised_cache(rng):
    pages = Paged(rng, [100], KV_HEADS, DIM)
    scale = float(np.abs(pages.k[0]).max() / 448)
    pools = [torch.zeros(p.shape, dtype=torch.float8_e4m3fn, device="cuda") for p in pages.pools]
    cache = cpattn.PagedCache(*pools, k_scale=scale, v_scale=scale)
    ops.kv_write(cache, *(on_device(x[0]) for x in (pages.k, pages.v, pages.slots)))
    plan = cpattn.AttendPlan(HEADS, KV_HEADS, DIM, block_size=16, kv_dtype="fp8_e4m3", **CUDA)
    plan.set([1], [100], pages.tables)
    q = on_device(rng.standard_normal((1, HEADS, DIM)).astype(np.float32))
    out = ops.attend(plan, q, cache).float().cpu()
    want = attend(q.float().cpu(), rounded(pages.k[0]), rounded(pages.v[0]), 99)[0]
    np.testing.assert_allclose(out, want, atol=0.3)


LATENT, ROPE, SCALE = 512, 64, 192 ** -0.5


def attend_latents(q, k, first, **mask):
    """What rows over latents give, whose first columns are the values."""
    return attend(q.float().cpu(), rounded(k), rounded(k[..., :LATENT]), first, scale=SCALE, **mask)


@pytest.mark.parametrize("window", [0, 50])
def test_prompts_and_decode_over_latents(rng, window):
    pages = Paged(rng, [200, 33], 1, LATENT + ROPE, block_size=64, v_dim=1)
    pool = torch.zeros((pages.num_blocks, 64, 1, LATENT + ROPE), dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros((2, 4), dtype=torch.int32)
    for s, table in enumerate(pages.tables):
        tables[s, :len(table)] = torch.tensor(table)
    view, tables = Pages("token-major", LATENT).of(pool, None, 1.0, 0.0), tables.cuda()
    for k, slots in zip(pages.k, pages.slots):
        ops.kv_write(view, on_device(k), None, on_device(slots))
    shape = {"kv_heads": 1, "k_dim": LATENT + ROPE, "v_dim": LATENT, "v_in_k": True, "block_size": 64, **CUDA}
    steps, decode = StepPlans(lambda: cpattn.AttendPlan(HEADS, **shape)), cpattn.AttendPlan(HEADS, **shape)
    decode.reserve(2, 256, pages.num_blocks)
    for queries in ([150, 1], [1, 1], [1, 33]):
        plan = steps.take()
        plan.set(queries, [200, 33], tables, num_blocks=pages.num_blocks)
        plans = [plan]
        if queries == [1, 1]:
            decode.update(torch.tensor([200, 33], device="cuda"), tables)
            plans.append(decode)
        q = on_device(peaky(rng, sum(queries), HEADS, LATENT + ROPE))
        for plan in plans:
            out, lse = ops.attend(plan, q, view, lse=True, window=window, scale=SCALE)
            for k, rows, got, got_lse in zip(pages.k, q.split(queries), out.split(queries), lse.split(queries)):
                want, want_lse = attend_latents(rows, k, len(k) - len(rows), window=window)
                np.testing.assert_allclose(got.float().cpu(), want, atol=0.06, rtol=0.02)
                np.testing.assert_allclose(got_lse.cpu(), want_lse, atol=0.02, rtol=0.01)


def test_shards_of_latents_merge_to_the_whole(rng):
    k, q = peaky(rng, 200, 1, LATENT + ROPE), on_device(peaky(rng, 60, HEADS, LATENT + ROPE))
    states = []
    for rank in range(2):
        own = np.arange(200) % 2 == rank
        pool = torch.zeros((4, 32, 1, LATENT + ROPE), dtype=torch.bfloat16, device="cuda")
        cache = cpattn.PagedCache(pool, v_dim=LATENT)
        ops.kv_write(cache, on_device(k[own]), None, torch.arange(100, device="cuda"))
        plan = cpattn.AttendPlan(HEADS, 1, LATENT + ROPE, LATENT, v_in_k=True, block_size=32, **CUDA)
        plan.set([60], [200], [range(4)], shard=(rank, 2, 1))
        states.append(ops.attend(plan, q[plan.order], cache, lse=True, scale=SCALE))
    out = ops.merge(states)[0].float().cpu()
    np.testing.assert_allclose(out, attend_latents(q, k, 140)[0][plan.order], atol=0.06, rtol=0.02)
