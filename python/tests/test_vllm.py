"""The back end in vLLM's own layers, metadata and entry points, on the host, against float64."""

import types

import numpy as np
import pytest
import ranks
from reference import Paged, attend, peaky

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from stack_of_vllm import BLOCK, configure, join, tensors  # noqa: E402  # which sets the platform
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.kv_cache_interface import compute_layout_strides  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = [70, 33, 5]


@pytest.fixture(scope="module", autouse=True)
def backend():
    load_general_plugins()
    return AttentionBackendEnum.CUSTOM.get_class()


class Layer:
    """A layer of vLLM's with a poisoned cache, and the builder of its metadata."""

    def __init__(self, config, num_blocks, layout="LBHNC", heads=HEADS, kv_heads=KV_HEADS, **options):
        self.config = config
        backend = AttentionBackendEnum.CUSTOM.get_class()
        with set_current_vllm_config(config):
            self.attention = Attention(heads, DIM, DIM ** -0.5, kv_heads, prefix="layers.0.attn",
                                       cache_config=config.cache_config, attn_backend=backend, **options)
            self.spec = self.attention.get_kv_cache_spec(config).copy_with_new_block_size(BLOCK)
            self.attention.kv_cache = self.cache(num_blocks, KVCacheLayout[layout])
            self.builder = backend.get_builder_cls()(self.spec, ["layers.0.attn"], config, torch.device("cpu"))

    def cache(self, num_blocks, layout):
        """[blocks, heads, tokens, 2 * dim], the second of three layers in one memory that is NaN all over."""
        strides = compute_layout_strides(self.spec, num_blocks, 3, layout)
        memory = torch.full((3 * num_blocks * self.spec.page_size_bytes,), 0xff, dtype=torch.uint8)
        shape = (3, num_blocks, self.spec.num_heads, BLOCK, self.spec.state_content_size_bytes)
        return torch.as_strided(memory, shape, strides)[1].view(self.spec.dtype)

    def step(self, q, k, v, slots, query_lens, lengths, tables, capture=False):
        starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
        width = max(map(len, tables))
        padded = torch.full((len(tables), 256 // BLOCK), 2 ** 30, dtype=torch.int32)
        assert width <= padded.shape[1]
        for s, table in enumerate(tables):
            padded[s, :len(table)] = torch.tensor(table)
        lengths = torch.tensor(lengths, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(tables),
            num_actual_tokens=sum(query_lens), max_query_len=max(query_lens), max_seq_len=int(lengths.max()),
            block_table_tensor=padded, slot_mapping=slots, seq_lens_cpu_upper_bound=lengths)
        build = self.builder.build_for_cudagraph_capture if capture else lambda m: self.builder.build(0, m)
        metadata = build(common)
        with set_current_vllm_config(self.config), set_forward_context(
                {"layers.0.attn": metadata}, self.config, slot_mapping={"layers.0.attn": slots}):
            return self.attention(*(x.flatten(1) for x in (q, k, v))).view(len(q), -1, DIM)

    def write(self, k, v, slots):
        self.attention.impl.do_kv_cache_update(self.attention, k, v, self.attention.kv_cache, slots)


def exact(x):
    return x.double().numpy()


def run(layer, pages, queries, q, dtype=torch.float32, **options):
    """The results of the last tokens of the sequences, and what they should be."""
    new = [slice(n - c, n) for n, c in zip(LENGTHS, queries)]
    rows = [np.concatenate([x[s] for x, s in zip(part, new)]) for part in (pages.k, pages.v, pages.slots)]
    for k, v, slots, s in zip(pages.k, pages.v, pages.slots, new):
        layer.write(*tensors(dtype, k[:s.start], v[:s.start]), torch.from_numpy(slots[:s.start]))
    q, k, v = tensors(dtype, q, *rows[:2])
    out = layer.step(q, k, v, torch.from_numpy(rows[2]), queries, LENGTHS, pages.tables)
    want, row = [], 0
    for k, v, count in zip(pages.k, pages.v, queries):
        k, v = (exact(x) for x in tensors(dtype, k, v))
        want.append(attend(exact(q[row:row + count]), k, v, len(k) - count, **options)[0])
        row += count
    return exact(out), np.concatenate(want)


MIXED, DECODE = [40, 1, 5], [1, 1, 1]


@pytest.mark.parametrize("queries", [MIXED, DECODE])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLNHC", "BHLNC"])
def test_layouts_of_mixed_batches(rng, layout, queries):
    pages = Paged(rng, LENGTHS, KV_HEADS, DIM)
    layer = Layer(configure(), pages.num_blocks, layout)
    got, want = run(layer, pages, queries, peaky(rng, sum(queries), HEADS, DIM))
    np.testing.assert_allclose(got, want, atol=3e-5)


@pytest.mark.parametrize("queries", [MIXED, DECODE])
def test_window_cap_and_sinks(rng, queries):
    pages = Paged(rng, LENGTHS, KV_HEADS, DIM)
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    layer = Layer(configure(), pages.num_blocks, per_layer_sliding_window=20, logits_soft_cap=7.0,
                  sinks=torch.from_numpy(sinks))
    got, want = run(layer, pages, queries, peaky(rng, sum(queries), HEADS, DIM), window=20, softcap=7.0,
                    sink_logits=sinks)
    np.testing.assert_allclose(got, want, atol=3e-5)


def test_alibi(rng):
    pages = Paged(rng, [70], KV_HEADS, DIM)
    slopes = [0.5, 0.25, 0.125, 0.0625]
    layer = Layer(configure(), pages.num_blocks, alibi_slopes=slopes)
    layer.write(*tensors(torch.float32, pages.k[0], pages.v[0]), torch.from_numpy(pages.slots[0]))
    q = peaky(rng, 1, HEADS, DIM)
    keys = torch.zeros((1, KV_HEADS, DIM))
    out = layer.step(torch.from_numpy(q), keys, keys, torch.tensor([-1]), [1], [70], pages.tables)
    k = pages.k[0].astype(np.float64).repeat(HEADS // KV_HEADS, 1)
    scores = np.einsum("thd,hd->ht", k, q[0]) / 4 + np.outer(slopes, np.arange(70) - 69)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    values = pages.v[0].astype(np.float64).repeat(HEADS // KV_HEADS, 1)
    want = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)
    np.testing.assert_allclose(out[0], want, atol=3e-5)


def test_bf16(rng):
    pages = Paged(rng, LENGTHS, KV_HEADS, DIM)
    layer = Layer(configure("bfloat16"), pages.num_blocks)
    got, want = run(layer, pages, MIXED, peaky(rng, sum(MIXED), HEADS, DIM), torch.bfloat16)
    np.testing.assert_allclose(got, want, atol=0.06, rtol=0.01)


@pytest.mark.parametrize("queries", [MIXED, DECODE])
def test_fp8_cache_with_scales(rng, queries):
    pages = Paged(rng, LENGTHS, KV_HEADS, DIM)
    layer = Layer(configure(cache_dtype="fp8"), pages.num_blocks, "LBNHC")
    assert layer.attention.kv_cache.dtype == torch.uint8
    scales = {"k": 0.05, "v": 0.03}
    for name, scale in scales.items():
        setattr(layer.attention, f"_{name}_scale_float", scale)
    kept = {name: [(torch.from_numpy(x) / scales[name]).to(torch.float8_e4m3fn).float().numpy() * scales[name]
                   for x in getattr(pages, name)] for name in scales}
    q = peaky(rng, sum(queries), HEADS, DIM)
    got, _ = run(layer, pages, queries, q)
    starts = np.cumsum([0, *queries])
    want = [attend(q[a:b], k, v, len(k) - (b - a))[0]
            for k, v, a, b in zip(kept["k"], kept["v"], starts, starts[1:])]
    np.testing.assert_allclose(got, np.concatenate(want), atol=1e-4)


def test_steps_of_a_graph_have_rows_without_a_sequence(rng):
    pages = Paged(rng, LENGTHS, KV_HEADS, DIM)
    config = configure()
    layer = Layer(config, pages.num_blocks)
    for k, v, slots in zip(pages.k, pages.v, pages.slots):
        layer.write(*tensors(torch.float32, k, v), torch.from_numpy(slots))
    assert layer.builder.get_cudagraph_support(config, layer.spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    q = torch.from_numpy(peaky(rng, 4, HEADS, DIM))
    nothing = torch.full((4,), -1)
    keys = torch.zeros((4, KV_HEADS, DIM))
    for lengths, capture in (([1, 1, 1, 1], True), ([*LENGTHS, 0], False), ([50, 17, 0, 0], False)):
        tables = [*pages.tables, pages.tables[0]]
        out = layer.step(q, keys, keys, nothing, DECODE + [1], lengths, tables, capture)
        for s, n in enumerate(lengths[:3]):
            want = attend(q[s:s + 1], pages.k[s][:n], pages.v[s][:n], n - 1)[0] if n else 0
            np.testing.assert_allclose(out[s:s + 1], want, atol=3e-5)


def shared(rank, size, interleave, window, queries):
    """Each rank has half of the query heads, the one KV head, and every other run of the tokens."""
    load_general_plugins()
    rng = np.random.default_rng(5)
    config = configure(tensor_parallel_size=size, decode_context_parallel_size=size,
                       cp_kv_cache_interleave_size=interleave)
    with join(config, rank, size):
        pages = Paged(rng, LENGTHS, 1, DIM)
        sinks = rng.standard_normal(HEADS).astype(np.float32)
        own = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        layer = Layer(config, pages.num_blocks, heads=HEADS // size, kv_heads=1, per_layer_sliding_window=window,
                      sinks=torch.from_numpy(sinks[own]))
        impl = layer.attention.impl
        assert impl.need_to_return_lse_for_decode and impl.lse_base_on_e and impl.dcp_world_size == size
        for s, n in enumerate(LENGTHS):
            owner = np.arange(n) // interleave % size
            local = np.cumsum(owner == rank) - 1
            slots = np.array(pages.tables[s])[local // BLOCK] * BLOCK + local % BLOCK
            pages.slots[s] = np.where(owner == rank, slots, -1)
        q = peaky(rng, sum(queries), HEADS, DIM)
        got, want = run(layer, pages, queries, q[:, own], window=window or 0, sink_logits=sinks[own])
        np.testing.assert_allclose(got, want, atol=3e-5)
        support = layer.builder.get_cudagraph_support(config, layer.spec)
        assert support is (AttentionCGSupport.NEVER if window else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)


@pytest.mark.parametrize("interleave, window, queries", [(1, None, MIXED), (BLOCK, None, DECODE), (1, 20, DECODE)])
def test_ranks_share_the_tokens_of_sequences(interleave, window, queries):
    ranks.run(shared, 2, interleave, window, queries)


def test_vllm_finds_the_configurations_valid(backend):
    def reasons(**options):
        asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, **options}
        return backend.validate_configuration(device_capability=DeviceCapability(9, 0),
                                              **AttentionSelectorConfig(**asked)._asdict())

    assert backend.get_name() == "CUSTOM" and backend.__module__ == "cpattn.vllm.backend"
    for options in ({}, {"kv_cache_dtype": "fp8"}, {"has_sink": True, "has_sliding_window": True}, {"use_dcp": True},
                    {"block_size": 48}):
        assert reasons(**options) == [], options
    for options in ({"use_mla": True}, {"kv_cache_dtype": "fp8_e5m2"}, {"use_pcp": True}, {"use_non_causal": True},
                    {"attn_type": "encoder_only"}, {"head_size": 100}, {"block_size": 8}):
        assert len(reasons(**options)) == 1, options


@pytest.mark.parametrize("options, line", [
    ({"attn_type": "encoder_only"}, "a layer of attn_type encoder_only; expected 'decoder'"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype 'fp8_e5m2'; expected"),
    ({"use_alibi_sqrt": True}, "a layer with use_alibi_sqrt; expected attention without"),
])
def test_what_there_is_not_is_refused_at_construction(backend, options, line):
    with pytest.raises(NotImplementedError, match="^cpattn: " + line):
        backend.get_impl_cls()(HEADS, DIM, 1.0, KV_HEADS, **options)


def test_refused_in_a_step(backend):
    layer = Layer(configure(), 4)
    with pytest.raises(NotImplementedError, match="cpattn: causal is False of a step"):
        layer.builder.build(0, types.SimpleNamespace(causal=False))
    q = torch.zeros((1, HEADS, DIM))
    with pytest.raises(NotImplementedError, match="cpattn: quantised results"):
        layer.attention.impl.forward(layer.attention, q, q, q, None, None, q, output_scale=torch.ones(1))
    assert layer.attention.impl.forward(layer.attention, q, q, q, None, None, q + 1).abs().max() == 0


def test_plans_of_decode_follow_the_caches(rng):
    pages = Paged(rng, LENGTHS, KV_HEADS, DIM)
    layer = Layer(configure(), 1)  # as where memory is measured
    q, keys, nothing = torch.zeros((1, HEADS, DIM)), torch.zeros((1, KV_HEADS, DIM)), torch.tensor([-1])
    layer.step(q, keys, keys, nothing, [1], [1], [[0]])
    layer.attention.kv_cache = layer.cache(pages.num_blocks, KVCacheLayout.LBHNC)
    got, want = run(layer, pages, DECODE, peaky(rng, 3, HEADS, DIM))
    np.testing.assert_allclose(got, want, atol=3e-5)
