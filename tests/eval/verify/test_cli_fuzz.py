"""Mutated words and files: planted defects are found, and the existing commands hold.

partner of: eval/verify/cli_fuzz.py, eval/verify/cli_files.py, eval/verify/cli_inputs.py
"""

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Annotated

import pytest
import torch
import typer

from tests.vcsd_cli.test_main import vcsd
from vcsd_cli.main import app
from vcsd_eval.verify import cli_fuzz
from vcsd_eval.verify.cli_files import DOCUMENTS, NAMES, SHORT, make_folder
from vcsd_eval.verify.cli_inputs import make_input


def made_up(sheep: Annotated[int, typer.Option(min=1, max=9)] = 3) -> None:
    """A made-up command."""


def fail():
    raise RuntimeError("no sheep")


def die():
    faulthandler.disable()  # pytest's would print this crash, which the test wants
    os.kill(os.getpid(), signal.SIGSEGV)


def busy(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    make_folder(tmp_path / "files")
    return tmp_path / "files"


@pytest.fixture
def ends(folder, monkeypatch):
    """How inputs end where a program's main function is this one."""
    herd = typer.Typer(add_completion=False)
    herd.command("herd")(made_up)
    program = object.__new__(cli_fuzz.ForkedProgram)
    program.commands = [(("herd",), typer.main.get_command(herd))]
    for place in cli_fuzz.CUT:  # a program has imported them before it is forked
        cli_fuzz._holder(place)
    monkeypatch.setattr(cli_fuzz, "_program", program)

    def run(main, count=1):
        program.main = main
        return [cli_fuzz._try(folder, 0, number) for number in range(count)]

    return run


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (fail, "tracebacks"),
        (die, "signals"),
        (lambda: time.sleep(60), "hangs"),
        (lambda: busy(60), "hangs"),
        (lambda: sys.exit(1), None),
    ],
)
def test_every_kind_of_failure_is_detected(ends, main, kind, monkeypatch):
    if kind == "hangs":
        monkeypatch.setattr(cli_fuzz, "HANG_S", 0.5)
        monkeypatch.setattr(cli_fuzz, "WAIT_S", 2.5)
    assert [each.kind for each in ends(main)] == [kind]


def test_slow_command_on_busy_machine_is_no_hang(ends, monkeypatch):
    monkeypatch.setattr(cli_fuzz, "HANG_S", 0.5)
    assert [each.kind for each in ends(lambda: time.sleep(1))] == [None]


def test_torch_in_forked_command_does_not_hang(ends, monkeypatch):
    monkeypatch.setattr(cli_fuzz, "WAIT_S", 20.0)
    values, threads = torch.ones(512, 512), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.mm(values, values)
        assert [each.kind for each in ends(lambda: torch.mm(values, values))] == [None]
    finally:
        torch.set_num_threads(threads)


def test_accepted_invalid_input_is_reported_silent(ends):
    kinds = {each.kind for each in ends(lambda: None, 20)}
    assert kinds == {None, "silent"}  # not all mutations must be refused


def test_traceback_of_another_thread_is_detected(ends):
    said = b"Traceback (most recent call last):\n...\nRuntimeError: thread\n"
    (ended,) = ends(lambda: os.write(2, said))
    assert (ended.kind, ended.says) == ("tracebacks", "RuntimeError: thread")


def test_valid_values_are_of_existing_parameters():
    commands = cli_fuzz.ForkedProgram().commands
    known = {(path[-1], param.name) for path, command in commands for param in command.params}
    known |= {("", name) for _, name in known}
    assert {*NAMES, *SHORT} <= known


def test_inputs_deterministic_and_of_all_commands():
    commands = list(app.leaf_commands())
    inputs = [make_input(commands, 5, number) for number in range(3000)]
    assert inputs == [make_input(commands, 5, number) for number in range(3000)]
    assert inputs != [make_input(commands, 6, number) for number in range(3000)]
    for path, _ in commands:
        assert any(each.words[: len(path)] == path for each in inputs)
    assert {name for each in inputs for name in each.files} == set(DOCUMENTS)
    assert 500 < sum(each.refused for each in inputs) < 2500


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [25, pytest.param(300, marks=pytest.mark.long)])
def test_cli_fuzz_finds_nothing_and_has_all_keys(capsys, monkeypatch, inputs):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, _ = vcsd(capsys, monkeypatch, "bench", "cli-fuzz", "--inputs", str(inputs), "--seed", "3", "-o", "json")
    result = json.loads(out)
    assert (code, result["found"]) == (0, []), out
    assert (result["inputs"], result["commands"]) == (inputs, len(list(app.leaf_commands())))
    assert [result[key] for key in ("tracebacks", "signals", "silent", "hangs")] == [0, 0, 0, 0]
    assert 0 < result["accepted"] < inputs
