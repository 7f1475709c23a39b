"""The name of an option has one meaning in all commands."""

from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
from typer.core import TyperOption

from vcsd_cli.main import app

TWO_MEANINGS = {
    "--drive-config": "a file, or for `create` also the name of a preset",
    "--model": "a folder of a model to run, or the name of a profile to model",
}


@pytest.fixture(scope="module")
def options():
    """Options of all commands, by name."""
    by_name = defaultdict(list)
    for _, command in app.leaf_commands():
        for option in command.params:
            for name in option.opts if isinstance(option, TyperOption) else ():
                by_name[name].append(option)
    return by_name


def is_path(option):
    annotation = option.type_descriptor.annotation
    return Path in (annotation, *get_args(annotation))


def test_option_name_means_same_kind_of_value_everywhere(options):
    kinds = {name: {is_path(option) for option in those} for name, those in options.items()}
    assert {name for name, those in kinds.items() if len(those) > 1} == set(TWO_MEANINGS)


def test_flag_is_flag_everywhere(options):
    flags = {name: {option.is_flag for option in those} for name, those in options.items()}
    assert not {name for name, those in flags.items() if len(those) > 1}
