"""Requests of an Engine, and the thread that reads them."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import os
import threading
import traceback
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from . import _declarations as c
from ._library import Error, call, load_beside

llm = load_beside("cpattn.Engine", "libcpattn_llm.so", c.LLM_FUNCTIONS)

_NO_TOKEN = 0xFFFFFFFF  # CPA_NO_TOKEN
_REASONS = {c.CPA_FINISH_LENGTH: "length", c.CPA_FINISH_CANCELLED: "cancelled", c.CPA_FINISH_EXPIRED: "expired",
            c.CPA_FINISH_FAILED: "failed", c.CPA_FINISH_STOP: "stop"}


@dataclass(frozen=True)
class Piece:
    """What has come of an answer since the piece before: whole characters, which may be none, and tokens."""

    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None  # of each token, where they were asked for
    top_logprobs: list[dict[int, float]] | None = None  # of each token, the most probable ones, likewise


@dataclass(frozen=True)
class Answer:
    """A whole answer. ``finish_reason``: "stop", "length", "cancelled" or "expired"; ``stop``: the text that ended it.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None  # of each token of the prompt, None of the first
    top_prompt_logprobs: list[dict[int, float]] | None = None


class Request:
    """A request that was submitted. Iterated over, by ``for`` or ``async for``, it gives its pieces as they come.

    ``result()`` and ``await request`` give the whole answer, whether its pieces are iterated over or not. Where the
    request has failed, all of them raise ``cpattn.Error`` with the reason. A request is read by one thread or task;
    ``cancel`` may be called by any. As a context manager it cancels what is left at the end.

    ``samples``: of several answers to one prompt all requests, the first of which ``submit`` has returned.
    """

    def __init__(self, reader: Reader, handle: int, engine: object, tells_prompt: bool):
        n = ctypes.c_int64()
        ids = llm.cpa_llm_prompt_ids(handle, ctypes.byref(n))
        self.prompt_token_ids: list[int] = list((ctypes.c_uint32 * n.value).from_address(ids))
        self.others: list[Request] = []  # for other answers to the prompt, of the first request
        self._reader = reader
        self.handle = handle
        self._engine = engine  # which lives as long as somebody reads
        self._lock = threading.RLock()  # held by itself: KeyboardInterrupt may leave a Condition's "with" without
        self._news = threading.Condition(self._lock)  # letting go. What follows is guarded by it
        self._unread: collections.deque[Piece] = collections.deque()
        self._all: list[Piece] = []
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._awaits_prompt = tells_prompt  # what is said of it
        self._of_prompt: tuple[list[float | None], list[dict[int, float]]] | None = None
        self._reason: str | None = None  # None: it goes on
        self._stop: str | None = None
        self._error = ""

    def cancel(self) -> None:
        """Ends the request, which gives its blocks back; the answer then has the finish reason "cancelled"."""
        self._reader.cancel(self)

    @property
    def samples(self) -> list[Request]:
        """This request and those for the other answers to its prompt, in the order of their seeds."""
        return [self, *self.others]

    @property
    def done(self) -> bool:
        """Whether the request has ended. Pieces may still be there to be read."""
        return self._reason is not None

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the end, for so many seconds at most (TimeoutError), and returns the answer."""
        self._reader.check_process()
        with self._lock:
            if not self._news.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"cpattn: the request has not ended in {timeout} s")
        return self._answer()

    def _answer(self) -> Answer:
        self._raise_failure()
        logprobs = [p for piece in self._all for p in piece.logprobs or []]
        top = [p for piece in self._all for p in piece.top_logprobs or []]
        of_prompt, top_of_prompt = self._of_prompt or (None, None)
        return Answer("".join(piece.text for piece in self._all), [t for piece in self._all for t in piece.token_ids],
                      self.prompt_token_ids, self._reason or "", self._stop, logprobs or None, top or None, of_prompt,
                      top_of_prompt)

    def _raise_failure(self) -> None:
        if self._reason == "failed":
            raise Error(self._error)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        self._reader.check_process()
        with self._lock:
            self._news.wait_for(lambda: self._unread or self.done)
            if self._unread:
                return self._unread.popleft()
        self._raise_failure()
        raise StopIteration

    async def _wait(self, for_end: bool) -> None:
        """Until something comes, unless what is waited for is there."""
        self._reader.check_process()
        with self._lock:
            if self.done or (self._unread and not for_end):
                return
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, future))
        await future

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._unread and not self.done:
            await self._wait(for_end=False)
        if self._unread:
            return self._unread.popleft()
        self._raise_failure()
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Answer]:
        while not self.done:
            yield from self._wait(for_end=True).__await__()
        return self._answer()

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def take_prompt(self) -> None:
        """From the thread that reads, when the first token has come: what is said of the prompt, if that is wanted."""
        if not self._awaits_prompt:
            return
        self._awaits_prompt = False
        n = len(self.prompt_token_ids) - 1
        ranks = (c.cpa_token_ranks * n)()
        call(llm.cpa_llm_prompt_ranks, self.handle, 1, n, ranks)
        with self._lock:
            self._of_prompt = [None, *(rank.logprob for rank in ranks)], [{}, *map(_top_of, ranks)]

    def take(self, piece: Piece, reason: str | None, stop: str | None, error: str) -> None:
        """From the thread that reads: what has come, and why it has ended, if it has."""
        with self._lock:
            if piece.token_ids or piece.text:
                self._unread.append(piece)
                self._all.append(piece)
            self._stop, self._error, self._reason = stop, error, reason
            waiting, self._waiting = self._waiting, []
            self._news.notify_all()
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Reader:
    """The llm of the library, and the thread that reads its requests. It knows no Engine, which may end first."""

    def __init__(self, handle: ctypes.c_void_p, takes_requests: bool, held: Any):
        self.handle = handle
        self._held = held  # what has to outlive the llm
        self._lock = threading.RLock()  # held by itself: KeyboardInterrupt may leave a Condition's "with" without
        self._news = threading.Condition(self._lock)  # letting go. What follows is guarded by it
        self._requests: dict[int, Request] = {}  # those that have not ended, by their handles
        self._abandoned: set[int] = set()  # handles of those that nobody has: an exception came as they were submitted
        self._failure = ""  # why answers are not read any more
        self._calls = 0  # calls of the library under way, before whose end it may not be closed
        self._is_closed = False
        self._frees_llm = False  # the thread does so at its end: it has closed the reader itself
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._read, name="cpattn.Engine", daemon=True)
        if takes_requests:
            self._thread.start()

    def __enter__(self) -> ctypes.c_void_p:
        """Within it the llm stays open."""
        self.check_process()
        with self._lock:
            if self._is_closed:
                raise Error("cpattn: the engine is closed", "stopped")
            self._check_failure()
            self._calls += 1
        return self.handle

    def check_process(self) -> None:
        """A process that was forked has neither the threads of the engine nor, for certain, its locks."""
        if os.getpid() != self._process:
            raise Error(f"cpattn: the engine is that of process {self._process}, which this one was forked from",
                        "unsupported")

    def _check_failure(self) -> None:
        if self._failure:
            raise Error(self._failure)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            self._news.notify_all()

    def submit(self, prompt: Any, options: Any, n: int, engine: object, tells_prompt: bool) -> Request:
        """The first of the requests for n answers to a prompt."""
        with self as handle:
            made = (ctypes.c_void_p * n)()
            requests: list[Request] = []
            try:
                call(llm.cpa_llm_submit_samples, handle, ctypes.byref(prompt), ctypes.byref(options), n, made)
                with self._lock:  # the thread may have met them already, and waits for them here
                    self._check_failure()
                    for one in made:
                        requests.append(Request(self, one, engine, tells_prompt and not requests))
                        self._requests[one] = requests[-1]
                    self._news.notify_all()
                requests[0].others = requests[1:]
                return requests[0]
            except BaseException:  # such as KeyboardInterrupt
                for i, one in enumerate(made):
                    if one:
                        self._abandon(one, requests[i] if i < len(requests) else None)
                raise

    def _abandon(self, handle: int, request: Request | None) -> None:
        """Nobody has that request: it is cancelled, and the thread releases it when it meets it."""
        with self._lock:
            if request is None:
                self._abandoned.add(handle)
                llm.cpa_llm_cancel(handle)
            else:
                self.cancel(request)
            self._news.notify_all()

    def cancel(self, request: Request) -> None:
        self.check_process()
        with self._lock:
            if self._requests.get(request.handle) is request:  # else it has ended, and the handle may be another's
                llm.cpa_llm_cancel(request.handle)

    def _read(self) -> None:
        try:
            self._read_all()
        except BaseException as error:  # such as MemoryError
            self._fail(f"cpattn: answers are not read any more: {error!r}")
            traceback.print_exc()
        if self._frees_llm:
            self._free()

    def _fail(self, why: str) -> None:
        """Nobody is to wait for what is not read any more, nor to submit more of it."""
        with self._lock:
            self._failure = why
            left, self._requests = self._requests, {}
        llm.cpa_llm_stop(self.handle)
        for request in left.values():
            request.take(Piece("", []), "failed", None, why)

    def _read_all(self) -> None:
        found, err = ctypes.c_void_p(), c.cpa_error()
        while True:
            status = llm.cpa_llm_wait(self.handle, -1.0, ctypes.byref(found), ctypes.byref(err))
            if status == c.CPA_STOPPED:
                return
            if status == c.CPA_OK:
                self._read_one(found.value or 0)

    def _read_one(self, handle: int) -> None:
        with self._lock:
            self._news.wait_for(lambda: handle in self._requests or handle in self._abandoned)
            request = self._requests.get(handle)
            self._abandoned.discard(handle)
        if request is None:
            llm.cpa_llm_release(handle)
            return
        piece, err = c.cpa_llm_piece(), c.cpa_error()
        status = llm.cpa_llm_next(handle, 0.0, ctypes.byref(piece), ctypes.sizeof(piece), ctypes.byref(err))
        if status == c.CPA_BUSY:
            return
        reason: str | None = "failed"  # for want of memory
        taken, stop, error = Piece("", []), None, err.message
        if status == c.CPA_OK:
            taken, error = _piece_of(piece), piece.error or b""
            reason = _REASONS[piece.reason] if piece.has_ended else None
            stop = piece.stop.decode(errors="replace") if piece.stop else None
            if piece.n_tokens > 0:
                request.take_prompt()
        if reason is not None:
            with self._lock:
                del self._requests[handle]
            llm.cpa_llm_release(handle)
        request.take(taken, reason, stop, error.decode(errors="replace"))

    def close(self) -> None:
        """Ends all requests and frees the llm."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        llm.cpa_llm_stop(self.handle)
        if threading.current_thread() is self._thread:  # which had the last request of an engine that nobody has
            self._frees_llm = True
            return
        if self._thread.ident is not None:
            self._thread.join()
        self._free()

    def _free(self) -> None:
        with self._lock:
            self._news.wait_for(lambda: self._calls == 0)
        llm.cpa_llm_close(self.handle)


def _top_of(ranks: Any) -> dict[int, float]:
    return {t.token: t.logprob for t in ranks.top if t.token != _NO_TOKEN}


def _piece_of(piece: Any) -> Piece:
    n = piece.n_tokens
    at = ctypes.c_void_p.from_buffer(piece, c.cpa_llm_piece.text.offset).value or 0  # a text may hold U+0000
    text = ctypes.string_at(at, piece.text_bytes).decode(errors="replace")
    ids = list((ctypes.c_uint32 * n).from_address(piece.tokens)) if n else []
    logprobs = top = None
    if piece.logprobs and n:
        logprobs = list((ctypes.c_float * n).from_address(piece.logprobs))
    if piece.ranks and n:
        top = [_top_of(ranks) for ranks in (c.cpa_token_ranks * n).from_address(piece.ranks)]
    return Piece(text, ids, logprobs, top)
