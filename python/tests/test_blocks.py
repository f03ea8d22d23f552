"""Blocks of caches from process to process: by their ids, and by what engines find in stores."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from reference import peaky

import cpattn
from cpattn import blocks

FOLDER = Path(__file__).resolve().parents[2] / "tests/data/tiny-llama"
PROMPT = [(17 * i) % 300 + 3 for i in range(100)]
LAYERS, BLOCK, HEADS, DIM = 2, 16, 2, 8


def caches(rng, layout, num_blocks):
    shape = (num_blocks, BLOCK, HEADS, DIM) if layout == "token-major" else (num_blocks, HEADS, BLOCK, DIM)
    return [cpattn.PagedCache(*(peaky(rng, *shape) for _ in "kv"), layout=layout) for _ in range(LAYERS)]


def tokens_first(x, layout):
    return x if layout == "token-major" else x.swapaxes(1, 2)


def export_to(folder, how):
    """The rows of some blocks, as another process has them."""
    layers = caches(np.random.default_rng(5), how, 9)
    np.save(f"{folder}/rows.npy", blocks.export_blocks(layers, [7, 2, 4]))


def other_process(function, *arguments):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result(120)


def test_rows_of_another_process_are_put_into_blocks_of_any_layout(rng, tmp_path):
    other_process(export_to, tmp_path, "token-major")
    rows = np.load(tmp_path / "rows.npy")
    there, here = caches(np.random.default_rng(5), "token-major", 9), caches(rng, "head-major", 5)
    assert rows.shape == (3 * BLOCK, blocks.row_bytes(here)) and rows.dtype == np.uint8
    assert rows.shape[1] == LAYERS * 2 * HEADS * DIM * 4
    before = [cache.k.copy() for cache in here]
    blocks.import_blocks(here, [0, 3, 1], rows)
    for mine, its, k in zip(here, there, before):
        np.testing.assert_array_equal(tokens_first(mine.k, "head-major")[[0, 3, 1]], its.k[[7, 2, 4]])
        np.testing.assert_array_equal(tokens_first(mine.v, "head-major")[[0, 3, 1]], its.v[[7, 2, 4]])
        np.testing.assert_array_equal(mine.k[[2, 4]], k[[2, 4]])
    again = np.empty_like(rows)
    assert blocks.export_blocks(here, [0, 3, 1], rows=again) is again
    np.testing.assert_array_equal(again, rows)


def test_blocks_that_are_not_there_are_refused(rng):
    layers = caches(rng, "token-major", 5)
    rows = blocks.export_blocks(layers[0], range(3))
    for message, call in {
            r"rows is u8 \[48, 128\]; expected u8, contiguous, 12288 elements": lambda: blocks.import_blocks(
                layers, [0, 1, 2], rows),
            r"ids\[1\] is 5, expected": lambda: blocks.import_blocks(layers[0], [0, 5, 1], rows),
            "0 caches on 0 devices; expected one or more": lambda: blocks.export_blocks([], [0])}.items():
        with pytest.raises(ValueError, match=message):
            call()
    rows.flags.writeable = False
    with pytest.raises(ValueError, match="rows is read-only"):
        blocks.export_blocks(layers[0], range(3), rows=rows)


def answer(store, transfer, prompt=PROMPT):
    """Token ids and log-probabilities of an answer, and how many tokens of the prompt came and went."""
    sampling = cpattn.Sampling(ignore_eos=True, logprobs=True)
    with cpattn.Engine(FOLDER, device="host", threads=1, num_blocks=64, block_store=store) as engine:
        told = engine.submit(prompt, sampling, max_tokens=8, block_transfer=transfer).result(60)
        stats = engine.stats()
    return (told.token_ids, told.logprobs), [stats[f"{what}_tokens"] for what in ("imported", "exported")], stats


def export_by_folder(folder):
    return answer(blocks.FolderStore(folder), "export")[:2]


def export_by_stream(path):
    store = blocks.MemoryStore()
    told = answer(store, "export")[:2]
    with open(path, "wb") as file:
        store.send(file)
    return *told, store.bytes


def test_an_engine_goes_on_with_what_another_process_has_computed(tmp_path):
    computed, moved = other_process(export_by_folder, tmp_path)
    assert moved == [0, len(PROMPT)]
    told, moved, stats = answer(blocks.FolderStore(tmp_path), "import")
    assert told == computed and moved == [len(PROMPT) - 1, 0] and stats["import_failures"] == 0
    longer = PROMPT + [9] * 20  # what the other one has is its prefix
    assert answer(blocks.FolderStore(tmp_path), "import", longer)[0] == answer(None, "none", longer)[0]


def test_parts_with_an_altered_byte_are_refused_and_computed(tmp_path):
    computed, _ = other_process(export_by_folder, tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    told, moved, stats = answer(blocks.FolderStore(tmp_path), "import")
    assert told == computed and moved == [0, 0] and stats["import_failures"] > 0


def test_stores_in_memory_go_through_files(tmp_path):
    path = tmp_path / "parts"
    computed, _, size = other_process(export_by_stream, path)
    store = blocks.MemoryStore()
    with open(path, "rb") as file:
        store.receive(file)
    assert store.bytes == size > 0
    assert answer(store, "import")[:2] == (computed, [len(PROMPT) - 1, 0])
    path.write_bytes(path.read_bytes()[:-9])
    with open(path, "rb") as file, pytest.raises(cpattn.Error):
        blocks.MemoryStore().receive(file)


def test_events_tell_what_can_be_found():
    events = []
    with cpattn.Engine(FOLDER, device="host", threads=1, num_blocks=16, block_size=16, max_model_len=250,
                       on_block_event=events.append) as engine:
        def run(prompt):
            return engine.submit(prompt, cpattn.Sampling(ignore_eos=True), max_tokens=1).result(60)

        run(PROMPT)
        stored = [event for event in events if event.kind == "stored"]
        assert [t for event in stored for t in event.token_ids] == PROMPT[:len(PROMPT) // 16 * 16]
        assert [event.first_token for event in stored] == list(range(0, 96, 16))
        assert [event.parent for event in stored] == [None, *(event.digest for event in stored[:-1])]
        run(PROMPT)
        assert len(events) == len(stored)  # they were found
        run(list(range(5, 245)))
    removed = [event.digest for event in events if event.kind == "removed"]
    assert removed and set(removed) <= {event.digest for event in stored}


def test_what_stores_are_asked_for_is_checked(tmp_path):
    with pytest.raises(cpattn.Error, match="nowhere"):
        blocks.FolderStore(tmp_path / "nowhere")
    with cpattn.Engine(FOLDER, device="host", threads=1, num_blocks=64) as engine:
        with pytest.raises(ValueError, match="block_transfer 'all'; expected one of none, import, export, both"):
            engine.submit(PROMPT, block_transfer="all")
        with pytest.raises(ValueError, match="and 0 without a block_store"):
            engine.submit(PROMPT, block_transfer="import")
