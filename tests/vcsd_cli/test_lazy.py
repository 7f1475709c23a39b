"""Commands that are imported on use, and experiments whose arguments are their options.

partner of: vcsd_cli/experiments.py, eval/experiment.py, eval/options.py, vcsd/options.py, vcsd/tables.py
"""

import gc
import json
import subprocess
import sys

import pytest

from tests.code_limits import ROOT
from tests.vcsd_cli.test_main import vcsd
from vcsd_cli.experiments import BENCH, EVAL
from vcsd_cli.main import app
from vcsd_eval.options import number, numbers

MADE_UP = '''
"""A made-up experiment."""

from dataclasses import dataclass
from typing import Annotated

import typer

from vcsd_eval.experiment import Outcome
from vcsd.tables import table


@dataclass(frozen=True, slots=True)
class Herd:
    """Who takes part."""

    sheep: Annotated[int, typer.Option(min=1, help="how many")] = 3
    name: Annotated[str, typer.Option("--called", help="what they are called")] = "Dolly"


def experiment(herd: Herd, jumps: Annotated[int, typer.Option(help="of each")] = 2) -> Outcome:
    """Sheep jump."""
    if jumps < 0:
        raise KeyboardInterrupt
    total = herd.sheep * jumps
    return Outcome({"name": herd.name, "jumps": total}, [table("Sheep", ("name",), [(herd.name,)])], failed=total > 9)
'''


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    (tmp_path / "made_up_experiment.py").write_text(MADE_UP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(BENCH, "sheep", "made_up_experiment")


@pytest.mark.usefixtures("made_up")
def test_an_experiment_is_one_file_and_one_line(capsys, monkeypatch):
    code, out, _ = vcsd(capsys, monkeypatch, "bench", "sheep", "--called", "Shaun", "--jumps", "3", "-o", "json")
    assert (code, json.loads(out)) == (0, {"name": "Shaun", "jumps": 9})
    code, out, _ = vcsd(capsys, monkeypatch, "bench", "sheep", "--sheep", "10")
    assert code == 1  # it failed, and shows what it has found
    assert "Dolly" in out
    code, out, err = vcsd(capsys, monkeypatch, "bench", "sheep", "--sheep", "0")
    assert (code, out) == (2, "")
    assert "--sheep" in err
    _, out, _ = vcsd(capsys, monkeypatch, "bench", "--help")
    assert "Sheep jump." in out
    assert vcsd(capsys, monkeypatch, "bench", "sheep", "--jumps", "-1") == (130, "", "vcsd: interrupted\n")


def test_commands_can_be_held_in_the_head():
    assert len(dict(app.leaf_commands())) <= 57


def test_old_package_name_names_the_new_one():
    done = subprocess.run([sys.executable, "-m", "eval.rtl.synth"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "import it as vcsd_eval" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [["--help"], ["bench", "--help"], ["eval", "--help"], ["bench", "nothing"]])
def test_help_imports_no_slow_packages(words):
    code = "import sys; from vcsd_cli.main import main\ntry: main()\n"
    slow = {"torch", "numba", "numpy", "pandas", "transformers", "matplotlib", "starlette"}
    code += f"finally: print(*{slow} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collector_is_off_during_command_import(monkeypatch, collects):
    """Whatever becomes of the import, the collector is afterwards as it was."""
    seen = []

    def broken(name):
        seen.append(gc.isenabled())
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", broken)
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError):
            app.load("run")
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "word", [*(f"bench {name}" for name in BENCH), *(f"eval {name}" for name in EVAL), "verify", "report"]
)
def test_every_experiment_prints_help(capsys, monkeypatch, word):
    code, out, _ = vcsd(capsys, monkeypatch, *word.split(), "--help")
    assert code == 0
    assert "Usage" in out


def test_number_lists_with_commas_are_parsed():
    assert numbers("batch_sizes", "4,16") == [4, 16]
    assert numbers("compression", "5.333", float) == [5.333]
    assert number("batch_sizes", "64") == 64
    for text, reason in (("4,x", "numbers with commas"), ("0", "at least 1")):
        with pytest.raises(ValueError, match=f"batch_sizes = '{text}': .*{reason}"):
            numbers("batch_sizes", text)
    with pytest.raises(ValueError, match="this figure is of one"):
        number("batch_sizes", "4,16")
