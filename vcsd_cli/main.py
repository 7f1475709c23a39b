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

DRIVE = {
    "create": "vcsd_cli.serve:create",
    "list": "vcsd_cli.serve:list_drives",
    "serve": "vcsd_cli.serve:serve",
    "delete": "vcsd_cli.serve:delete",
    "show": "vcsd_cli.drive:show_drive",
    "log": "vcsd_cli.drive:log",
    "top": "vcsd_cli.drive:top",
    "fsck": "vcsd_cli.fsck:fsck",
    "format": "vcsd_cli.drive:format_drive",
    "copy": "vcsd_cli.drive:copy",
    "passthru": "vcsd_cli.drive:passthru",
    "record": "vcsd_cli.block_trace:record",
    "replay": "vcsd_cli.block_trace:replay",
}

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
        "serve-model": "vcsd_cli.serve_model:serve_model",
        "drive": LazyGroup("drive", "Create, serve, inspect and repair drives.", DRIVE),
        "config": "vcsd_cli.config:config",
        "model": "vcsd_cli.model:model",
        "fleet": "vcsd_cli.fleet:fleet",
        "guest": "vcsd_cli.guest:guest",
        "eval": LazyGroup("eval", "Evaluate attention methods, placement policies and the papers' claims.", EVAL),
        "whatif": "vcsd_eval.whatif.whatif:whatif",
        "bench": LazyGroup("bench", "Speed of the emulator, beside that of its rivals.", BENCH),
        "verify": "vcsd_eval.verify.verify:verify",
        "report": "vcsd_eval.papers.report:report",
        "doctor": "vcsd_cli.doctor:doctor",
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
        code = app(sys.argv[1:] or ["--help"], "vcsd", standalone_mode=False, help_option_names=["--help", "-h"])
    except typer.TyperException as error:
        says = error.format_message().replace("Value error, ", "")  # Typer's prefix of a wrong choice
        print(f"vcsd: {' '.join(says.split())}", file=sys.stderr)
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
