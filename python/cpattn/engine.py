"""An engine for the model of a Hugging Face folder: prompts in, answers out piece by piece, with asyncio or without."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _declarations as c
from ._library import create, integers, lib, raise_status, sized
from ._names import dtype_of
from ._requests import Answer, Piece, Reader, Request, llm
from ._tensors import CUDA, HOST
from .blocks import BlockEvent, FolderStore, MemoryStore, event_function
from .communicator import Communicator

__all__ = ["Answer", "Engine", "Piece", "Request", "Sampling"]

_TRANSFERS = {"none": 0, "import": c.CPA_TRANSFER_IMPORT, "export": c.CPA_TRANSFER_EXPORT,
              "both": c.CPA_TRANSFER_IMPORT | c.CPA_TRANSFER_EXPORT}
_BACKENDS = {HOST: c.CPA_BACKEND_HOST, "cpu": c.CPA_BACKEND_HOST, CUDA: c.CPA_BACKEND_CUDA}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; without anything, the most probable one each time.

    ``top_p``, ``top_k`` and ``min_p`` 0 leave all tokens; samples of one prompt want seeds of their own. With
    ``logprobs`` pieces tell the log-probability of each token, and with ``top_logprobs`` those of so many of the most
    probable ones, too, of the logits as they are. ``prompt_logprobs`` and ``top_prompt_logprobs`` ask for the same of
    the tokens of the prompt, which the answer tells: the whole prompt is computed then.
    """

    temperature: float = 0
    top_p: float = 0
    top_k: int = 0
    min_p: float = 0
    seed: int = 0
    repetition_penalty: float = 0
    presence_penalty: float = 0
    frequency_penalty: float = 0
    logit_bias: Mapping[int, float] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0


def _sampling(s: Sampling) -> tuple[Any, Any]:
    """The library's struct, and what it points to."""
    stop_ids = integers(ctypes.c_uint32, s.stop_token_ids, "stop_token_ids")
    biased = s.logit_bias or {}
    pairs = zip(integers(ctypes.c_uint32, biased.keys(), "the tokens of logit_bias"), biased.values())
    biases = (c.cpa_logit_bias * len(biased))(*(c.cpa_logit_bias(token, bias) for token, bias in pairs))
    plain = {name: getattr(s, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty",
                                                 "presence_penalty", "frequency_penalty", "ignore_eos", "min_tokens",
                                                 "top_logprobs", "top_prompt_logprobs")}
    return sized(c.cpa_sampling, seed=s.seed % 2**64, logprobs=s.logprobs or s.top_logprobs > 0,
                 prompt_logprobs=_tells_prompt(s),
                 stop_ids=ctypes.addressof(stop_ids), n_stop_ids=len(stop_ids), logit_biases=ctypes.addressof(biases),
                 n_logit_biases=len(biases), **plain), (stop_ids, biases)


def _tells_prompt(s: Sampling) -> bool:
    return s.prompt_logprobs or s.top_prompt_logprobs > 0


def _json(value: Any) -> bytes | None:
    return None if value is None else json.dumps(value).encode()


def _text(value: str | None) -> bytes | None:
    if value is not None and "\0" in value:
        raise ValueError(f"cpattn: {value!r}; expected a text without U+0000")
    return None if value is None else value.encode()


def _prompt(prompt: Any, **of_chat: Any) -> tuple[Any, Any]:
    """The library's struct of a text, token ids or messages, and what it points to."""
    if isinstance(prompt, str):
        text = prompt.encode()
        return sized(c.cpa_llm_prompt, text=text, text_bytes=len(text), **of_chat), None
    if len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt):
        return sized(c.cpa_llm_prompt, messages=_json(prompt), **of_chat), None
    ids = integers(ctypes.c_uint32, prompt, "token ids")
    return sized(c.cpa_llm_prompt, ids=ctypes.addressof(ids), n_ids=len(ids), **of_chat), ids


def _device(name: str | None, threads: int) -> Any:
    """The library's struct of a device; with size 0 the library chooses it all, and with threads 0 these."""
    backend, _, ordinal = (name or "").partition(":")
    if name is None and threads == 0:
        return c.cpa_device_options()
    if name is None:
        backend = CUDA if lib.cpa_device_count(c.CPA_BACKEND_CUDA) > 0 else HOST
    if backend not in _BACKENDS or (ordinal and not ordinal.isdecimal()):
        raise ValueError(f"cpattn: device {name!r}; expected 'host', 'cuda' or 'cuda:N'")
    return sized(c.cpa_device_options, backend=_BACKENDS[backend], ordinal=int(ordinal or 0), threads=threads)


class Engine:
    """The model of a Hugging Face folder: its weights, tokenizer and chat template, behind the engine of the library.

    >>> with cpattn.Engine("llama-3-8b") as engine:
    ...     for piece in engine.submit("Once upon a time", max_tokens=100):  # or async for
    ...         print(piece.text, end="")

    Requests run together, whatever threads and tasks submit them: the engine, which has a thread of its own, batches
    them and shares what their prompts have in common. ``device`` is "host", "cuda" or "cuda:N"; without it the first
    GPU, where there is one, or the host. ``dtype`` and ``kv_cache_dtype`` are names such as "bf16" and "fp8_e4m3".
    ``chat_template`` is a family ("chatml", "llama3", ...) or a file. ``verify`` is the share of attention results that
    are checked in float64 while it runs. ``precise_first_tokens``: so many first tokens of every sequence, a multiple of
    the block size, are kept in ``dtype`` too, beside a quantised cache. Of other numbers 0 stands for the library's
    defaults: ``num_blocks`` is what memory holds, ``max_model_len`` what the model is made for and the cache holds.

    ``block_store``: where requests that ask for a ``block_transfer`` find keys and values of their prompts, and put
    them; it knows the model by its weights. ``on_block_event`` is called with every ``cpattn.blocks.BlockEvent`` of the
    engine's own cache, from its thread, which waits: it calls nothing of the engine. What it refers to lives as long as
    the engine: one that leads to the engine, such as a method of the object that has it, keeps it open until ``close``.

    With a ``communicator`` of several ranks each of them makes the engine, with equal arguments: rank 0 takes requests,
    and on the others ``close`` waits until it has closed.

    What is wrong with the folder or the arguments raises ``cpattn.Error`` and its kinds, with one line. Thread-safe.
    """

    def __init__(self, model_dir: str | os.PathLike[str], *, device: str | None = None, dtype: str | None = None,
                 kv_cache_dtype: str | None = None, max_model_len: int = 0, num_blocks: int = 0, block_size: int = 0,
                 max_num_seqs: int = 0, max_num_batched_tokens: int = 0, gpu_memory_utilization: float = 0,
                 chat_template: str | os.PathLike[str] | None = None, threads: int = 0, prefix_caching: bool = True,
                 precise_first_tokens: int = 0, verify: float = 0, communicator: Communicator | None = None,
                 block_store: MemoryStore | FolderStore | None = None,
                 on_block_event: Callable[[BlockEvent], None] | None = None):
        engine = sized(c.cpa_engine_options, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
                       max_num_batched_tokens=max_num_batched_tokens, no_prefix_caching=not prefix_caching,
                       precise_tokens=precise_first_tokens, verify=verify, device=_device(device, threads))
        told = None if on_block_event is None else event_function(on_block_event)
        if block_store is not None:
            engine.block_store = ctypes.addressof(block_store.table)
        if told is not None:
            engine.on_block_event = ctypes.cast(told, ctypes.c_void_p)
        options = sized(c.cpa_llm_options, engine=ctypes.addressof(engine), max_model_len=max_model_len,
                        gpu_memory_utilization=gpu_memory_utilization,
                        comm=None if communicator is None else communicator.handle,
                        chat_template=None if chat_template is None else os.fsencode(chat_template))
        for field, name in (("dtype", dtype), ("kv_dtype", kv_cache_dtype)):
            if name is not None:
                setattr(options, field, dtype_of(name))
                setattr(options, f"has_{field}", True)
        handle = create(llm.cpa_llm_open, os.fsencode(model_dir), ctypes.byref(options))
        info = c.cpa_llm_info()
        llm.cpa_llm_get_info(handle, ctypes.byref(info), ctypes.sizeof(info))
        self.max_model_len: int = info.max_model_len
        self.vocabulary: int = info.vocabulary
        self.num_blocks: int = info.num_blocks
        self.has_text: bool = bool(info.has_text)
        self.has_chat: bool = bool(info.has_chat)
        takes_requests = communicator is None or lib.cpa_comm_rank(communicator.handle) == 0
        self._reader = Reader(handle, takes_requests, (communicator, block_store, told))
        self._close = weakref.finalize(self, self._reader.close)

    def submit(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], sampling: Sampling | None = None, *,
               max_tokens: int = 0, stop: str | Sequence[str] = (), include_stop: bool = False,
               skip_special_tokens: bool = True, tools: Sequence[Mapping[str, Any]] | None = None,
               template_kwargs: Mapping[str, Any] | None = None, continue_final_message: bool = False,
               priority: int = 0, timeout: float = 0, cache_salt: str | None = None,
               tenant: str | None = None, constraint: Mapping[str, Any] | None = None, n: int = 1,
               block_transfer: str = "none") -> Request:
        """Submits a prompt, and does not wait for its answer: a text, token ids, or the messages of a chat, as OpenAI
        has them. Tokenizer and chat template run within the call; a task whose prompts are long keeps its loop free by
        ``await asyncio.to_thread(engine.submit, ...)``.

        ``max_tokens`` 0: what ``max_model_len`` leaves. ``stop``: texts that end the answer where they begin, with
        ``include_stop`` behind them. ``tools``, ``template_kwargs`` and ``continue_final_message`` go to the chat
        template, for messages alone. ``timeout``: seconds after which the request ends as "expired"; 0: none. Of one
        ``priority``, lower first, the ``tenant`` that was served least goes first. Prompts share what they have in common
        with those of equal ``cache_salt`` alone.

        ``constraint`` is what the answer is bound to, one of ``{"json_schema": schema}``, ``{"json_object": True}``,
        ``{"regex": expression}``, ``{"choice": [text, ...]}`` and those that cpattn/llm.h lists. ``n``: so many answers
        to the prompt, which is computed once, the seed of each one more than that of the one before, and
        ``request.samples`` the requests for them, of which the first tells log-probabilities of the prompt.
        ``block_transfer``: "import": keys and values of the prompt come from the engine's store, as far as that has
        them; "export": they are in it when the first token is told; "both", or "none".
        """
        if block_transfer not in _TRANSFERS:
            raise ValueError(f"cpattn: block_transfer {block_transfer!r}; expected one of {', '.join(_TRANSFERS)}")
        sampling = sampling or Sampling()
        drawn, kept = _sampling(sampling)
        asked, ids = _prompt(prompt, tools=_json(tools), template_kwargs=_json(template_kwargs),
                             continues_last=continue_final_message)
        texts = [_text(text) for text in ([stop] if isinstance(stop, str) else stop)]
        stops = (ctypes.c_char_p * len(texts))(*texts)
        options = sized(c.cpa_llm_request_options, max_tokens=max_tokens, sampling=ctypes.addressof(drawn),
                        stops=ctypes.addressof(stops), n_stops=len(stops), keeps_stop=include_stop,
                        keeps_special=not skip_special_tokens, priority=priority, deadline_s=timeout,
                        salt=_text(cache_salt), tenant=_text(tenant), constraint=_json(constraint),
                        transfer=_TRANSFERS[block_transfer])
        request = self._reader.submit(asked, options, n, self, _tells_prompt(sampling))
        del drawn, kept, ids, stops  # the library has copied what they hold
        return request

    def stats(self) -> dict[str, int | float]:
        """The engine's statistics as of its last step, such as ``requests_running`` and ``kv_used``."""
        stats = c.cpa_engine_stats()
        with self._reader as handle:
            engine = llm.cpa_llm_engine(handle)
            status = lib.cpa_engine_get_stats(engine, ctypes.byref(stats), ctypes.sizeof(stats))
            if status:
                raise_status(status, lib.cpa_engine_error(engine))
        values = ((field[0], getattr(stats, field[0])) for field in stats._fields_)
        return {name: value for name, value in values if isinstance(value, (int, float))}

    def close(self) -> None:
        """Ends what is unfinished as "cancelled", and frees the model. Requests that have ended may still be read."""
        self._close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
