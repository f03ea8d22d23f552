"""Models of transformers with the attention "cpattn" say what they say with eager attention."""

from pathlib import Path

import pytest
import ranks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import cpattn  # noqa: E402
from cpattn import ops  # noqa: E402
from cpattn.transformers import PagedCache, register  # noqa: E402
from cpattn.transformers.attention import attention, padding  # noqa: E402
from cpattn.transformers.sequences import Sequences  # noqa: E402

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MODELS = ["tiny-llama", "tiny-mistral", "tiny-qwen3-moe"]  # of these Mistral has a window, of 24 tokens


def load(name, attention):
    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / name, attn_implementation=attention,
                                                              dtype=torch.float32)
    return model.eval()


def prompts():
    """Two prompts of 40 and 23 tokens, the shorter filled up on its left."""
    ids = torch.randint(3, 100, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    return ids, mask


@pytest.mark.parametrize("batch", [1, 3])
def test_tensors_with_tokens_within_heads_are_attended_as_they_lie(batch):
    """Contiguous [batch, heads, tokens, dim], and the transposes of dense rows, which give the same."""
    q, k, v = (torch.randn(batch, heads, 21, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    module = torch.nn.Module()
    with torch.no_grad():
        got = attention(module, q, k, v, None)[0]
        dense = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        assert torch.equal(got, attention(module, *dense, None)[0])
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got.transpose(1, 2), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_were_expanded_are_attended(batch):
    q, k, v = (torch.randn(batch, heads, 9, 32, generator=torch.Generator().manual_seed(heads)) for heads in (2, 1, 1))
    k, v = k.expand(batch, 2, 9, 32), v.expand(batch, 2, 9, 32)
    with torch.no_grad():
        got = attention(torch.nn.Module(), q, k, v, None)[0]
        assert torch.equal(got, attention(torch.nn.Module(), q, k.contiguous(), v.contiguous(), None)[0])


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prefill_and_decode(name):
    ids, mask = prompts()
    eager, ours = load(name, "eager"), load(name, "cpattn")
    cache = PagedCache(ours.config, num_blocks=8)
    with torch.no_grad():
        want = eager(ids, attention_mask=mask).logits
        first = ours(ids[:, :35], attention_mask=mask[:, :35], cache=cache, use_cache=True)
        second = ours(ids[:, 35:], attention_mask=mask, cache=cache, use_cache=True)
        without = ours(ids, attention_mask=mask, use_cache=False).logits
    got = torch.cat([first.logits, second.logits], dim=1)
    seen = mask.bool()
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(without[seen], want[seen], rtol=1e-4, atol=1e-4)
    assert cache.lengths == [40, 23] and [len(t) for t in cache.tables] == [3, 2]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_generate(options):
    ids, mask = prompts()
    eager, ours = load("tiny-llama", "eager"), load("tiny-llama", "cpattn")
    cache = PagedCache(ours.config, num_blocks=60)
    results = []
    for model, past in ((eager, None), (ours, cache)):
        torch.manual_seed(2)
        results.append(model.generate(ids, attention_mask=mask, cache=past, max_new_tokens=12,
                                      min_new_tokens=12, **options))
    assert results[0].tolist() == results[1].tolist()


def test_crop_and_reset():
    ids, _ = prompts()
    model = load("tiny-llama", "cpattn")
    cache = PagedCache(model.config, num_blocks=6)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model(ids, cache=cache, use_cache=True)
        cache.crop(-30)
        assert cache.lengths == [10, 10] and [len(t) for t in cache.tables] == [1, 1]
        again = model(ids[:, 10:], cache=cache, use_cache=True).logits
        torch.testing.assert_close(again, want[:, 10:], rtol=1e-4, atol=1e-4)
        with pytest.raises(cpattn.OutOfMemoryError, match="49 tokens and less need 2 more blocks; a cache of 6"):
            model(ids[:, :9], cache=cache, use_cache=True)
        assert cache.lengths == [40, 40] and cache.get_seq_length() == 40
        cache.reset()
        torch.testing.assert_close(model(ids, cache=cache, use_cache=True).logits, want, rtol=1e-4, atol=1e-4)


def test_a_forward_that_fails_leaves_the_cache_as_it_was(monkeypatch):
    ids, mask = prompts()
    model = load("tiny-llama", "cpattn")
    cache = PagedCache(model.config, num_blocks=6)

    def forward(first, last):
        return model(ids[:, first:last], attention_mask=mask[:, :last], cache=cache, use_cache=True).logits

    def refused(error, *columns):
        before = cache.lengths, cache.tables, cache.get_seq_length()
        with pytest.raises(error):
            forward(*columns)
        assert (cache.lengths, cache.tables, cache.get_seq_length()) == before

    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits
    refused(NotImplementedError, 0, 30)  # of which gradients are asked
    with torch.no_grad():
        got = [forward(0, 30)]
    refused(NotImplementedError, 30, 40)
    for layer in range(2):  # which fails, of all
        calls, write = [], ops.kv_write

        def fail(*arguments, layer=layer, calls=calls, write=write, **_):
            calls.append(1)
            if len(calls) > layer:
                raise ValueError("of this test")
            write(*arguments)

        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(ops, "kv_write", fail)
            refused(ValueError, 30, 40)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(cpattn.AttendPlan, "set", fail)
        refused(ValueError, 30, 40)
    with torch.no_grad():
        got.append(forward(30, 40))
    seen = mask.bool()
    torch.testing.assert_close(torch.cat(got, dim=1)[seen], want[seen], rtol=1e-4, atol=1e-4)


def test_sequences_stay_where_blocks_for_their_copies_lack():
    sequences = Sequences(5, 16)
    sequences.append([[1] * 33, [1] * 20])  # three blocks and two
    tables = [list(table) for table in sequences.tables]
    with pytest.raises(cpattn.OutOfMemoryError, match="need 3 more blocks; a cache of 5 .* has 2 left"):
        sequences.select([0, 0])
    assert sequences.tables == tables and sequences.lengths == [33, 20]
    assert sequences.select([1, 1]) == list(zip(tables[1], sequences.tables[1]))
    sequences.append([[1] * 12, [1] * 12])  # to the end of their blocks
    with pytest.raises(cpattn.OutOfMemoryError, match="need 2 more blocks; a cache of 5 .* has 1 left"):
        sequences.append([[1], [1]])


@pytest.mark.parametrize("columns", [(40, 0), (1, 39)])
def test_masks_of_chunks_are_refused_in_prefill_and_decode(columns):
    chunks = chunked_causal_mask_function(16, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="packed sequences or chunks"):
        padding(2, columns[0], 40, q_offset=columns[1], mask_function=chunks)
    window = sliding_window_causal_mask_function(16)
    assert padding(2, columns[0], 40, q_offset=columns[1], mask_function=window) is None


def test_masks_of_other_kinds_are_refused():
    ids, _ = prompts()
    model = load("tiny-llama", "cpattn")
    packed = torch.cat([torch.arange(20), torch.arange(20)]).expand(2, -1)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="packed sequences"):
        model(ids, position_ids=packed, use_cache=False)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"a mask of \[2, 1, 40, 40\]"):
        model(ids, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool), use_cache=False)
    with pytest.raises(NotImplementedError, match="gradients"):
        model(ids, use_cache=False)


def test_a_cache_beside_another_attention_is_refused():
    ids, _ = prompts()
    model = load("tiny-llama", "eager")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attn_implementation='cpattn'"):
        model(ids, cache=PagedCache(model.config, num_blocks=8), use_cache=True)


def sharded(rank, size):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ids, mask = prompts()
    eager, ours = load("tiny-mistral", "eager"), load("tiny-mistral", "cpattn")
    cache = PagedCache(ours.config, num_blocks=4, group=dist.group.WORLD)
    options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert ours.generate(ids, cache=cache, **options).tolist() == eager.generate(ids, **options).tolist()
    assert cache.lengths == [51, 34]
    assert [len(t) for t in cache.tables] == [[2, 2], [2, 1]][rank]
    dist.destroy_process_group()


def test_generate_over_ranks():
    ranks.run(sharded, 2)
