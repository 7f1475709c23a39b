"""Server with continuous batching: request handles, and the iterations that produce their tokens."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

from host_driver.hf.rows import RowModel
from kv_cache.engine import Engine
from kv_cache.scheduler import SchedulerOutput
from kv_cache.trace import Request
from vcsd.config import ServingConfig
from vcsd.counters import counters_of
from vcsd.sampling import Sampler, SamplingParams, TokenLogprob
from vcsd.session import Session


class RequestRejectedError(ValueError):
    """A request that was not accepted; the message has the reason."""


class QueueFullError(RequestRejectedError):
    """A request that was not accepted because too many requests wait."""


class ServerClosedError(RequestRejectedError):
    """A request to a server that is closed."""


def _ignore() -> None:
    """Listener of a request without one."""


class RequestHandle:
    """A request and its tokens. Iterate over it, in any thread, to get tokens as they are produced.

    Attributes:
        tokens: Tokens so far.
        logprobs: Log-probabilities of these tokens; empty unless the sampling parameters ask for them.
        finish_reason: `length`, `stop`, `cancelled` or `failed` (iterating then raises `error`); empty before.
        error: Exception of a failed request.
        idle: Iterations since its last token.
        max_idle: Maximum of `idle` so far.
    """

    def __init__(
        self, server: Server, request: Request, prompt: Sequence[int], stop: Collection[int], sampling: SamplingParams
    ) -> None:
        self._server, self.request, self.prompt, self.stop = server, request, list(prompt), frozenset(stop)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.listener: Callable[[], object] = _ignore
        self.finish_reason = ""
        self.error: BaseException | None = None
        self.over = ""  # reason of its end, set before its resources are freed
        self.sampler = Sampler(sampling)
        self.idle = self.max_idle = 0
        self.since_s = time.monotonic()  # arrival or last token

    @property
    def number(self) -> int:
        """Number of the request in the server."""
        return self.request.number

    def __iter__(self) -> Iterator[int]:
        at = 0
        while self._server.wait(self, at):
            new = self.tokens[at:]
            yield from new
            at += len(new)
        if self.error:
            raise self.error

    def result(self) -> list[int]:
        """Wait for the end; returns all tokens."""
        return list(self)

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the request; its tokens so far remain available. `reason`: its `finish_reason`."""
        self._server.cancel(self, reason)


class Server:
    """A model that serves requests. `vcsd.serve` creates one, and runs its iterations in a thread.

    Attributes:
        report: Returns the `Report` of the work so far.
        kv: KV data of its requests.
        counters: Requests, tokens and times.
    """

    def __init__(
        self, session: Session, rows: RowModel, engine: Engine, max_tokens: int, config: ServingConfig
    ) -> None:
        """Create a server.

        Args:
            session: KV data of its requests.
            rows: The model.
            engine: Schedules iterations in simulated time.
            max_tokens: Maximum length of a request, tokens.
            config: Its queue, and whether the engine is corrected by measured times of decode steps.
        """
        self.report, self._rows, self._engine, self._measured = session.report, rows, engine, config.replan_on_drift
        self._layers = len(rows.kv.runner.layers)
        self.max_tokens, self.max_waiting = max_tokens, config.max_queued_requests
        self.kv = rows.kv
        self.counters = counters_of(rows.kv)
        self.handles: dict[int, RequestHandle] = {}
        self._incoming: deque[RequestHandle] = deque()
        self._cancelled: deque[tuple[RequestHandle, str]] = deque()
        self._changed = threading.Condition()
        self._busy = threading.Lock()  # held during an iteration
        self._thread: threading.Thread | None = None
        self._count, self._closed, self._process = 0, False, os.getpid()
        self._cause: BaseException | None = None

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop: Collection[int] = (),
        sampling: SamplingParams = SamplingParams(),
        listener: Callable[[], object] = _ignore,
    ) -> RequestHandle:
        """Submit a request.

        Args:
            prompt: Token IDs.
            max_new_tokens: Maximum number of tokens to generate.
            stop: Token IDs that end the request; the stop token is its last token.
            sampling: Sampling parameters.
            listener: Called without arguments after each token and after the end, in the thread of the iterations. It
                must return at once, and must not raise.

        Raises:
            ValueError: An argument is invalid.
            RequestRejectedError: (a ValueError) The server does not accept the request.
        """
        self._check_process()
        prompt, stop = token_ids("prompt", prompt, self._rows.vocabulary), token_ids("stop", stop)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral):
            raise ValueError(f"max_new_tokens = {max_new_tokens!r}: must be a whole number")
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"{len(prompt)} tokens, and {max_new_tokens} new ones: both must be at least 1")
        with self._changed:
            self._count += 1
            request = Request(number=self._count, arrival=0.0, input_tokens=len(prompt), output_tokens=max_new_tokens)
            handle = RequestHandle(self, request, prompt, stop, sampling)
            handle.listener = listener
            try:
                self._check(request)
            except RequestRejectedError:
                self.counters.ended("rejected")
                raise
            self._incoming.append(handle)
            self._changed.notify_all()
        return handle

    def _check_process(self) -> None:
        """Raise ServerClosed in a forked child, which has none of our threads."""
        if os.getpid() != self._process:
            raise ServerClosedError("this process was forked from that of the server: submit requests in the parent")

    def _check(self, request: Request) -> None:
        """Raise Rejected if the server does not accept a request."""
        if self._closed:
            raise ServerClosedError("the server is closed" + (f": {self._cause}" if self._cause else ""))
        if request.tokens > self.max_tokens:
            raise RequestRejectedError(
                f"{request.tokens:,} tokens in all: must be at most max_tokens = {self.max_tokens:,}"
            )
        room = self.kv.runner.machine.tiers["device"].limit_bytes
        if room is not None and request.tokens * self.kv.format.row_bytes > room:
            raise RequestRejectedError(
                f"a layer's KV data at {request.tokens:,} tokens exceeds the device's {room:,} bytes"
            )
        try:
            self._engine.check(request)
        except ValueError as error:
            raise RequestRejectedError(str(error)) from error
        waiting = len(self._incoming) + sum(not handle.tokens for handle in self.handles.values())
        if waiting >= self.max_waiting:
            raise QueueFullError(f"{waiting} requests wait already: try again later")

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted: not after `close`, or an error that ended the iterations."""
        return not self._closed

    def cancel(self, handle: RequestHandle, reason: str = "cancelled") -> None:
        """Cancel a request before the next iteration, or now if none is running."""
        with self._changed:
            if not handle.finish_reason:
                self._cancelled.append((handle, reason))
                self._changed.notify_all()
        if self._thread is None and self._busy.acquire(blocking=False):
            try:
                self._admit_and_cancel()
            finally:
                self._busy.release()

    def wait(self, handle: RequestHandle, count: int) -> bool:
        """Wait until a request has more than `count` tokens; False if it ends before."""

        def there() -> bool:
            return len(handle.tokens) > count or bool(handle.finish_reason)

        if not there():
            self._check_process()
        while self._thread is None and not there():
            with self._busy:
                if not there() and not self._step():
                    break
        with self._changed:
            self._changed.wait_for(there)
        return len(handle.tokens) > count

    def step(self) -> bool:
        """Run one iteration; False if there is no request."""
        with self._busy:
            return self._step()

    def _step(self) -> bool:
        if self._closed:
            return False
        self._admit_and_cancel()
        output = self._engine.schedule()
        if output is None:
            return False
        for number in output.preempted & self.kv.requests():
            self.kv.free([number])  # recomputed when it is scheduled again
        emitted, took_s = list[RequestHandle](), None
        prompts, decoding = self._split(output)
        ran: set[int] = set()
        try:
            for handle, tokens, final in prompts:
                if self._compute([handle], [tokens], output, emitted, final):
                    ran.add(handle.number)
            began_s = time.monotonic()
            if self._compute(decoding, [handle.tokens[-1:] for handle in decoding], output, emitted):
                ran |= {handle.number for handle in decoding}
            took_s = time.monotonic() - began_s if self._measured and decoding else None
        finally:  # also after an interruption
            self._engine.complete(output, ran, took_s, most=1)
            self._count_idle(emitted)
            for handle in [handle for handle in emitted if handle.over]:
                self._finish_request(handle, handle.over)
        return True

    def _split(
        self, output: SchedulerOutput
    ) -> tuple[list[tuple[RequestHandle, list[int], bool]], list[RequestHandle]]:
        """Prompts with the tokens to compute now and whether these are the last, and requests that decode."""
        prompts, decoding = [], list[RequestHandle]()
        for number, count in output.num_scheduled_tokens.items():
            handle = self.handles[number]
            all_tokens, stored = handle.prompt + handle.tokens, self.kv.tokens(number)
            if handle.tokens and stored == len(all_tokens) - 1:
                decoding.append(handle)
            else:
                prompts.append((handle, all_tokens[stored : stored + count], stored + count >= len(all_tokens)))
        return prompts, decoding

    def run(self) -> None:
        """Run iterations until no request is left."""
        while self.step():
            pass

    def start(self) -> None:
        """Run iterations in a background thread from now on."""
        self._thread = threading.Thread(target=self._work, name="server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel all requests and free everything."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._busy:
            for handle in [*self._incoming, *self.handles.values()]:
                self._end(handle, "cancelled")
            self.kv.close()

    def _work(self) -> None:
        try:
            while not self._closed:
                if not self.step():
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed or self._incoming or self._cancelled)
        except BaseException as error:  # noqa: BLE001 - an error of the policy or of the thread: fail all requests
            with self._changed:
                self._closed, self._cause = True, error
            for handle in [*self._incoming, *self.handles.values()]:
                self._end(handle, "failed", error)

    def _admit_and_cancel(self) -> None:
        """Admit queued requests and remove cancelled ones."""
        with self._changed:
            while self._incoming:
                handle = self._incoming.popleft()
                self.handles[handle.number] = handle
                self._engine.add(handle.request)
            cancelled, self._cancelled = self._cancelled, deque()
        for handle, reason in cancelled:
            if not handle.finish_reason:
                self._finish_request(handle, reason)

    def _compute(
        self,
        handles: list[RequestHandle],
        tokens: list[list[int]],
        output: SchedulerOutput,
        emitted: list[RequestHandle],
        final: bool = True,
    ) -> bool:
        """Compute tokens of requests, and sample the next ones if these were the last of a prompt.

        Returns:
            Whether they were computed. If not, the requests have failed.
        """
        if not handles:
            return False
        chunks: dict[Hashable, list[int]] = {handle.number: ids for handle, ids in zip(handles, tokens, strict=True)}

        try:
            logits = self._rows.forward(chunks, output.assignment(self._layers))
        except BaseException as error:  # other requests are not affected
            for handle in handles:
                self._finish_request(handle, "failed", error)
            if not isinstance(error, Exception):
                raise
            return False
        for handle, row in zip(handles, logits if final else (), strict=final):
            try:
                token = handle.sampler.next(row, handle.prompt + handle.tokens)
                self._emit(handle, token, handle.sampler.logprobs(row, token))
                emitted.append(handle)
            except Exception as error:  # noqa: BLE001 - fails this request alone
                self._finish_request(handle, "failed", error)
        return True

    def _emit(self, handle: RequestHandle, token: int, logprobs: list[TokenLogprob]) -> None:
        now_s = time.monotonic()
        self.counters.token(now_s - handle.since_s, first=not handle.tokens)
        with self._changed:
            handle.since_s, handle.idle = now_s, 0
            handle.logprobs += logprobs
            handle.tokens.append(token)
            if token in handle.stop:
                handle.over = "stop"
            elif len(handle.tokens) == handle.request.output_tokens:
                handle.over = "length"
            self._changed.notify_all()
        handle.listener()

    def _count_idle(self, emitted: list[RequestHandle]) -> None:
        for handle in self.handles.values():
            if handle not in emitted:
                handle.idle += 1
                handle.max_idle = max(handle.max_idle, handle.idle)
        longest = max((handle.max_idle for handle in self.handles.values()), default=0)
        self.counters.iteration(len(emitted), len(self.handles), longest)

    def _finish_request(self, handle: RequestHandle, how: str, error: BaseException | None = None) -> None:
        """Free all resources of a request and end it."""
        self._engine.remove(handle.number)
        self.kv.free([handle.number])
        self._end(handle, how, error)

    def _end(self, handle: RequestHandle, how: str, error: BaseException | None = None) -> None:
        self.counters.ended(how, len(self.handles) - (handle.number in self.handles))
        with self._changed:
            self.handles.pop(handle.number, None)
            handle.finish_reason, handle.error = how, error
            self._changed.notify_all()
        handle.listener()


def token_ids(name: str, tokens: Any, vocabulary: int = 1 << 31) -> list[int]:
    """Token IDs from a list, an array, a tensor, or a batch of one row; raises ValueError."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    tokens = [tokens] if isinstance(tokens, int) else tokens
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ValueError(f"{name} = {tokens!r}: must be token IDs")
    ids = list(tokens)
    if len(ids) == 1 and isinstance(ids[0], list):
        (ids,) = ids
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocabulary:
            raise ValueError(f"{name}: {token!r} is not a token ID: must be a whole number from 0 to {vocabulary - 1}")
    return [int(token) for token in ids]
