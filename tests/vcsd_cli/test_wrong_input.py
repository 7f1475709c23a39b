"""Wrong values of options and wrong files end every command with one line, before a model is loaded.

partner of: vcsd_cli/strict.py, vcsd_cli/lazy.py
"""

import contextlib
import io
import random
import re
import sys
from itertools import chain, product
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from typer.core import TyperArgument, TyperOption

from nvmevirt_config import SHIPPED
from nvmevirt_config.document import dump_yaml, load_yaml
from vcsd_cli import main as cli
from vcsd_cli.main import app

COMMANDS = {" ".join(words): (words, command) for words, command in app.leaf_commands()}
WORDS = (
    "",
    " ",
    "x",
    "nan",
    "-inf",
    "1e400",
    "9" * 400,
    "0x",
    "1,,x",
    ",",
    "\U0001d11e\u202e",
    "{0}%s",
    "[red]",
    "\udcff",
)
LISTS = ("", ",", "1,x", "nan", "1,nan", "-1", "9" * 400, "1," * 2000)
SAMPLED = 3  # of these, for each option
REFUSED = 1, 2  # exit codes
FAULTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 0),
    st.floats(),
    st.text(max_size=4),
    st.just([]),
    st.just({"x": 1}),
)


def run(*words):
    """Exit code and stderr of a command in this process; fails if it loads a model."""
    out, err = io.StringIO(), io.StringIO()
    loads = patch("vcsd.loading.load", side_effect=AssertionError("a model was loaded"))
    argv = patch.object(sys, "argv", ["vcsd", *words])
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        loads,
        argv,
        pytest.raises(SystemExit) as stop,
    ):
        cli.main()
    return stop.value.code, err.getvalue()


def is_refused(*words):
    """Whether a command ends with one line and an exit code of a refusal."""
    code, err = run(*words)
    return code in REFUSED and len(err.splitlines()) == 1 and err.startswith("vcsd: ")


def wrong_values(option):
    """Values that no option of this type may accept; none for text and paths that mean anything."""
    kind, draw = option.type_descriptor, random.Random(option.name)
    if kind.is_choice:
        return draw.sample(WORDS, SAMPLED)
    if kind.annotation in (int, float):
        below, above = (option.min, -1), (option.max, 1)
        return [*draw.sample(WORDS, SAMPLED), *(repr(end + step) for end, step in (below, above) if end is not None)]
    is_list = kind.annotation is str and re.match("comma-separated.*(numbers|lengths|values)", option.help or "")
    return draw.sample(LISTS, SAMPLED) if is_list else ()


def rest(command, option):
    """The other words that a command needs: required options and arguments, with a value each."""
    words = []
    for parameter in command.params:
        if not parameter.required or parameter is option:
            continue
        choices = parameter.type_descriptor.choices or ["1"]
        value = str(getattr(choices[0], "value", choices[0]))
        words += [value] if isinstance(parameter, TyperArgument) else [parameter.opts[0], value]
    return words


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_value_of_each_option_is_refused_in_one_line(name):
    words, command = COMMANDS[name]
    options = [option for option in command.params if isinstance(option, TyperOption) and not option.is_flag]
    for option, value in chain.from_iterable(product([option], wrong_values(option)) for option in options):
        code, err = run(*words, *rest(command, option), f"{option.opts[0]}={value}")
        assert code in REFUSED and len(err.splitlines()) == 1, (option.opts[0], value[:20], code, err)
        assert any(alias in err for alias in option.opts), (option.opts[0], value[:20], err)


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_option_and_surplus_argument_are_refused(name):
    words, command = COMMANDS[name]
    assert is_refused(*words, *rest(command, None), "--no-such-option")
    variadic = any(parameter.nargs != 1 for parameter in command.params if isinstance(parameter, TyperArgument))
    assert variadic or is_refused(*words, *["surplus"] * (len(command.params) + 1))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_description_with_any_wrong_field_is_refused_or_valid(tmp_path, data):
    document = load_yaml((SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text())
    place = document
    while isinstance(place[key := data.draw(st.sampled_from(sorted(place)))], dict) and data.draw(st.booleans()):
        place = place[key]
    value = data.draw(FAULTY)
    assume(value != place[key])
    place[key] = value
    (file := tmp_path / "drive.yaml").write_text(dump_yaml(document))
    code, err = run("config", "validate", str(file))
    assert code == 0 or (code in REFUSED and len(err.splitlines()) == 1 and str(file) in err)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
)
def test_file_of_any_content_is_refused_in_one_line(tmp_path, content):
    (file := tmp_path / "drive.yaml").write_bytes(content)
    assert is_refused("config", "validate", str(file))
