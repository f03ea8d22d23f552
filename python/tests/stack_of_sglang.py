"""What tests of SGLang's back end have in common: a runner with its own pools, and requests whose tokens lie there."""

import types

import numpy as np
import torch
from reference import attend, peaky
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS, MIXED, DECODE = [70, 33, 5], [40, 1, 5], [1, 1, 1]
REQUESTS = [3, 1, 2]
SLOTS = 256
MODES = [(ForwardMode.EXTEND, MIXED), (ForwardMode.MIXED, MIXED), (ForwardMode.DECODE, DECODE)]


def pool_of(page=1, dtype=torch.float32, layout=None):
    return MHATokenToKVPool(size=SLOTS, page_size=page, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, layer_num=2,
                            device="cpu", enable_memory_saver=False, kv_cache_layout=layout)


def runner_of(page=1, dtype=torch.float32, cache_dtype=None, pool=None, **others):
    pool = pool or pool_of(page, cache_dtype or dtype)
    config = types.SimpleNamespace(num_attention_heads=HEADS, context_len=128)
    return types.SimpleNamespace(
        model_config=config, token_to_kv_pool=pool, req_to_token_pool=ReqToTokenPool(8, 128, "cpu", False), dtype=dtype,
        page_size=page, use_mla_backend=isinstance(pool, MLATokenToKVPool),
        spec_algorithm=SpeculativeAlgorithm.from_string(None), **others)


def layer_of(**options):
    return RadixAttention(HEADS, DIM, DIM ** -0.5, KV_HEADS, layer_id=1, **options)


class Sequences:
    """Requests whose tokens lie in pages of a poisoned pool, but for those that are new. From a pool of layers with
    windows those are gone that a window of ``kept`` tokens has left."""

    def __init__(self, rng, runner, layer, queries, kept=None):
        self.runner, self.layer, self.queries, self.kept = runner, layer, queries, kept
        kv_heads, k_dim, v_dim = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        self.k = [peaky(rng, n, kv_heads, k_dim) for n in LENGTHS]
        self.v = ([k[..., :v_dim] for k in self.k] if runner.use_mla_backend
                  else [peaky(rng, n, kv_heads, v_dim) for n in LENGTHS])
        pool = runner.token_to_kv_pool
        for part in [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]:
            for buffer in part.kv_buffer if runner.use_mla_backend else (*part.k_buffer, *part.v_buffer):
                buffer.view(torch.uint8).fill_(0xff)
        self.slots = self._place(rng)
        for request, slots in zip(REQUESTS, self.slots):
            runner.req_to_token_pool.req_to_token[request, :len(slots)] = slots.int()
            runner.req_to_token_pool.req_to_token[request, len(slots):] = 2 ** 30
        self.window_slots = self._map_windows(rng) if kept else None
        self.q = torch.from_numpy(peaky(rng, sum(queries), HEADS, k_dim)).to(runner.dtype)
        for s, (n, count) in enumerate(zip(LENGTHS, queries)):
            self.write(s, slice(0, n - count))

    def _place(self, rng):
        page = self.runner.page_size
        order = rng.permutation(np.arange(1, SLOTS // page)).tolist()
        tables = [np.array([order.pop() for _ in range(-(-n // page))]) for n in LENGTHS]
        return [torch.from_numpy(table[np.arange(n) // page] * page + np.arange(n) % page)
                for table, n in zip(tables, LENGTHS)]

    def _map_windows(self, rng):
        """Other slots for layers with windows, but for whole pages that windows of all new rows have left: slot 0."""
        pool, page = self.runner.token_to_kv_pool, self.runner.page_size
        mapping = torch.zeros(SLOTS + page + 1, dtype=torch.int64)
        placed = self._place(rng)
        for s, (n, count) in enumerate(zip(LENGTHS, self.queries)):
            gone = max(n - count + 1 - self.kept, 0) // page * page
            placed[s][:gone] = 0
            mapping[self.slots[s]] = placed[s]
        pool.register_mapping(mapping)
        return placed

    def write(self, s, tokens):
        k, v = (torch.from_numpy(x[s][tokens]).to(self.runner.dtype) for x in (self.k, self.v))
        there = None if self.window_slots is None else self.window_slots[s][tokens]
        self.runner.token_to_kv_pool.set_kv_buffer(self.layer, KVWriteLoc(self.slots[s][tokens], there), k, v)

    def new(self, parts):
        return [part[n - count:] for part, n, count in zip(parts, LENGTHS, self.queries)]

    def batch(self, mode):
        lengths = torch.tensor(LENGTHS)
        counts = torch.tensor(self.queries)
        return ForwardBatch(forward_mode=mode, batch_size=3, input_ids=torch.zeros(sum(self.queries)),
                            req_pool_indices=torch.tensor(REQUESTS), seq_lens=lengths, seq_lens_cpu=lengths,
                            out_cache_loc=torch.cat(self.new(self.slots)), seq_lens_sum=sum(LENGTHS),
                            extend_seq_lens=counts, extend_prefix_lens=lengths - counts,
                            extend_seq_lens_cpu=self.queries)

    def run(self, backend, mode, **options):
        batch = self.batch(mode)
        backend.init_forward_metadata(batch)
        k, v = (torch.from_numpy(np.concatenate(self.new(x))).to(self.runner.dtype) for x in (self.k, self.v))
        out = backend.forward(self.q.flatten(1), k.flatten(1), v.flatten(1), self.layer, batch, **options)
        return out.view(-1, HEADS, self.layer.v_head_dim).double().numpy()

    def expected(self, **options):
        q = np.split(self.q.double().numpy(), np.cumsum(self.queries)[:-1])
        k, v = ([torch.from_numpy(x).to(self.runner.dtype).double().numpy() for x in part] for part in (self.k, self.v))
        return np.concatenate([attend(q[s], k[s], v[s], n - c, scale=self.layer.scaling, **options)[0]
                               for s, (n, c) in enumerate(zip(LENGTHS, self.queries))])
