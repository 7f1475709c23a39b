"""Entry point of the command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

import vcsd
from vcsd_cli.experiments import BENCH, EVAL
from vcsd_cli.lazy import LazyGroup

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of PyTorch that spin take the cores of all others

INTERRUPTED = 130  # exit code of typer after an interrupt
COMPLETE = "_VCSD_COMPLETE"  # environment variable of shell completion
PIPE_CLOSED = 141  # exit code of a shell for a program that SIGPIPE ended
STANDARD = 1, 2  # file descriptors of output and error
GRACE_S = 1.2  # time from Ctrl-C until the process is ended

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
    """Options common to all commands."""


app = LazyGroup(
    "vcsd",
    "Emulate computational storage drives that run LLM attention next to the flash.",
    {
        "run": "vcsd_cli.run:run",
        "report": "vcsd_eval.papers.report:report",
        "whatif": "vcsd_eval.whatif.whatif:whatif",
        "id-ctrl": "vcsd_cli.drive:id_ctrl",
        "id-ns": "vcsd_cli.drive:id_ns",
        "fsck": "vcsd_cli.fsck:fsck",
        "format": "vcsd_cli.drive:format_drive",
        "io-passthru": "vcsd_cli.drive:io_passthru",
        "top": "vcsd_cli.drive:top",
        "prefixes": "vcsd_cli.drive:prefixes",
        "doctor": "vcsd_cli.drive:doctor",
        "snapshot": "vcsd_cli.drive:snapshot",
        "restore": "vcsd_cli.drive:restore",
        "serve": "vcsd_cli.serve:serve",
        "serve-model": "vcsd_cli.serve_model:serve_model",
        "fleet": "vcsd_cli.fleet:fleet",
        "create": "vcsd_cli.serve:create",
        "list": "vcsd_cli.serve:list_drives",
        "delete": "vcsd_cli.serve:delete",
        "bench": LazyGroup("bench", "Benchmark and stress-test the emulator.", BENCH),
        "eval": LazyGroup("eval", "Evaluate attention methods, placement policies and the papers' claims.", EVAL),
        "log": "vcsd_cli.drive:log",
        "config": "vcsd_cli.drive:config",
        "model": "vcsd_cli.model:model",
        "convert": "vcsd_cli.convert:convert",
        "guest": "vcsd_cli.guest:guest",
        "nvmevirt": "vcsd_cli.guest:nvmevirt",
        "trace": "vcsd_cli.trace:trace",
    },
    [*typer.main.get_group(root).params, *typer.main.get_install_completion_arguments()],
)


def _interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt; end the process if that is lost in a compiled call or takes too long."""
    global _interrupted
    if not _interrupted:
        last = threading.Timer(GRACE_S, _leave)
        last.daemon = True
        last.start()
    _interrupted = True
    raise KeyboardInterrupt


_interrupted = False


def _leave() -> None:
    print("vcsd: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def main() -> None:
    """Run a command; an error is one line on stderr and a non-zero exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        _run()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        _run()
    finally:
        signal.signal(signal.SIGINT, before)


def _run() -> NoReturn:
    try:
        try:
            code = _command()
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        pipe = error if isinstance(error, BrokenPipeError) else error.__context__  # Rich exits where it has caught one
        if not isinstance(pipe, BrokenPipeError):
            raise
        for descriptor in filter(_reader_is_gone, STANDARD):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)  # what is buffered is flushed at exit
        code = PIPE_CLOSED
    sys.exit(code)


def _reader_is_gone(descriptor: int) -> bool:
    """Whether nothing reads standard output or error any more, as in `vcsd ... | head`."""
    with suppress(OSError):
        poll = select.poll()
        poll.register(descriptor, 0)
        return bool(poll.poll(0))
    return False


def _command() -> int:
    """Run a command; returns its exit code."""
    if COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False, help_option_names=["--help", "-h"])
    except typer.TyperException as error:
        print(f"vcsd: {' '.join(error.format_message().split())}", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - one line for the user
        if _interrupted:  # raised by a compiled call or a library instead of KeyboardInterrupt
            return _print_interrupted()
        return _print_error(error)
    return _print_interrupted() if code == INTERRUPTED else code or 0


def _print_error(error: Exception) -> int:
    """Print an error as one line and return its exit code; raises it again if it is a fault of this program."""
    from csd_spec import DriveError  # imports numpy and pydantic, which help does not need
    from vcsd.options import OptionError

    is_pipe = isinstance(error, BrokenPipeError) and any(map(_reader_is_gone, STANDARD))
    if is_pipe or not isinstance(error, ValueError | OSError | DriveError):
        raise error
    says = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"vcsd: {' '.join(says.split())}", file=sys.stderr)
    return 2 if isinstance(error, OptionError) else 1


def _print_interrupted() -> int:
    print("vcsd: interrupted", file=sys.stderr)
    return INTERRUPTED
