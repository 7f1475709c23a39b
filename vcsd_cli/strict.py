"""Commands that accept each option once, by its current or its old name."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

from vcsd_cli.renamed import new_options


class StrictCommand(TyperCommand):
    """Refuses an option that is given twice, unless it collects a list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = new_options(args, {name for each in self.params for name in (*each.opts, *each.secondary_opts)})
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        once = [each for each in order if isinstance(each, TyperOption) and not each.multiple]
        for each in once:
            if once.count(each) > 1:
                ctx.fail(f"{each.opts[0]} is given twice: give it once")
        return super().parse_args(ctx, args)
