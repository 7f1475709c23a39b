"""Old names of commands and options work, with a warning; a name has one meaning.

partner of: vcsd_cli/renamed.py
"""

from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
from typer.core import TyperOption

from csd_spec import renamed as python_names
from tests.vcsd_cli.test_main import vcsd
from vcsd_cli.main import app
from vcsd_cli.renamed import COMMANDS, OPTIONS, REMOVED_IN, new_options

TWO_MEANINGS = {
    "--drive-config": "a file, or for `create` also the name of a preset",
    "--model": "a folder of a model to run, or the name of a profile to model",
}


@pytest.fixture(scope="module")
def options():
    """Options of all commands: by command, then by name."""
    return {
        words: {name: each for each in leaf.params if isinstance(each, TyperOption) for name in each.opts}
        for words, leaf in app.leaf_commands()
    }


@pytest.mark.parametrize(
    ("group", "old", "new"), [(g, old, new) for g, names in COMMANDS.items() for old, new in names.items()]
)
def test_old_command_works_with_warning(capsys, monkeypatch, group, old, new):
    code, out, err = vcsd(capsys, monkeypatch, group, old, "--help")
    assert code == 0 and "Usage" in out
    assert f"{group} {old} is now {group} {new}" in err
    assert old not in app.load(group).list_commands(None)


@pytest.mark.parametrize(("old", "new"), OPTIONS.items())
def test_old_option_is_option_of_some_command(options, old, new):
    having = [names for names in options.values() if new in names and old not in names]
    assert having, f"no command has {new}"


@pytest.mark.parametrize(("old", "new"), OPTIONS.items())
def test_old_option_is_replaced_with_warning(capsys, old, new):
    assert new_options([old, "3", f"{old}=4", "--", old], {new}) == [new, "3", f"{new}=4", "--", old]
    assert capsys.readouterr().err.count(f"warning: {old} is now {new}") == 2


def test_option_of_that_name_is_not_replaced():
    assert new_options(["--threads", "2"], {"--threads", "--kernel-threads"}) == ["--threads", "2"]
    assert new_options(["--threads", "2"], {"--other"}) == ["--threads", "2"]


def test_output_was_number_of_tokens_in_some_commands(capsys, options):
    for words in (("eval", "throughput"), ("eval", "claims")):
        new = "--new-tokens" if words[1] == "throughput" else "--output-format"
        assert new_options(["--output", "64"], set(options[words])) == [new, "64"]
    assert "warning: --output is now --new-tokens" in capsys.readouterr().err


def test_old_option_runs(capsys, monkeypatch, tmp_path):
    code, _, err = vcsd(capsys, monkeypatch, "create", "one", "--durability", "host", "--host-memory-mib", "0")
    assert code == 2 and "--page-buffer-mib" in err and "--durability is now --flush-durability" in err
    code, _, err = vcsd(capsys, monkeypatch, "bench", "cli-fuzz", "--first", "0", "--inputs", "0")
    assert code == 2 and "is now" not in err


def test_old_and_new_option_together_are_given_twice(capsys, monkeypatch):
    code, _, err = vcsd(capsys, monkeypatch, "run", "--keep", "a", "--data-dir", "b")
    assert code == 2 and "--data-dir is given twice" in err


def test_option_name_means_same_kind_of_value_everywhere(options):
    kinds = defaultdict(set)
    for names in options.values():
        for name, option in names.items():
            kind = option.type_descriptor.annotation
            kinds[name].add("path" if Path in (kind, *get_args(kind)) else "value")  # a repeatable one is a list
    assert {name for name, found in kinds.items() if len(found) > 1} == set(TWO_MEANINGS)


def test_flag_is_flag_everywhere(options):
    flags = defaultdict(set)
    for names in options.values():
        for name, option in names.items():
            flags[name].add(option.is_flag)
    assert not {name for name, found in flags.items() if len(found) > 1}


def test_release_that_ends_old_names_is_one():
    assert python_names.REMOVED_IN == REMOVED_IN
