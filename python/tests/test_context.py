"""Context attention of several processes, against float64 on the whole sequences."""

import os

import numpy as np
import pytest
import ranks
from reference import attend, peaky

import cpattn
from cpattn import Chunk, ops
from cpattn._library import lib

HEADS, KV_HEADS, DIM, BLOCK = 5, 1, 32, 16
LENGTHS, COUNTS = [150, 83], [60, 1]


def sequences():
    rng = np.random.default_rng(7)
    return [(peaky(rng, n, HEADS, DIM), peaky(rng, n, KV_HEADS, DIM), peaky(rng, n, KV_HEADS, DIM)) for n in LENGTHS]


def fill(context, first_ranks=(0, 0)):
    """This rank's shard of the sequences; (cache, tables)."""
    pools = [np.full((32, BLOCK, KV_HEADS, DIM), np.nan, np.float32) for _ in range(2)]
    cache, tables, block = cpattn.PagedCache(*pools), [], 31
    for (_, k, v), n, first in zip(sequences(), LENGTHS, first_ranks):
        own = context.positions(0, n, first_rank=first)
        table = [block - i for i in range(-(-len(own) // BLOCK))]
        block -= len(table)
        slots = np.array([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(own))], np.int64)
        ops.kv_write(cache, k[own], v[own], slots)
        tables.append(table)
    return cache, tables


def expected(**mask):
    return [attend(q[n - c:], k, v, n - c, **mask) for (q, k, v), n, c in zip(sequences(), LENGTHS, COUNTS)]


def owned_rows(rank, size, algorithm):
    with cpattn.Context(cpattn.Communicator.from_env(os.environ, secret="x" * 16), q_heads=HEADS, kv_heads=KV_HEADS,
                        k_dim=DIM, max_rows=256) as context:
        assert (context.rank, context.size, context.head_slice) == (rank, size, (0, HEADS))
        cache, tables = fill(context, (0, 1))
        starts = [n - c for n, c in zip(LENGTHS, COUNTS)]
        own = [context.positions(s, n, first_rank=first) for s, n, first in zip(starts, LENGTHS, (0, 1))]
        rows = context.plan([Chunk(s, c, t, algorithm, rank=first)
                             for s, c, t, first in zip(starts, COUNTS, tables, (0, 1))])
        assert rows == sum(map(len, own))
        q = np.concatenate([x[0][p] for x, p in zip(sequences(), own)])
        for mask in ({}, {"window": 30}):
            out, lse = context.attend(q, cache, lse=True, **mask)
            want = [[part[np.array(p, int) - s] for part in whole]
                    for whole, p, s in zip(expected(**mask), own, starts)]
            np.testing.assert_allclose(out, np.concatenate([w[0] for w in want]), atol=3e-5)
            np.testing.assert_allclose(lse, np.concatenate([w[1] for w in want]), atol=3e-5)
        stats = context.stats()
        assert stats["bytes_sent"] > 0 and stats["prefill_kernels"] != ""
        assert {type(value) for value in stats.values()} == {int, float, str}


@pytest.mark.parametrize("algorithm", ["pass-kv", "pass-q", "auto"])
def test_owned_rows(algorithm):
    ranks.run(owned_rows, 3, algorithm)


def replicated_rows(rank, size):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with cpattn.Context(q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM, rows="replicated") as context:
        cache, tables = fill(context)
        context.plan([Chunk(n - c, c, t) for n, c, t in zip(LENGTHS, COUNTS, tables)])
        q = torch.from_numpy(np.concatenate([x[0][n - c:] for x, n, c in zip(sequences(), LENGTHS, COUNTS)]))
        out = context.attend(q, cache)
        begin, end = context.head_slice
        assert end - begin in (2, 3)
        want = np.concatenate([w[0] for w in expected()])
        np.testing.assert_allclose(out.numpy(), want[:, begin:end], atol=3e-5)
    dist.destroy_process_group()


def test_replicated_rows_over_a_group_of_torch():
    pytest.importorskip("torch")
    ranks.run(replicated_rows, 2)


def reserved_step(rank, size):
    with cpattn.Context(cpattn.Communicator.from_env(os.environ), q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM,
                        max_rows=8) as context:
        cache, tables = fill(context)
        context.reserve(2, 160, cache.num_blocks)
        padded = np.zeros((2, 10), np.int32)
        for s, table in enumerate(tables):
            padded[s, :len(table)] = table
        context.update(np.array(LENGTHS, np.int32), padded)
        q = np.stack([x[0][n - 1] for x, n in zip(sequences(), LENGTHS)])
        out = context.attend(q, cache)
        for s, n in enumerate(LENGTHS):
            mine = context.positions(n - 1, n)
            want = expected()[s][0][-1] if mine else np.zeros((HEADS, DIM))
            np.testing.assert_allclose(out[s], want, atol=3e-5)


def test_reserved_step():
    ranks.run(reserved_step, 2)


def a_rank_that_differs(rank, size):
    with pytest.raises(cpattn.InvalidError, match="max_rows"):
        cpattn.Context(cpattn.Communicator.from_env(os.environ), q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM,
                       max_rows=8 + rank)


def test_options_that_differ_are_refused_on_all_ranks():
    ranks.run(a_rank_that_differs, 2)


def test_tables_that_are_too_short_are_refused():
    context = cpattn.Context(q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM)
    with pytest.raises(ValueError, match="2 blocks of chunk 0, whose tokens on rank 0 take 3"):
        context.plan([Chunk(0, 33, [0, 1])])


def test_numbers_that_would_wrap_are_refused():
    with cpattn.Context(q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM) as context:
        with pytest.raises(ValueError, match="blocks are 0 to 4294967297"):
            context.plan([Chunk(0, 20, [0, 2**32 + 1])])
        for chunk in (Chunk(2**64, 1, [0]), Chunk(0, 2**64 + 1, [0]), Chunk(0, 1, [0], rank=2**32)):
            with pytest.raises(ValueError, match="expected none below 0, a rank below 1"):
                context.plan([chunk])


def test_a_communicator_ends_after_its_contexts(monkeypatch):
    ended = []
    for kind in ("comm", "context"):
        destroy = getattr(lib, f"cpa_{kind}_destroy")
        monkeypatch.setattr(lib, f"cpa_{kind}_destroy", lambda x, k=kind, d=destroy: (ended.append(k), d(x)))
    communicator = cpattn.Communicator.alone()
    closed, left = (cpattn.Context(communicator, q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM) for _ in range(2))
    closed.close()
    closed.close()
    assert ended == ["context"]
    communicator.__del__()  # as the collector may, before the contexts of its cycle
    assert ended == ["context", "context", "comm"]
    del communicator.handle
    left.close()
    assert ended == ["context", "context", "comm"]
