"""Commands that are imported on use, so that help and quick commands need neither compiler nor torch."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from vcsd.progress import note
from vcsd_cli.shared import Output, OutputOption, importing, print_json, stdout
from vcsd_cli.strict import StrictCommand
from vcsd_eval.experiment import Outcome

_NEXT_STATEMENT = re.compile(r"\n(?=[^\s)])")

EXPERIMENT = "experiment"  # name of the function of an experiment's module


class LazyGroup(TyperGroup):
    """A group whose commands are given by location: `module:attribute`, or `module` for an experiment.

    An attribute is a function or a `typer.Typer`.
    """

    def __init__(self, name: str, text: str, places: Mapping[str, str | TyperGroup], options: Any = ()) -> None:
        commands: dict[str, Any] = {name: TyperCommand(name) for name in places}
        super().__init__(name=name, help=text, commands=commands, params=list(options))
        self.places = places

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder with name and help text for a command that is not imported yet."""
        place = self.places.get(cmd_name)
        return TyperCommand(cmd_name, help=_help(*_parse(place))) if isinstance(place, str) else place

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, self.load(name or ""), rest

    def load(self, name: str) -> Any:
        """Import a command of this group."""
        place = self.places[name]
        return _load(name, place) if isinstance(place, str) else place

    def leaf_commands(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Import every command below this group; yields its words and the command."""
        for name in self.places:
            command = self.load(name)
            if isinstance(command, LazyGroup):
                yield from (((name, *words), leaf) for words, leaf in command.leaf_commands())
            elif isinstance(command, TyperGroup):
                yield from (((name, word), leaf) for word, leaf in command.commands.items())
            else:
                yield (name,), command


def _parse(place: str) -> tuple[str, str]:
    module, _, attribute = place.partition(":")
    return module, attribute or EXPERIMENT


def _load(name: str | None, place: str) -> Any:
    """Import the command at a location."""
    module, attribute = _parse(place)
    with importing():
        target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        for command in target.registered_commands:
            command.cls = StrictCommand
        return typer.main.get_group(target)
    app = typer.Typer(add_completion=False)
    app.command(name, cls=StrictCommand)(make_command(target))
    return typer.main.get_command(app)


def _help(module: str, attribute: str) -> str | None:
    """Docstring of a function or help text of a Typer, read from the source: only its own statement is parsed."""
    spec = find_spec(module)
    assert spec and spec.origin, module
    source = Path(spec.origin).read_text(encoding="utf-8")
    begin = max(source.find(f"\n{start}") for start in (f"def {attribute}(", f"{attribute} = ")) + 1
    end = _NEXT_STATEMENT.search(source, begin)
    node = ast.parse(source[begin : end.start() if end else None]).body[0]
    if isinstance(node, ast.FunctionDef):
        return ast.get_docstring(node)
    if isinstance(node, ast.Assign):
        texts = [key.value for key in getattr(node.value, "keywords", []) if key.arg == "help"]
        return ast.literal_eval(texts[0]) if texts else None
    return None


def make_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Convert a function for typer: an argument that is a dataclass becomes an option for each of its fields.

    If it returns an `Outcome`, that is printed in the format of -o; the exit code is 1 if it failed.
    """
    hints = get_type_hints(function, include_extras=True)
    arguments = signature(function).parameters.values()
    kinds = {argument.name: hints[argument.name] for argument in arguments if is_dataclass(hints[argument.name])}
    groups = {name: list(_options_of(kind, in_panels=len(kinds) > 1)) for name, kind in kinds.items()}
    shows = hints.get("return") is Outcome
    options: list[Parameter] = []
    for argument in arguments:
        alone = [_option(argument.name, argument.default, hints[argument.name])]
        options += groups.get(argument.name, alone)
    if shows:
        options.append(_option("output", Output.NORMAL, OutputOption))

    def command(**options: Any) -> None:
        output = options.pop("output") if shows else Output.NORMAL
        for name, kind in kinds.items():
            options[name] = kind(**{option.name: options.pop(option.name) for option in groups[name]})
        done = function(**options)
        if shows:
            _show(done, output)

    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _option(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _options_of(kind: Any, in_panels: bool) -> Iterator[Parameter]:
    """Options of a dataclass: its fields with a `typer.Option`, or with help in a `pydantic.Field`."""
    hints, plain = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    for field in fields(kind):
        if option := _declared(hints[field.name]):
            option.rich_help_panel = option.rich_help_panel or (_panel(kind, field.name) if in_panels else None)
            default = Parameter.empty if field.default is MISSING else field.default
            yield _option(field.name, default, Annotated[plain[field.name], option])


def _declared(annotation: Any) -> Any:
    """The `typer.Option` of a field; None if it is no option."""
    for declared in getattr(annotation, "__metadata__", ()):
        if isinstance(declared, typer.models.OptionInfo):
            return copy(declared)
        if getattr(declared, "description", None):
            limits = {type(limit).__name__: limit for limit in _limits(annotation)}
            low, high = limits.get("Ge"), limits.get("Le")
            return typer.Option(min=low and low.ge, max=high and high.le, help=declared.description)
    return None


def _limits(annotation: Any) -> Iterator[Any]:
    """Bounds in the metadata of a type, or of one in a union."""
    for declared in getattr(annotation, "__metadata__", ()):
        yield from getattr(declared, "metadata", ())
    for part in get_args(annotation):  # a bound of `Whole | None` stands inside the union
        yield from _limits(part)


def first_given(options: Any) -> str:
    """Name of the first option of a dataclass whose value is not the default; empty if there is none."""
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value, declared = getattr(options, field.name), _declared(hints[field.name])
        if declared and value != field.default:
            names = (declared.default, *(declared.param_decls or ()), f"--{field.name.replace('_', '-')}")
            name = next(name for name in names if str(name).startswith("--"))  # Typer has the first as a default
            return f"--no-{name[2:]}" if value is False else name
    return ""


def _panel(kind: Any, name: str) -> str:
    """Title of a field's panel: the first sentence of the docstring of the class that declares it first."""
    declaring = next(base for base in reversed(kind.__mro__) if name in vars(base).get("__annotations__", ()))
    return (declaring.__doc__ or "").split("\n")[0].partition(".")[0].partition(";")[0]


def _show(outcome: Outcome, output: Output) -> None:
    if output is Output.JSON:
        print_json(outcome.result)
    else:
        for part in outcome.shown:
            stdout().print(part)
        for line in outcome.notes:
            note(line)
    if outcome.failed:
        raise typer.Exit(1)
