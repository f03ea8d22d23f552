"""The back end over SGLang's own pools, batches, layers and plugins, on the host, against float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from stack_of_sglang import DECODE, HEADS, LENGTHS, MIXED, MODES, Sequences, layer_of, runner_of  # noqa: E402


@pytest.fixture(autouse=True)
def one_rank():
    load_plugins()
    assert "cpattn" in ATTENTION_BACKEND_CHOICES
    with get_parallel().override(attn_tp_size=1, attn_dcp_size=1):
        yield


@pytest.mark.parametrize("mode, queries", MODES)
@pytest.mark.parametrize("page, layout", [(1, None), (16, None), (16, "hnd")])
def test_pages_and_layouts(rng, monkeypatch, mode, queries, page, layout):
    if layout == "hnd":
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    runner, layer = runner_of(page), layer_of()
    assert runner.token_to_kv_pool.kv_cache_layout == (layout or "nhd")
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    sequences = Sequences(rng, runner, layer, queries)
    np.testing.assert_allclose(sequences.run(backend, mode), sequences.expected(), atol=3e-5)


@pytest.mark.parametrize("mode, queries", MODES[1:])
def test_window_cap_sinks_and_temperature(rng, mode, queries):
    runner, layer = runner_of(), layer_of(sliding_window_size=19, logit_cap=7.0)
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    sequences = Sequences(rng, runner, layer, queries)
    got = sequences.run(backend, mode, sinks=torch.from_numpy(sinks))
    np.testing.assert_allclose(got, sequences.expected(window=20, softcap=7.0, sink_logits=sinks), atol=3e-5)
    warm = layer_of()
    warm.xai_temperature_len = 16
    sequences = Sequences(rng, runner, warm, queries)
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    got = sequences.run(backend, mode)
    places = np.concatenate([np.arange(n - c, n) for n, c in zip(LENGTHS, queries)])
    sequences.q *= torch.from_numpy(np.maximum(np.log2(np.maximum(places, 1)) / 4, 1)[:, None, None]).float()
    np.testing.assert_allclose(got, sequences.expected(), atol=3e-5)


@pytest.mark.parametrize("mode, queries", MODES[1:])
def test_fp8_cache_with_scales(rng, mode, queries):
    runner, layer = runner_of(cache_dtype=torch.float8_e4m3fn), layer_of()
    layer.k_scale, layer.v_scale, layer.k_scale_float, layer.v_scale_float = 0.5, 0.25, 0.5, 0.25
    sequences = Sequences(rng, runner, layer, queries)
    for s, (n, count) in enumerate(zip(LENGTHS, queries)):
        k, v = (torch.from_numpy(x[s][:n - count]).clone() for x in (sequences.k, sequences.v))
        runner.token_to_kv_pool.set_kv_buffer(layer, sequences.slots[s][:n - count], k, v, 0.5, 0.25)
    got = sequences.run(ATTENTION_BACKENDS["cpattn"](runner), mode)
    for part, scale in ((sequences.k, 0.5), (sequences.v, 0.25)):
        part[:] = [(torch.from_numpy(x) / scale).to(torch.float8_e4m3fn).float().numpy() * scale for x in part]
    np.testing.assert_allclose(got, sequences.expected(), atol=1e-4)


def test_bf16(rng):
    runner, layer = runner_of(16, torch.bfloat16), layer_of()
    sequences = Sequences(rng, runner, layer, MIXED)
    got = sequences.run(ATTENTION_BACKENDS["cpattn"](runner), ForwardMode.EXTEND)
    np.testing.assert_allclose(got, sequences.expected(), atol=0.06, rtol=0.01)


def test_what_a_graph_holds_stays_where_it_is(rng):
    runner, layer = runner_of(16), layer_of()
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    backend.init_cuda_graph_state(4, 4)
    sequences = Sequences(rng, runner, layer, DECODE)
    padded = sequences.batch(ForwardMode.DECODE)
    padded.req_pool_indices, padded.seq_lens = torch.tensor([0] * 4), torch.tensor([1] * 4)
    padded.seq_lens_cpu = None
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    plan, tables = backend.plans.plan, backend.plans.tables.data_ptr()
    np.testing.assert_allclose(sequences.run(backend, ForwardMode.DECODE), sequences.expected(), atol=3e-5)
    assert backend.plans.plan is plan and backend.plans.tables.data_ptr() == tables
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    with pytest.raises(NotImplementedError, match="cpattn: a graph of prefill"):
        backend.init_forward_metadata_out_graph(sequences.batch(ForwardMode.EXTEND), in_capture=True)


@pytest.mark.parametrize("change, line", [
    ({"use_mla_backend": True}, "a pool of MHATokenToKVPool; expected MLATokenToKVPool"),
    ({"spec_algorithm": SpeculativeAlgorithm.from_string("EAGLE")}, "speculative decoding by .*; expected none"),
    ({"page_size": 48}, "pages of 48 tokens; expected a power of two up to 512"),
    ({"token_to_kv_pool": object()}, "a pool of object; expected MHATokenToKVPool"),
])
def test_what_there_is_not_is_refused_at_construction(change, line):
    runner = runner_of()
    vars(runner).update(change)
    with pytest.raises(NotImplementedError, match="^cpattn: " + line):
        ATTENTION_BACKENDS["cpattn"](runner)


def test_ranks_and_dtypes_that_are_refused():
    with get_parallel().override(attn_dcp_size=2), pytest.raises(NotImplementedError, match="2 ranks of decode"):
        ATTENTION_BACKENDS["cpattn"](runner_of())
    with pytest.raises(NotImplementedError, match="a cache of torch.float8_e5m2; expected torch.float32"):
        ATTENTION_BACKENDS["cpattn"](runner_of(cache_dtype=torch.float8_e5m2))


def test_layers_and_batches_that_are_refused(rng):
    runner, layer = runner_of(), layer_of()
    backend = ATTENTION_BACKENDS["cpattn"](runner)
    sequences = Sequences(rng, runner, layer, MIXED)
    with pytest.raises(NotImplementedError, match="a batch of TARGET_VERIFY; expected EXTEND, MIXED or DECODE"):
        backend.init_forward_metadata(sequences.batch(ForwardMode.TARGET_VERIFY))
    with pytest.raises(NotImplementedError, match="cross attention True; expected one of a decoder"):
        sequences.layer = layer_of(is_cross_attention=True)
        sequences.run(backend, ForwardMode.EXTEND)
