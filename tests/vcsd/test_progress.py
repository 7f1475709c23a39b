"""Progress messages: plain lines without a terminal, and none for short work."""

import time
from contextlib import ExitStack

import pytest
from numba.core import event

from csd_io import compiled
from vcsd import progress


def test_progress_lines_show_done_and_total(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PERIOD_S", 0.02)
    with progress.progress("steps", 3) as tick:
        tick(None)
        tick("anything")
        said = ""
        while "steps: 2 of 3, 0 s" not in said:
            time.sleep(0.01)
            said += capsys.readouterr().err
    monkeypatch.setattr(progress, "PERIOD_S", 10.0)
    with progress.status("loading"):
        pass
    assert "loading" not in capsys.readouterr().err


def test_progress_lines_become_rarer(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PERIOD_S", 0.001)
    monkeypatch.setattr(progress, "RARER", 10.0)  # the second line comes after ten times what the first took
    with progress.status("waiting"):
        said, began = "", time.monotonic()
        while said.count("waiting") < 2:
            time.sleep(0.001)
            said += capsys.readouterr().err
    assert time.monotonic() - began >= 0.01


@pytest.mark.parametrize(("compiles", "expected"), [(True, "compiling kernels"), (False, "reading")])
def test_status_shows_compilation_by_numba(capsys, monkeypatch, compiles, expected):
    """partner of: csd_io/compiled.py"""
    monkeypatch.setattr(progress, "PERIOD_S", 0.02)
    with ExitStack() as compiling, progress.status("reading"):
        if compiles:
            compiling.enter_context(event.trigger_event("numba:compile"))
        time.sleep(0.2)
        said = capsys.readouterr().err
    assert expected in said


def test_progress_of_worker_is_sent_not_shown(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PERIOD_S", 0.001)
    sent = []
    with progress.progress_to(sent.append):
        with progress.status("loading"):
            time.sleep(0.01)
        with progress.progress("steps", 2) as tick:
            tick(None)
            tick(None)
    assert sent == ["loading", "steps: 0 of 2", "steps: 1 of 2", "steps: 2 of 2"]
    assert capsys.readouterr().err == ""
    with progress.status(lambda: f"{len(sent)} texts"):
        time.sleep(0.05)
    assert "4 texts, 0 s" in capsys.readouterr().err


def test_is_compiling_new_function_true_while_numba_compiles():
    seen = []

    class Listener(event.Listener):
        def on_start(self, event):
            seen.append(compiled.is_compiling())

        def on_end(self, event):
            pass

    with event.install_listener("numba:compile", Listener()):
        assert compiled.njit(lambda x: x + 1)(1) == 2
    assert seen and all(seen)
    assert not compiled.is_compiling()


@pytest.mark.parametrize("running", [0, 1, 2])
def test_one_compilation_is_enough_to_be_compiling(monkeypatch, running):
    monkeypatch.setattr(compiled._compilations, "running", running)
    assert compiled.is_compiling() == (running > 0)
