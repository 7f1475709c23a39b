"""The end of a local fleet's process."""

import signal

import pytest

from fleet import local


@pytest.mark.parametrize(("lives_s", "killed"), [(0.0, False), (1.0, False), (1e9, True)])
def test_process_that_does_not_end_in_time_is_killed(monkeypatch, lives_s, killed):
    now, sent = 100.0, list[tuple[int, int]]()

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(local.time, "monotonic", lambda: now)
    monkeypatch.setattr(local.time, "sleep", sleep)
    monkeypatch.setattr(local.os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(local, "is_running", lambda pid: now < 100.0 + lives_s)
    local._stop(7)
    assert sent == [(7, signal.SIGTERM), (7, signal.SIGKILL)][: 1 + killed]
    waits_s = min(lives_s, local.STOP_TIMEOUT_S)
    assert waits_s <= now - 100.0 < waits_s + 1


def test_process_that_is_gone_is_left(monkeypatch):
    def kill(pid, number):
        raise ProcessLookupError

    monkeypatch.setattr(local.os, "kill", kill)
    local._stop(7)
