"""The back end over SGLang's pools of latents, and of layers with windows, on the host, against float64."""

import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from stack_of_sglang import (DECODE, DIM, HEADS, KV_HEADS, MIXED, MODES, SLOTS, Sequences, layer_of,  # noqa: E402
                             pool_of, runner_of)

LATENT, ROPE = 64, 16
SCALE = 40 ** -0.5  # of the heads that were absorbed
WINDOW = 20


@pytest.fixture(autouse=True)
def one_rank():
    load_plugins()
    with get_parallel().override(attn_tp_size=1, attn_dcp_size=1, dcp_enabled=False):
        yield


def latent_runner(page=1, dtype=torch.float32, cache_dtype=None):
    pool = MLATokenToKVPool(SLOTS, page, cache_dtype or dtype, LATENT, ROPE, 2, "cpu", False)
    return runner_of(page, dtype, pool=pool)


def latent_layer(**options):
    return RadixAttention(HEADS, LATENT + ROPE, SCALE, 1, layer_id=1, v_head_dim=LATENT, **options)


@pytest.mark.parametrize("mode, queries", MODES)
@pytest.mark.parametrize("page, window", [(1, None), (16, None), (16, WINDOW)])
def test_latents(rng, mode, queries, page, window):
    runner, layer = latent_runner(page), latent_layer(**({"sliding_window_size": window - 1} if window else {}))
    sequences = Sequences(rng, runner, layer, queries)
    got = sequences.run(ATTENTION_BACKENDS["cpattn"](runner), mode)
    np.testing.assert_allclose(got, sequences.expected(window=window or 0), atol=5e-5)


@pytest.mark.parametrize("mode, queries", MODES[1:])
def test_latents_of_fp8(rng, mode, queries):
    runner, layer = latent_runner(16, cache_dtype=torch.float8_e4m3fn), latent_layer()
    sequences = Sequences(rng, runner, layer, queries)
    got = sequences.run(ATTENTION_BACKENDS["cpattn"](runner), mode)
    sequences.k[:] = [torch.from_numpy(k).to(torch.float8_e4m3fn).float().numpy() for k in sequences.k]
    sequences.v[:] = [k[..., :LATENT] for k in sequences.k]
    np.testing.assert_allclose(got, sequences.expected(), atol=2e-4)


def test_layers_of_deepseek_attend_absorbed_by_this_back_end():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    ATTENTION_BACKENDS["cpattn"](latent_runner())
    handler = AttentionBackendRegistry.get_handler("cpattn")
    assert handler(types.SimpleNamespace(), types.SimpleNamespace()) is AttnForwardMethod.MLA


def window_runner(page, window_slots=128, **options):
    pool = SWAKVPool(SLOTS, window_slots, page, torch.float32, KV_HEADS, DIM, [1], [0], "cpu", **options)
    return runner_of(page, pool=pool)


@pytest.mark.parametrize("mode, queries", MODES)
@pytest.mark.parametrize("page", [1, 16])
def test_a_pool_of_layers_with_windows(rng, mode, queries, page):
    runner = window_runner(page, SLOTS)
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    windowed = layer_of(sliding_window_size=WINDOW - 1)
    sequences = Sequences(rng, runner, windowed, queries, kept=WINDOW)
    got = sequences.run(backend, mode)
    np.testing.assert_allclose(got, sequences.expected(window=WINDOW), atol=3e-5)
    full = layer_of()
    full.layer_id = 0
    sequences = Sequences(rng, runner, full, queries, kept=WINDOW)
    np.testing.assert_allclose(sequences.run(backend, mode), sequences.expected(), atol=3e-5)


def test_what_a_graph_holds_of_windows_stays_where_it_is(rng):
    runner = window_runner(16, SLOTS)
    backend, layer = ATTENTION_BACKENDS["cpattn"](runner), layer_of(sliding_window_size=WINDOW - 1)
    backend.init_cuda_graph_state(4, 4)
    sequences = Sequences(rng, runner, layer, DECODE, kept=WINDOW)
    padded = sequences.batch(ForwardMode.DECODE)
    padded.req_pool_indices, padded.seq_lens, padded.out_cache_loc = (
        torch.tensor([0] * 4), torch.tensor([1] * 4), torch.tensor([0] * 4))
    padded.seq_lens_cpu = None
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    held = backend.window_plans
    plan, tables, slots = held.plan, held.tables.data_ptr(), held.slots.data_ptr()
    got = sequences.run(backend, ForwardMode.DECODE)
    np.testing.assert_allclose(got, sequences.expected(window=WINDOW), atol=3e-5)
    assert (held.plan, held.tables.data_ptr(), held.slots.data_ptr()) == (plan, tables, slots)


def test_pools_that_are_refused(rng):
    runner = latent_runner()
    runner.token_to_kv_pool.use_dsa = True
    with pytest.raises(NotImplementedError, match="cpattn: a cache of torch.float32; expected .* all keys of which"):
        ATTENTION_BACKENDS["cpattn"](runner)
    runner.token_to_kv_pool = pool_of()
    with pytest.raises(NotImplementedError, match="cpattn: a pool of MHATokenToKVPool; expected MLATokenToKVPool"):
        ATTENTION_BACKENDS["cpattn"](runner)
    mixed = window_runner(1, full_kv_pool_class=type("Other", (MHATokenToKVPool,), {}))
    with pytest.raises(NotImplementedError, match="cpattn: a pool of Other and MHATokenToKVPool; expected MHA"):
        ATTENTION_BACKENDS["cpattn"](mixed)


def test_keys_that_were_expanded_are_refused(rng):
    runner, expanded = latent_runner(), RadixAttention(HEADS, 40, SCALE, HEADS, layer_id=1, v_head_dim=32)
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    sequences = Sequences(rng, runner, latent_layer(), MIXED)
    batch = sequences.batch(ForwardMode.EXTEND)
    backend.init_forward_metadata(batch)
    q = torch.zeros((sum(MIXED), HEADS * 40))
    with pytest.raises(NotImplementedError, match="cpattn: a layer of keys of 40 over a cache of 80"):
        backend.forward(q, None, None, expanded, batch, save_kv_cache=False)
