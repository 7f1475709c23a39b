"""Progress on stderr: a bar on a terminal, otherwise a line at intervals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.text import Text

Tick = Callable[[object], None]  # called when a part is done; the argument is ignored
Send = Callable[[str], None]  # called with each text of a worker's progress

err = Console(stderr=True)
COMPILING, COMPILING_S = "compiling kernels (first run only)", 2.0  # delay of its first line, seconds
PERIOD_S, RARER = 10.0, 0.05  # interval of lines: seconds, or this fraction of the elapsed time if longer
_send: Send | None = None  # for texts that are not shown here


def no_tick(_: object) -> None:
    """A tick without effect."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Tick]:
    """Show how many of `total` parts are done; call the yielded function for each. The bar appears with the first."""
    if _send:
        yield _sent_count(_send, what, total)
        return
    with _bar(what, total) if err.is_terminal else _counted(what, total) as tick:
        yield tick


@contextmanager
def status(what: str | Callable[[], str]) -> Iterator[None]:
    """Show `what`, or the text that it returns, while a long block runs."""
    text = what if callable(what) else lambda: what
    if _send:
        _send(text())
        yield
        return
    with err.status(_SpinnerText(text)) if err.is_terminal else _lines(text):
        yield


@contextmanager
def progress_to(send: Send) -> Iterator[None]:
    """Pass the text of every `progress` and `status` of a block to a function instead of showing it.

    With it, a worker process reports to the process that shows the progress of all workers.

    Args:
        send: Called with each text in the thread that changes it.
    """
    global _send
    before, _send = _send, send
    try:
        yield
    finally:
        _send = before


def _sent_count(send: Send, what: str, total: int) -> Tick:
    done: list[object] = []

    def tick(part: object) -> None:
        done.append(part)
        send(f"{what}: {len(done)} of {total}")

    send(f"{what}: 0 of {total}")
    return tick


def note(line: str) -> None:
    """Print one line."""
    err.print(line, soft_wrap=True, highlight=False, markup=False)


class _SpinnerText:
    """Text of a spinner, evaluated for each frame."""

    def __init__(self, text: Callable[[], str]) -> None:
        self.text = text

    def __rich__(self) -> str:
        return COMPILING if _is_compiling() else self.text()


def _is_compiling() -> bool:
    """Whether Numba is compiling, here or in a drive server that is starting. Does not import Numba."""
    compiled, servers = sys.modules.get("csd_io.compiled"), sys.modules.get("csd_link.private_server")
    return bool((compiled and compiled.is_compiling()) or (servers and servers.compiling))


@contextmanager
def _bar(what: str, total: int) -> Iterator[Tick]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

    class What(TextColumn):
        def render(self, task: Task) -> Text:
            return Text(COMPILING if _is_compiling() else task.description)

    columns = What(""), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True)
    task = bar.add_task(what, total=total)

    def tick(_: object) -> None:
        if not bar.live.is_started:
            if sys.stdout.isatty():
                print(flush=True)
            bar.start()
        bar.advance(task)

    try:
        yield tick
    finally:
        bar.stop()


@contextmanager
def _counted(what: str, total: int) -> Iterator[Tick]:
    done: list[object] = []
    with _lines(lambda: f"{what}: {len(done)} of {total}"):
        yield done.append


@contextmanager
def _lines(text: Callable[[], str]) -> Iterator[None]:
    """Print text() and the elapsed seconds, every few seconds at first and less often later.

    While Numba compiles, COMPILING is printed instead, and the first line comes sooner.
    """
    ended, began = Event(), time.monotonic()

    def say(what: str) -> None:
        print(f"{what}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def write() -> None:
        if not ended.wait(min(COMPILING_S, PERIOD_S)) and _is_compiling():
            say(COMPILING)
        while not ended.wait(max(PERIOD_S, RARER * (time.monotonic() - began))):
            say(COMPILING if _is_compiling() else text())

    thread = Thread(target=write, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
