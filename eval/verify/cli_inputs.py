"""Mutated invocations of any command, and mutated files for it to read.

Valid and invalid values follow from a command's options and arguments. Every number is as small as allowed, so that a
valid invocation is short. An input is marked if every command must refuse its mutation; if the mutation may be
harmless, only the way in which the process ends is checked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from typer.core import TyperOption

from nvmevirt_config.document import dump_yaml, load_yaml
from vcsd_eval.verify.cli_files import DOCUMENTS, NAMES, READ, SHORT

WRONG_NUMBERS = (
    "",
    "x",
    "nan",
    "-inf",
    "1e400",
    "9" * 400,
    "-" + "9" * 30,
    "0x",
    "1,2",
    "\u0663\u0663\u0663\u0663" * 9,
)
NONSENSE = ("", " ", "nonsense", "json\0", "\U0001d11e\u202e", "5", "-1")
ODD_WORDS = (
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\U0001d11e\u202e",
        "\udcff",
        "x" * 5000,
        "a/" * 3000,
        "..",
        "../..",
        "/",
        ".",
        "-",
        "~",
        "5",
    ),
    *(
        "/dev/null",
        "/dev/full",
        "/proc/self/mem",
        "nowhere/at/all",
        "kept",
        "binary",
        "text.txt",
        "drive.yaml",
        "no.yaml",
    ),
    *(
        "1,2,x",
        "nan",
        "1,nan",
        ",",
        "1," * 2000,
        "9" * 400,
        "window:",
        "window:/dev/full",
        "fuse:x",
        "%s%n",
        "{0}",
        "[red]",
    ),
)
NEVER: dict[type, tuple[Any, ...]] = {
    int: (-1, -(10**30), 10**400, float("nan"), "text", [], {}, True, None),
    float: (-1, 10**400, float("nan"), "text", [], {}, True, None),
    bool: ("no", 1, None, [], {}),
    str: (5, [], {}, True, None),
    list: ("alice", 5, None, {"a": 1}),
}
MAY_BE_LEFT_OUT = ("drive", "path")  # text fields that also accept null


@dataclass(frozen=True, slots=True)
class Input:
    """Words of the command line, and files that differ from the valid ones.

    refused: the exit code must not be 0.
    """

    words: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """An option or an argument on the command line. name: None for an argument. text: None for a flag."""

    param: Any
    name: str | None
    text: str | None

    @property
    def words(self) -> list[str]:
        return [word for word in (self.name, self.text) if word is not None]


def make_input(commands: list[tuple[tuple[str, ...], Any]], seed: int, number: int) -> Input:
    """Input number `number`; the same in every run with this seed."""
    draw = random.Random(f"{seed} {number}")
    path, command = draw.choice(commands)
    parts = _valid(path, command, draw)
    texts = [part.text for part in parts if part.text]
    read = [READ.get(text, text) for text in texts if READ.get(text, text) in DOCUMENTS]
    if read and draw.random() < 0.5:
        name = draw.choice(read)
        content, refused = _document(name, draw)
        return Input((*path, *(word for part in parts for word in part.words)), {name: content}, refused)
    refused, count = False, draw.choice((0, 1, 1, 1, 1, 2, 3))
    for _ in range(count):
        parts, sure = draw.choice(MUTATIONS)(parts, command, draw)
        refused = sure and count == 1  # with several mutations, one may undo another
    if any(part.name is None and (part.text or "").startswith("-") for part in parts):
        refused = False  # a word that starts or ends options changes the meaning of the others
    return Input((*path, *(word for part in parts for word in part.words)), {}, refused)


def _valid(path: tuple[str, ...], command: Any, draw: random.Random) -> list[Part]:
    """Required parts of the command, with the smallest valid numbers, and some of the optional ones."""
    parts = []
    for param in command.params:
        option = isinstance(param, TyperOption)
        asked = param.required or (path[-1], param.name) in SHORT or (_number(param) and param.default is not None)
        if param.name in ("help", "version") or not (asked or draw.random() < (0.3 if option else 1)):
            continue
        text = None if option and param.is_flag else _text(path, param, draw)
        parts.append(Part(param, draw.choice(param.opts) if option else None, text))
    return parts


def _number(param: Any) -> bool:
    kind = param.type_descriptor
    return kind.annotation in (int, float) and not kind.parameter_info.parser


def _text(path: tuple[str, ...], param: Any, draw: random.Random) -> str:
    """A valid value."""
    if (path[-1], param.name) in SHORT:
        return SHORT[path[-1], param.name]
    if param.type_descriptor.choices:
        return str(draw.choice([getattr(each, "value", each) for each in param.type_descriptor.choices]))
    if _number(param):
        return str(param.min)
    return NAMES.get((path[-1], param.name)) or NAMES.get(("", param.name)) or str(param.default or "drive.yaml")


Mutation = Callable[[list[Part], Any, random.Random], tuple[list[Part], bool]]


def _swapped(parts: list[Part], chosen: Callable[[Part], bool], texts: Any, draw: random.Random) -> list[Part] | None:
    """The parts with another text for one that is chosen; None if there is no such part."""
    places = [at for at, part in enumerate(parts) if part.param and part.text is not None and chosen(part)]
    if not places:
        return None
    at = draw.choice(places)
    return [*parts[:at], replace(parts[at], text=draw.choice(texts(parts[at]))), *parts[at + 1 :]]


def _wrong_number(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    def texts(part: Part) -> tuple[str, ...]:
        beyond = [str(low - 1) for low in [part.param.min] if low is not None]
        beyond += [str(high + 1) for high in [part.param.max] if high is not None]
        return (*WRONG_NUMBERS, *beyond)

    found = _swapped(parts, lambda part: _number(part.param), texts, draw)
    return (found, True) if found else _unknown_option(parts, command, draw)


def _wrong_choice(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    found = _swapped(parts, lambda part: bool(part.param.type_descriptor.choices), lambda _: NONSENSE, draw)
    return (found, True) if found else _odd_word(parts, command, draw)


def _odd_word(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    found = _swapped(parts, lambda part: part.param.type_descriptor.annotation is not bool, lambda _: ODD_WORDS, draw)
    return (found, False) if found else _unknown_option(parts, command, draw)


def _unknown_option(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    name = draw.choice(("--colour", "--no-such-thing=5", "-Z", "--\U0001d11e"))
    return [*parts, Part(None, name, None)], True


def _missing(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    """The parts without a required one."""
    needed = [at for at, part in enumerate(parts) if part.param and part.param.required]
    if not needed:
        return _unknown_option(parts, command, draw)
    at = draw.choice(needed)
    return parts[:at] + parts[at + 1 :], True


def _twice(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    options = [part for part in parts if part.param is not None and part.name is not None]
    if not options:
        return _unknown_option(parts, command, draw)
    chosen = draw.choice(options)
    return [*parts, chosen], not chosen.param.multiple


def _extra(parts: list[Part], command: Any, draw: random.Random) -> tuple[list[Part], bool]:
    takes_more = any(not isinstance(param, TyperOption) and param.nargs == -1 for param in command.params)
    needed = [param for param in command.params if not isinstance(param, TyperOption)]
    there = [part for part in parts if part.param in needed]
    return [*parts, Part(None, None, draw.choice(ODD_WORDS[4:]))], not takes_more and len(there) == len(needed)


MUTATIONS: tuple[Mutation, ...] = (_wrong_number, _wrong_choice, _odd_word, _odd_word, _unknown_option, _missing)
MUTATIONS += (_twice, _extra)


def _document(name: str, draw: random.Random) -> tuple[bytes, bool]:
    """A document with one change, and whether it must be refused."""
    text, strict = DOCUMENTS[name]
    if draw.random() < 0.4 or not name.endswith((".yaml", ".json")):
        return _damaged(text.encode(), draw), False
    values = load_yaml(text)  # JSON is YAML too
    refused = _change(values, draw)
    written = json.dumps(values) if name.endswith(".json") else dump_yaml(values)
    return written.encode(), refused and strict


def _change(values: Any, draw: random.Random) -> bool:
    """Change one item in a tree of values; returns whether the result is invalid in any case."""
    places = list(_places(values))
    inside, key = draw.choice(places)
    there = inside[key]
    match draw.randrange(5):
        case 0 if isinstance(inside, dict):
            inside[draw.choice(("colour", "", "Name", "\U0001d11e", "x" * 5000))] = 1
            return True
        case 1:
            del inside[key]
            return False
        case 2:
            deep: Any = there
            for _ in range(draw.choice((50, 200))):
                deep = [deep]
            inside[key] = deep
            return key not in MAY_BE_LEFT_OUT
    wrong = NEVER.get(type(there))
    if wrong is None:
        inside[key] = draw.choice((5, "text", [], {}))
        return False
    inside[key] = draw.choice(wrong)
    return key not in MAY_BE_LEFT_OUT


def _places(values: Any) -> Any:
    """Every position in a tree of values: its container, and the key or index there."""
    for key in list(values) if isinstance(values, dict) else range(len(values)):
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])


def _damaged(text: bytes, draw: random.Random) -> bytes:
    """A text with flipped bits, truncated, or with unusual bytes inserted."""
    data, at = bytearray(text), draw.randrange(len(text))
    match draw.randrange(6):
        case 0 | 1:
            for _ in range(draw.choice((1, 1, 8))):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 2:
            del data[at:]
        case 3:
            data[at:at] = draw.choice((b"\0", b"\xff\xfe", b"9" * 400, b"[" * 20_000, b'{"a":' * 20_000, b"- " * 5000))
        case 4:
            data[at:at] = draw.choice(
                (b"&a [*a, *a]", b"<<: {a: 1}", b"!!python/object:os.system ", b"\t", b"? ", b"%")
            )
        case _:
            data = data * 2
    return bytes(data)
