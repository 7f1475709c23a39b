"""Commands that accept each option once, expand `~` and `$NAME` in paths, and name the option of a wrong value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperOption

_ASSIGNED = re.compile(r"\b([a-z]\w*) = ((?:True|False)\b)?")


class StrictCommand(TyperCommand):
    """Refuses an option that is given twice, unless it collects a list.

    Functions name their own arguments in errors, as `name = value: reason`, or a file; here that becomes
    `--option value: reason`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from csd_io.paths import expand  # help needs neither numpy nor pydantic, as below

        args, paths = self._expanded(args)
        ctx.meta[__name__] = paths
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        once = [option for option in order if isinstance(option, TyperOption) and not option.multiple]
        for option in once:
            if once.count(option) > 1:
                ctx.fail(f"{option.opts[0]} is given twice: give it once")
        with self._naming_options(paths):
            rest = super().parse_args(ctx, args)
        ctx.params.update({name: expand(value) for name, value in ctx.params.items() if isinstance(value, Path)})
        return rest

    def invoke(self, ctx: Any) -> Any:
        with self._naming_options(ctx.meta[__name__]):
            return super().invoke(ctx)

    def _expanded(self, args: list[str]) -> tuple[list[str], dict[str, str]]:
        """Arguments with their paths expanded, as no shell does in `--option=~/path`; and the options of paths."""
        from csd_io.paths import expand

        names = {name for param in self.params if _is_path(param) for name in param.opts}
        expanded, paths, option = list[str](), dict[str, str](), ""
        for at, arg in enumerate(args):
            if arg == "--":
                return [*expanded, *args[at:]], paths
            name, equals, value = arg.partition("=")
            if equals and name in names and value:
                with self._naming_options({value: name}):
                    value = str(expand(Path(value)))
                arg, paths[value] = f"{name}={value}", name
            elif option and arg:
                with self._naming_options({arg: option}):
                    arg = str(expand(Path(arg)))
                paths[arg] = option
            option = arg if arg in names and not option else ""
            expanded.append(arg)
        return expanded, paths

    @contextmanager
    def _naming_options(self, paths: dict[str, str]) -> Iterator[None]:
        """Let errors name options. `paths`: options by their paths."""
        try:
            yield
        except (ValueError, OSError) as error:
            from vcsd.options import OptionError

            file = error.filename if isinstance(error, OSError) else str(error).partition(": ")[0]
            if option := paths.get(str(file)):
                reason = error.strerror if isinstance(error, OSError) else str(error).partition(": ")[2]
                raise OptionError(f"{option} {file}: {reason}") from error
            if (text := self.with_options(str(error))) != str(error):
                raise OptionError(text) from error
            raise

    def with_options(self, message: str) -> str:
        """A message whose `name = ` are options of this command, if it begins with one."""
        options = {
            alias: param
            for param in self.params
            if isinstance(param, TyperOption)
            for alias in (param.name, param.opts[0].strip("-").replace("-", "_"))
        }

        def typed(match: re.Match[str]) -> str:
            option, truth = options.get(match[1]), match[2] or ""
            if not option:
                return f"{match[1]} {truth}"
            if not truth or not option.is_flag:
                return f"{option.opts[0]} {truth}"
            return option.secondary_opts[0] if truth == "False" and option.secondary_opts else option.opts[0]

        lead, colon, reason = message.partition(": ")
        first = _ASSIGNED.match(lead)
        return _ASSIGNED.sub(typed, lead) + colon + reason if first and first[1] in options else message


def _is_path(parameter: Any) -> bool:
    return parameter.type_descriptor.annotation is Path
