"""The command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import vcsd
from vcsd_cli.experiments import BENCH, EVAL
from vcsd_cli.lazy import LazyGroup

INTERRUPTED = 130  # typer makes an interrupt an exit with this code

root = typer.Typer(add_completion=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"vcsd {vcsd.__version__}")
        raise typer.Exit


@root.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Options of all commands."""


app = LazyGroup(
    "vcsd",
    "Emulate computational storage drives that run LLM attention next to the flash.",
    {
        "run": "vcsd_cli.run:run",
        "report": "eval.papers.report:report",
        "id-ctrl": "vcsd_cli.drive:id_ctrl",
        "id-ns": "vcsd_cli.drive:id_ns",
        "fsck": "vcsd_cli.fsck:fsck",
        "format": "vcsd_cli.drive:format_drive",
        "io-passthru": "vcsd_cli.drive:io_passthru",
        "top": "vcsd_cli.drive:top",
        "doctor": "vcsd_cli.drive:doctor",
        "snapshot": "vcsd_cli.drive:snapshot",
        "restore": "vcsd_cli.drive:restore",
        "serve": "vcsd_cli.serve:serve",
        "create": "vcsd_cli.serve:create",
        "list": "vcsd_cli.serve:list_drives",
        "delete": "vcsd_cli.serve:delete",
        "bench": LazyGroup("bench", "Benchmark and stress-test the emulator.", BENCH),
        "eval": LazyGroup("eval", "Evaluate attention methods, placement policies and the papers' claims.", EVAL),
        "log": "vcsd_cli.drive:log",
        "config": "vcsd_cli.drive:config",
        "convert": "vcsd_cli.convert:convert",
        "guest": "vcsd_cli.guest:guest",
        "nvmevirt": "vcsd_cli.guest:nvmevirt",
        "trace": "vcsd_cli.trace:trace",
    },
    typer.main.get_group(root).params,
)


def main() -> None:
    """Run a command; an error is one line on stderr and a non-zero exit."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        print(f"vcsd: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:
        from csd_spec import DeviceError  # numpy and pydantic come with it, which help does not need

        if not isinstance(error, ValueError | OSError | DeviceError):
            raise
        says = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"vcsd: {' '.join(says.split())}", file=sys.stderr)
        sys.exit(1)
    if code == INTERRUPTED:
        print("vcsd: interrupted", file=sys.stderr)
    sys.exit(code or 0)
