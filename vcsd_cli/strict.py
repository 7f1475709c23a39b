"""Commands that accept each option once."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption


class StrictCommand(TyperCommand):
    """Refuses an option that is given twice, unless it collects a list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        once = [each for each in order if isinstance(each, TyperOption) and not each.multiple]
        for each in once:
            if once.count(each) > 1:
                ctx.fail(f"{each.opts[0]} is given twice: give it once")
        return super().parse_args(ctx, args)
