"""The back end of latents in vLLM's own layers of multi-head latent attention, on the host, against float64."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import ranks
from reference import Paged, attend, peaky

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from stack_of_vllm import BLOCK, configure, join, tensors  # noqa: E402  # which sets the platform
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402

HEADS, LATENT, ROPE, NOPE, VALUE = 4, 64, 16, 24, 32
SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = [70, 33, 5]
MIXED, DECODE = [40, 1, 5], [1, 1, 1]


@pytest.fixture(scope="module", autouse=True)
def backend():
    load_general_plugins()
    return AttentionBackendEnum["CPATTN_MLA"].get_class()


class Projection(torch.nn.Module):
    """W_kv_b of some heads, as layers take it."""

    quant_method = None

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


class Layer:
    """A layer of vLLM's over a poisoned cache of latents, and the builder of its metadata."""

    def __init__(self, config, num_blocks, w_kv_b, **options):
        self.config = config
        heads = w_kv_b.shape[0] // (NOPE + VALUE)
        with set_current_vllm_config(config):
            self.layer = MLAAttention(heads, SCALE, NOPE, ROPE, VALUE, None, LATENT, Projection(w_kv_b),
                                      cache_config=config.cache_config, prefix="layers.0.attn",
                                      attn_backend=AttentionBackendEnum["CPATTN_MLA"].get_class(), **options)
            self.layer.process_weights_after_loading(config.model_config.dtype)
            self.spec = self.layer.get_kv_cache_spec(config).copy_with_new_block_size(BLOCK)
            poison = torch.full((num_blocks, self.spec.page_size_bytes), 0xff, dtype=torch.uint8)
            self.layer.bind_kv_cache(poison.view(self.spec.dtype).view(num_blocks, 1, BLOCK, LATENT + ROPE))
            self.builder = self.layer.attn_backend.get_builder_cls()(
                self.spec, ["layers.0.attn"], config, torch.device("cpu"))

    def write(self, latents, slots):
        self.layer.update_kv_cache(latents[:, 0, :LATENT], latents[..., LATENT:], self.layer.kv_cache, slots, None,
                                   self.layer.kv_cache_dtype, self.layer._k_scale)

    def step(self, q, latents, slots, query_lens, lengths, tables, capture=False):
        starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
        padded = torch.full((len(tables), 256 // BLOCK), 2 ** 30, dtype=torch.int32)
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
            out = self.layer(q, latents[:, 0, :LATENT], latents[..., LATENT:],
                             output_shape=(len(q), q.shape[1] * VALUE))
        return out.view(len(q), -1, VALUE)


def weights(rng):
    return rng.standard_normal((HEADS * (NOPE + VALUE), LATENT)).astype(np.float32) * LATENT ** -0.5


def expand(latents, w_kv_b):
    """Keys and values of all heads, ``[tokens, heads, ...]``, in float64."""
    c, rope = latents[:, 0, :LATENT].astype(np.float64), latents[:, :, LATENT:].astype(np.float64)
    both = (c @ w_kv_b.astype(np.float64).T).reshape(len(c), -1, NOPE + VALUE)
    return np.concatenate([both[..., :NOPE], np.broadcast_to(rope, (*both.shape[:2], ROPE))], -1), both[..., NOPE:]


def run(layer, pages, w_kv_b, queries, q, dtype=torch.float32, **mask):
    """The results of the last tokens of the sequences, and what they should be."""
    new = [slice(n - c, n) for n, c in zip(LENGTHS, queries)]
    for latents, slots, s in zip(pages.k, pages.slots, new):
        layer.write(*tensors(dtype, latents[:s.start]), torch.from_numpy(slots[:s.start]))
    rows, slots = (np.concatenate([x[s] for x, s in zip(part, new)]) for part in (pages.k, pages.slots))
    q, rows = tensors(dtype, q, rows)
    out = layer.step(q, rows, torch.from_numpy(slots), queries, LENGTHS, pages.tables)
    starts = np.cumsum([0, *queries])
    want = [attend(q[a:b].double().numpy(), *expand(latents, w_kv_b), len(latents) - (b - a), scale=SCALE, **mask)[0]
            for latents, a, b in zip(pages.k, starts, starts[1:])]
    return out.double().numpy(), np.concatenate(want)


def sequences(rng):
    return Paged(rng, LENGTHS, 1, LATENT + ROPE)


@pytest.mark.parametrize("queries", [MIXED, DECODE])
@pytest.mark.parametrize("window", [None, 20])
def test_prompts_and_decode_over_latents(rng, queries, window):
    pages, w = sequences(rng), weights(rng)
    layer = Layer(configure(), pages.num_blocks, torch.from_numpy(w), sliding_window=window)
    got, want = run(layer, pages, w, queries, peaky(rng, sum(queries), HEADS, NOPE + ROPE), window=window or 0)
    np.testing.assert_allclose(got, want, atol=5e-5)


def test_bf16(rng):
    pages, w = sequences(rng), torch.from_numpy(weights(rng)).bfloat16()
    pages.k = [torch.from_numpy(k).bfloat16().float().numpy() for k in pages.k]
    layer = Layer(configure("bfloat16"), pages.num_blocks, w)
    got, want = run(layer, pages, w.float().numpy(), MIXED, peaky(rng, sum(MIXED), HEADS, NOPE + ROPE), torch.bfloat16)
    np.testing.assert_allclose(got, want, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("queries", [MIXED, DECODE])
def test_fp8_cache_with_a_scale(rng, queries):
    pages, w = sequences(rng), weights(rng)
    layer = Layer(configure(cache_dtype="fp8"), pages.num_blocks, torch.from_numpy(w))
    layer.layer._k_scale.fill_(0.05)
    q = peaky(rng, sum(queries), HEADS, NOPE + ROPE)
    got, _ = run(layer, pages, w, queries, q)
    starts = np.cumsum([0, *queries])
    kept = [(torch.from_numpy(k) / 0.05).to(torch.float8_e4m3fn).float().numpy() * 0.05 for k in pages.k]
    want = [attend(q[a:b], *expand(k, w), len(k) - (b - a), scale=SCALE)[0]
            for k, a, b in zip(kept, starts, starts[1:])]
    np.testing.assert_allclose(got, np.concatenate(want), atol=2e-4)


def test_steps_of_a_graph_have_rows_without_a_sequence(rng):
    pages, w, config = sequences(rng), weights(rng), configure()
    layer = Layer(config, pages.num_blocks, torch.from_numpy(w))
    for latents, slots in zip(pages.k, pages.slots):
        layer.write(torch.from_numpy(latents), torch.from_numpy(slots))
    assert layer.builder.get_cudagraph_support(config, layer.spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    q = peaky(rng, 4, HEADS, NOPE + ROPE)
    nothing, rows = torch.full((4,), -1), torch.zeros((4, 1, LATENT + ROPE))
    plans = set()
    for lengths, capture in (([1, 1, 1, 1], True), ([*LENGTHS, 0], False), ([50, 17, 0, 0], False)):
        tables = [*pages.tables, pages.tables[0]]
        out = layer.step(torch.from_numpy(q), rows, nothing, [1] * 4, lengths, tables, capture)
        plans.add(layer.builder._decode)
        for s, n in enumerate(lengths[:3]):
            want = attend(q[s:s + 1], *expand(pages.k[s][:n], w), n - 1, scale=SCALE)[0] if n else 0
            np.testing.assert_allclose(out[s:s + 1], want, atol=5e-5)
    assert len(plans) == 1


def join_states(partial_output, partial_lse, *, seq_lens, query_start_loc, group):
    """What the layer's kernels for CUDA do: own heads of the states of all ranks, joined by natural logarithms."""
    outs, lses = (group.all_gather(x.contiguous(), dim=0).view(group.world_size, *x.shape)
                  for x in (partial_output, partial_lse))
    weight = torch.softmax(lses, 0).nan_to_num()
    own = group.rank_in_group * (partial_lse.shape[1] // group.world_size)
    return (outs * weight[..., None]).sum(0)[:, own:own + partial_lse.shape[1] // group.world_size].contiguous()


def shared(rank, size, interleave, window, queries):
    """Each rank has half of the heads, and every other run of the tokens."""
    from vllm.distributed.parallel_state import get_dcp_group

    load_general_plugins()
    rng = np.random.default_rng(5)
    config = configure(tensor_parallel_size=size, decode_context_parallel_size=size,
                       cp_kv_cache_interleave_size=interleave)
    with join(config, rank, size):
        pages, w = sequences(rng), weights(rng)
        q = peaky(rng, sum(queries), HEADS, NOPE + ROPE)
        own = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        own_w = w.reshape(HEADS, NOPE + VALUE, LATENT)[own].reshape(-1, LATENT)
        layer = Layer(config, pages.num_blocks, torch.from_numpy(own_w), sliding_window=window)
        impl, manager = layer.layer.impl, layer.layer.dcp_manager
        assert impl.need_to_return_lse_for_decode and impl.lse_base_on_e and impl.dcp_world_size == size
        manager.combine = lambda o, lse, **others: join_states(o, lse, **others, group=get_dcp_group())
        for s, n in enumerate(LENGTHS):
            owner = np.arange(n) // interleave % size
            local = np.cumsum(owner == rank) - 1
            slots = np.array(pages.tables[s])[local // BLOCK] * BLOCK + local % BLOCK
            pages.slots[s] = np.where(owner == rank, slots, -1)
        got, want = run(layer, pages, own_w, queries, q[:, own], window=window or 0)
        np.testing.assert_allclose(got, want, atol=5e-5)


@pytest.mark.parametrize("interleave, window, queries", [(1, None, MIXED), (BLOCK, None, DECODE), (1, 20, DECODE)])
def test_states_are_joined_where_ranks_share_tokens(interleave, window, queries):
    ranks.run(shared, 2, interleave, window, queries)


def test_vllm_finds_the_configurations_valid(backend):
    def reasons(**options):
        asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
                 **options}
        return backend.validate_configuration(device_capability=DeviceCapability(9, 0),
                                              **AttentionSelectorConfig(**asked)._asdict())

    assert backend.get_name() == "CPATTN_MLA" and backend.is_mla()
    for options in ({}, {"kv_cache_dtype": "fp8"}, {"has_sliding_window": True}, {"use_dcp": True}):
        assert reasons(**options) == [], options
    for options in ({"use_mla": False}, {"use_sparse": True}, {"kv_cache_dtype": "fp8_ds_mla"}, {"use_pcp": True},
                    {"has_sink": True}, {"head_size": 580}):
        assert len(reasons(**options)) == 1, options


def test_processes_that_are_spawned_know_the_name(tmp_path):
    from vllm.config.attention import AttentionConfig

    config = tmp_path / "config"
    config.write_bytes(pickle.dumps(AttentionConfig(backend="cpattn_mla")))  # as --attention-backend gives it
    code = f"import pickle; print(pickle.load(open({str(config)!r}, 'rb')).backend.get_class().get_name())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.split()[-1:] == ["CPATTN_MLA"], found.stderr


@pytest.mark.parametrize("options, line", [
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype 'fp8_ds_mla'; expected"),
    ({"indexer": object()}, "a layer with an indexer; expected one that attends all keys"),
    ({"logits_soft_cap": 30.0}, "ALiBi or a soft cap over latents; expected neither"),
])
def test_what_there_is_not_is_refused_at_construction(backend, options, line):
    asked = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None,
             "attn_type": "decoder", "kv_sharing_target_layer_name": None, "kv_lora_rank": LATENT, **options}
    with pytest.raises(NotImplementedError, match="^cpattn: " + line):
        backend.get_impl_cls()(HEADS, LATENT + ROPE, 1.0, 1, **asked)
