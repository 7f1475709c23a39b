"""How far something is: plain lines where there is no terminal, and nothing where it is quick."""

import time

from vcsd import progress


def test_lines_say_what_is_done_of_how_much(capsys, monkeypatch):
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


def test_lines_become_rarer(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PERIOD_S", 0.001)
    monkeypatch.setattr(progress, "RARER", 10.0)  # the second line comes after ten times what the first took
    with progress.status("waiting"):
        said, began = "", time.monotonic()
        while said.count("waiting") < 2:
            time.sleep(0.001)
            said += capsys.readouterr().err
    assert time.monotonic() - began >= 0.01
