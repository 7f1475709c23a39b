"""The command line. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys

import typer

from csd_spec import DeviceError
from vcsd_cli import accuracy, bench, convert, drive, figures, guest, serve, trace
from vcsd_cli.run import run

app = typer.Typer(
    help="Virtual computational storage drives for in-storage attention.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(run)
app.add_typer(bench.bench, name="bench")
app.add_typer(accuracy.evaluate, name="eval")
app.add_typer(drive.log, name="log")
app.command()(figures.report)
app.add_typer(drive.config, name="config")
app.command("id-ctrl")(drive.id_ctrl)
app.command("id-ns")(drive.id_ns)
app.command("format")(drive.format_drive)
app.command("io-passthru")(drive.io_passthru)
app.command()(drive.top)
app.command()(drive.doctor)
app.command()(drive.snapshot)
app.command()(drive.restore)
app.add_typer(convert.convert, name="convert")
app.add_typer(guest.guest, name="guest")
app.add_typer(guest.nvmevirt, name="nvmevirt")
app.command()(serve.serve)
app.command()(serve.create)
app.command("list")(serve.list_drives)
app.command()(serve.delete)
app.add_typer(trace.trace, name="trace")


@app.callback()
def root() -> None:
    """Virtual computational storage drives for in-storage attention."""


def main() -> None:
    """Run a command; an error is one line on stderr and a non-zero exit."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        print(f"vcsd: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("vcsd: interrupted", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, DeviceError) as error:
        says = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"vcsd: {' '.join(says.split())}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code or 0)
