"""cpattn.Engine over the tiny model of the tests: the tokens of transformers, with threads and with asyncio."""

import asyncio
import gc
import json
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import cpattn
import numpy as np
import pytest
from cpattn import _requests
from cpattn.engine import Engine, Sampling

FOLDER = Path(__file__).resolve().parents[2] / "tests/data/tiny-llama"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
ENDLESS = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    with Engine(FOLDER, device="host", threads=1, num_blocks=256, max_num_seqs=8, chat_template="chatml") as made:
        yield made


def wait_for_quiet(engine):
    for _ in range(2000):
        stats = engine.stats()
        if stats["requests_running"] + stats["requests_waiting"] + stats["kv_used"] == 0:
            return
        time.sleep(0.005)
    raise AssertionError(f"still busy: {stats['requests_running']} running, {stats['kv_used']} blocks used")


def test_greedy_tokens_are_those_of_transformers(engine):
    requests = [engine.submit(ids, ENDLESS, max_tokens=16) for ids in EXPECTED["prompts"]]
    for request, ids, expected in zip(requests, EXPECTED["prompts"], EXPECTED["output_ids"]):
        answer = request.result(60)
        assert answer.token_ids == expected
        assert answer.prompt_token_ids == ids
        assert answer.finish_reason == "length"


def test_pieces_make_the_answer(engine):
    request = engine.submit("Hello", Sampling(ignore_eos=True, top_logprobs=2), max_tokens=12)
    pieces = list(request)
    answer = request.result()
    assert "".join(piece.text for piece in pieces) == answer.text != ""
    assert [t for piece in pieces for t in piece.token_ids] == answer.token_ids
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.top_logprobs) == 12
    for token, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs):
        assert len(top) == 2 and top[token] == pytest.approx(logprob) and logprob == max(top.values()) < 0


def test_seeds_decide_what_is_drawn(engine):
    def draw(seed):
        return engine.submit("Hello", Sampling(temperature=1, seed=seed, ignore_eos=True), max_tokens=20)
    first, again, other = (draw(seed).result(60).token_ids for seed in (1, 1, 2))
    assert first == again != other
    biased = Sampling(logit_bias={300: 100.0}, ignore_eos=True)
    assert engine.submit("Hello", biased, max_tokens=4).result(60).token_ids == [300] * 4


def test_answers_are_what_they_are_bound_to(engine):
    for seed in range(3):
        sampling = Sampling(temperature=1.5 * (seed > 0), seed=seed)
        chosen = engine.submit("Hello", sampling, constraint={"choice": ["red", "green"]})
        number = engine.submit("Hello", sampling, constraint={"json_schema": {
            "type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 99}},
            "required": ["n"], "additionalProperties": False}})
        assert chosen.result(60).text in ("red", "green") and chosen.result().finish_reason == "stop"
        found = json.loads(number.result(60).text)
        assert found.keys() == {"n"} and 3 <= found["n"] <= 99


def test_samples_have_the_seeds_that_follow(engine):
    def draw(seed, n=1):
        return engine.submit("Hello", Sampling(temperature=1, seed=seed, ignore_eos=True), max_tokens=20, n=n)
    together = [request.result(60).token_ids for request in draw(5, n=3).samples]
    assert together == [draw(seed).result(60).token_ids for seed in (5, 6, 7)]
    assert len({tuple(ids) for ids in together}) == 3


def test_a_prompt_is_told_as_its_tokens_were(engine):
    drawn = engine.submit("Hello", Sampling(ignore_eos=True, temperature=1, seed=3, top_logprobs=2),
                          max_tokens=20).result(60)
    ids = drawn.prompt_token_ids + drawn.token_ids
    request = engine.submit(ids, Sampling(top_prompt_logprobs=2), max_tokens=1, n=2)
    told, other = (sample.result(60) for sample in request.samples)
    assert len(told.prompt_logprobs) == len(told.top_prompt_logprobs) == len(ids)
    assert told.prompt_logprobs[0] is None and told.top_prompt_logprobs[0] == {}
    np.testing.assert_allclose(told.prompt_logprobs[-20:], drawn.logprobs, atol=1e-4)
    for found, expected in zip(told.top_prompt_logprobs[-20:], drawn.top_logprobs):
        assert found == pytest.approx(expected, abs=1e-4)
    assert other.prompt_logprobs is None and other.token_ids == told.token_ids
    alone = engine.submit(ids[:1], Sampling(prompt_logprobs=True), max_tokens=1).result(60)
    assert alone.prompt_logprobs == [None]
    assert engine.submit("Hello", max_tokens=1).result(60).prompt_logprobs is None


def test_texts_and_tokens_stop_answers(engine):
    whole = engine.submit("Hello", ENDLESS, max_tokens=40).result(60)
    at = next(i for i in range(8, 30) if "\0" not in whole.text[i:i + 2] and "\ufffd" not in whole.text[i:i + 2])
    stop = whole.text[at:at + 2]
    answer = engine.submit("Hello", ENDLESS, max_tokens=40, stop=["never here", stop]).result(60)
    assert (answer.finish_reason, answer.stop) == ("stop", stop)
    assert answer.text == whole.text[:whole.text.index(stop)]
    token = whole.token_ids[5]
    stopped = engine.submit("Hello", Sampling(ignore_eos=True, stop_token_ids=[token]), max_tokens=40).result(60)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[:whole.token_ids.index(token) + 1]


def test_chats_go_through_the_template(engine):
    assert engine.has_text and engine.has_chat
    chat = engine.submit([{"role": "user", "content": "Hello"}], max_tokens=4)
    text = engine.submit("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", max_tokens=4)
    ids = chat.prompt_token_ids
    assert ids == text.prompt_token_ids[-len(ids):]


def test_cancelled_requests_give_their_blocks_back(engine):
    request = engine.submit("Once upon a time", ENDLESS, max_tokens=3000)
    assert next(request).token_ids
    request.cancel()
    answer = request.result(60)
    assert answer.finish_reason == "cancelled" and len(answer.token_ids) < 3000
    with engine.submit("Once upon a time", ENDLESS, max_tokens=3000) as left:
        next(left)
    assert left.result(60).finish_reason == "cancelled"
    wait_for_quiet(engine)
    request.cancel()  # nothing happens


def test_requests_end_in_time(engine):
    answer = engine.submit("Hello", ENDLESS, max_tokens=4000, timeout=0.05).result(60)
    assert answer.finish_reason == "expired"
    slow = engine.submit("Hello", ENDLESS, max_tokens=4000)
    with pytest.raises(TimeoutError):
        slow.result(0.01)
    slow.cancel()


def test_asyncio_streams_many_at_once(engine):
    alone = [engine.submit(text, ENDLESS, max_tokens=30).result(60) for text in ("Hello", "1 2 3", "def f(")]

    async def stream(text):
        request = engine.submit(text, ENDLESS, max_tokens=30)
        pieces = [piece async for piece in request]
        assert (await request).text == "".join(piece.text for piece in pieces)
        return await request

    async def cancelled():
        request = engine.submit("Hello", ENDLESS, max_tokens=4000)
        async for _ in request:
            break
        request.cancel()
        return await request

    async def main():
        return await asyncio.gather(*(stream(text) for text in ("Hello", "1 2 3", "def f(")), cancelled())

    *together, ended = asyncio.run(main())
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert ended.finish_reason == "cancelled"


def test_threads_submit_at_once(engine):
    expected = engine.submit("Hello", ENDLESS, max_tokens=20).result(60).token_ids
    found = []

    def ask():
        for _ in range(3):
            found.append(engine.submit("Hello", ENDLESS, max_tokens=20).result(60).token_ids)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 18


@pytest.mark.parametrize("name", ["int8", "fp8", "bfloat16"])
def test_caches_are_known_by_every_name_of_their_dtype(name):
    with Engine(FOLDER, device="host", kv_cache_dtype=name) as engine:
        assert len(engine.submit([1, 2, 3], ENDLESS, max_tokens=2).result().token_ids) == 2


def test_precise_first_tokens_are_those_of_no_quantisation():
    with Engine(FOLDER, device="host", num_blocks=256, kv_cache_dtype="fp8_e5m2", precise_first_tokens=1024) as engine:
        assert engine.submit(EXPECTED["prompts"][0], ENDLESS, max_tokens=16).result(60).token_ids == \
            EXPECTED["output_ids"][0][:16]
        assert engine.stats()["precise_bytes"] > 0


@pytest.mark.parametrize("make, line", [
    (lambda: Engine("none"), "none/config.json: No such file"),
    (lambda: Engine(FOLDER, max_model_len=5000), "max_model_len: found 5000, expected at most the 4096 positions"),
    (lambda: Engine(FOLDER, device="host", block_size=24), "block_size"),
    (lambda: Engine(FOLDER, device="host", precise_first_tokens=16), "precise_tokens: 16 with a cache of fp32"),
    (lambda: Engine(FOLDER, device="gpu"), "device 'gpu'; expected 'host', 'cuda' or 'cuda:N'"),
    (lambda: Engine(FOLDER, dtype="fp9"), "dtype: found 'fp9', expected fp32"),
])
def test_bad_folders_and_options_are_refused_by_one_line(make, line):
    with pytest.raises((cpattn.Error, ValueError), match=line) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments, options, line", [
    (([],), {}, "prompt: found no token"),
    (([400000],), {}, "prompt: found token 400000, expected ids from 0 to"),
    (("Hello",), {"max_tokens": 5000}, "tokens and 5000 of the answer"),
    (("Hello",), {"stop": ""}, "stops: text 0 is empty"),
    (("Hello", Sampling(top_p=2)), {}, "top_p"),
    (([{"content": "Hello"}],), {}, "messages: element 0 is no object with a text \"role\""),
    (("Hello",), {"tools": [{}]}, "prompt: found tools without messages"),
    (([1, 2],), {"continue_final_message": True}, "prompt: found continues_last without messages"),
    (("Hello",), {"n": 0}, "samples: found 0, expected 1 or more"),
    (("Hello",), {"constraint": {"choice": []}}, "constraint: "),
    (("Hello", ENDLESS), {"constraint": {"choice": ["yes"]}}, "constraint: found ignore_eos"),
    (("Hello", Sampling(top_prompt_logprobs=21)), {}, "top_prompt_logprobs: found 21, expected 0 to 20"),
])
def test_bad_requests_are_refused_by_one_line(engine, arguments, options, line):
    with pytest.raises(cpattn.InvalidError, match=line):
        engine.submit(*arguments, **options)


@pytest.mark.parametrize("arguments, options, line", [
    (("Hello",), {"max_tokens": 2**64 + 3}, "max_tokens is 18446744073709551619"),
    (("Hello",), {"priority": 2**32 - 7}, "priority is 4294967289"),
    (("Hello", Sampling(top_k=2**32)), {}, "top_k is 4294967296"),
    (("Hello", Sampling(logit_bias={2**32 + 5: 1.0})), {}, "the tokens of logit_bias are 4294967301"),
    (("Hello", Sampling(stop_token_ids=[-5])), {}, "stop_token_ids are -5"),
    (([-1, 2],), {}, "token ids are -1 to 2"),
])
def test_numbers_that_do_not_fit_are_refused(engine, arguments, options, line):
    with pytest.raises(ValueError, match=line):
        engine.submit(*arguments, **options)


def test_ids_may_be_an_array(engine):
    ids = EXPECTED["prompts"][0]
    assert engine.submit(np.array(ids), max_tokens=1).prompt_token_ids == ids
    with pytest.raises(cpattn.InvalidError, match="found no token"):
        engine.submit(np.array([], np.int64))


def test_the_library_chooses_the_threads_of_a_device():
    from cpattn.engine import _device
    assert _device("host", 0).threads == 0 and _device("host", 3).threads == 3


def test_an_interrupted_submission_is_released(engine, monkeypatch):
    def interrupted(*arguments, **options):
        made(*arguments, **options)
        raise KeyboardInterrupt
    made = _requests.call
    monkeypatch.setattr(_requests, "call", interrupted)
    for n in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            engine.submit("Hello", ENDLESS, max_tokens=4000, n=n)
    monkeypatch.undo()
    assert engine.submit("Hello", max_tokens=2).result(10).token_ids
    wait_for_quiet(engine)
    assert not engine._reader._abandoned


def test_a_reader_that_fails_fails_all(monkeypatch):
    def fails(piece):
        raise MemoryError("none")
    engine = Engine(FOLDER, device="host", threads=1, num_blocks=256)
    monkeypatch.setattr(_requests, "_piece_of", fails)
    request = engine.submit("Hello", max_tokens=4)
    with pytest.raises(cpattn.Error, match="answers are not read any more: MemoryError"):
        request.result(10)
    engine._reader._thread.join(10)
    with pytest.raises(cpattn.Error, match="answers are not read any more: MemoryError"):
        engine.submit("Hello").result(10)
    engine.close()


def test_a_forked_process_does_not_have_the_engine(engine):
    request = engine.submit("Hello", ENDLESS, max_tokens=1000)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: engine.submit("Hello"), request.cancel, request.result, lambda: next(request)):
            try:
                call()
            except cpattn.Error as error:
                refused += "forked" in str(error)
        engine.close()
        os._exit(refused)
    ended, status = 0, 0
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    request.cancel()
    assert ended == child and os.waitstatus_to_exitcode(status) == 4
    assert engine.submit("Hello", max_tokens=2).result(10).token_ids


def test_closing_ends_what_is_unfinished():
    engine = Engine(FOLDER, device="host", threads=1, num_blocks=256)
    request = engine.submit("Hello", ENDLESS, max_tokens=4000)
    engine.close()
    engine.close()
    assert request.result(0).finish_reason == "cancelled"
    with pytest.raises(cpattn.Error, match="closed"):
        engine.submit("Hello")
    with pytest.raises(cpattn.Error, match="closed"):
        engine.stats()


def test_an_engine_that_nobody_has_is_closed():
    engine = Engine(FOLDER, device="host", threads=1, num_blocks=256)
    engine.submit("Hello", max_tokens=4).result(60)
    thread, gone = engine._reader._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_only_its_reader_has_is_freed(monkeypatch):
    def close(handle):
        freed.append(handle)
        closes(handle)
    closes, freed = _requests.llm.cpa_llm_close, []
    engine = Engine(FOLDER, device="host", threads=1, num_blocks=256)
    monkeypatch.setattr(_requests.llm, "cpa_llm_close", close)
    thread = engine._reader._thread
    request = engine.submit("Hello", ENDLESS, max_tokens=200)
    del engine, request
    thread.join(10)
    assert not thread.is_alive() and len(freed) == 1


def test_the_package_tells_what_the_engine_lacks(tmp_path):
    from cpattn._library import load_beside
    with pytest.raises(ImportError, match="cpattn.Engine: this package was built without libnone.so"):
        load_beside("cpattn.Engine", "libnone.so", [])
