"""An option is accepted once, and every number has a declared range."""

import pytest
from typer.core import TyperOption

import vcsd as public
from tests.vcsd_cli.test_main import vcsd
from vcsd_cli.main import app


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "accuracy", "--task", "squad", "--method", "dense", "--method", "sparf"],
        ["run", "--restart-drives", "--no-restart-drives"],
        ["drive", "log", "x", "smart", "-o", "json", "--output-format", "json"],
    ],
)
def test_option_given_twice_is_refused(capsys, monkeypatch, words):
    code, out, err = vcsd(capsys, monkeypatch, *words)
    assert (code, out) == (2, "")
    assert "is given twice: give it once" in err


def test_list_option_may_be_repeated(capsys, monkeypatch):
    words = ["drive", "passthru", "x", "--opcode", "0xca", "-p", "2", "-p", "3", "--dry-run"]
    assert vcsd(capsys, monkeypatch, *words)[0] == 0


def test_every_number_option_has_a_range():
    commands = dict(app.leaf_commands())
    assert {("run",), ("bench", "ftl"), ("drive", "log")} <= set(commands)
    numbers = [
        (path, option)
        for path, command in commands.items()
        for option in command.params
        if isinstance(option, TyperOption)
        and option.type_descriptor.annotation in (int, float)
        and not option.type_descriptor.parameter_info.parser
    ]
    assert len(numbers) > 80
    assert [(*path, each.opts) for path, each in numbers if each.max is None or each.min is None] == []


def test_number_out_of_range_is_refused_before_the_run(capsys, monkeypatch):
    for words in (["--batch", "1000000"], ["--compression", "nan"], ["--seed", "9" * 400], ["--drives", "-1"]):
        code, out, err = vcsd(capsys, monkeypatch, "run", *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert words[0] in err


def test_version_is_printed(capsys, monkeypatch):
    assert vcsd(capsys, monkeypatch, "--version") == (0, f"vcsd {public.__version__}\n", "")
