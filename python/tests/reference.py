"""Attention in float64, and inputs that show a wrong mask or a lost key."""

import numpy as np


def peaky(rng, *shape):
    """Rows of normal numbers, a few of them four times as large: some keys weigh much more than others."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape[0]) < 0.1] *= 4
    return x


def visible(position, tokens, causal=True, window=0, sinks=0):
    t = np.arange(tokens)
    seen = (t <= position) if causal else np.ones(tokens, bool)
    if window:
        seen &= (position - t < window) | (t < sinks)
    return seen


def attend(q, k, v, first, scale=None, softcap=0.0, sink_logits=None, **mask):
    """Rows [rows, heads, dim] at the positions from `first` on, over keys [tokens, kv_heads, dim]; (O, LSE)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((rows, heads), -np.inf)
    for i in range(rows):
        seen = visible(first + i, k.shape[0], **mask)
        for h in range(heads):
            s = k[seen, h // group] @ q[i, h] * (dim ** -0.5 if scale is None else scale)
            if softcap:
                s = softcap * np.tanh(s / softcap)
            if s.size == 0:
                continue
            top = s.max()
            weight = np.exp(s - top)
            lse[i, h] = top + np.log(weight.sum())
            total = weight.sum() + (np.exp(sink_logits[h] - top) if sink_logits is not None else 0)
            out[i, h] = weight @ v[seen, h // group] / total
    return out, lse


class Paged:
    """Sequences in pages of a poisoned pool, in an order of blocks that is not theirs."""

    def __init__(self, rng, lengths, kv_heads, dim, block_size=16, v_dim=None, spare=3):
        self.k = [peaky(rng, n, kv_heads, dim) for n in lengths]
        self.v = [peaky(rng, n, kv_heads, v_dim or dim) for n in lengths]
        counts = [-(-n // block_size) for n in lengths]
        order = rng.permutation(sum(counts) + spare).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in counts]
        self.num_blocks = sum(counts) + spare
        self.pools = [np.full((self.num_blocks, block_size, kv_heads, d), np.nan, np.float32)
                      for d in (dim, v_dim or dim)]
        self.slots = [np.array([table[t // block_size] * block_size + t % block_size for t in range(n)], np.int64)
                      for table, n in zip(self.tables, lengths)]
