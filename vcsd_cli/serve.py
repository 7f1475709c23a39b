"""`vcsd serve`, `create`, `list`, `delete`: drives with a process of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.nvmeof.tls import Credentials
from csd_link.run_dir import doorbell_path, drive_dir, private_dir, run_dir, window_path
from csd_link.served_drive import ADMIN, DEFAULT, ServedDrive, ServedDrives
from csd_spec.checked import adapter
from nvmevirt_config import load_config
from nvmevirt_config.serve_config import Entry, ServeFile, load_hosts
from vcsd.options import Hosting, LayoutsFile, MethodsFile
from vcsd_cli.shared import Output, OutputOption, err, print_json, stdout


def home() -> Path:
    """Folder of the drives that `vcsd create` made: $VCSD_HOME, or ~/.local/share/vcsd."""
    return Path(os.environ.get("VCSD_HOME") or Path.home() / ".local/share/vcsd")


def created() -> dict[str, Path]:
    """Description files of created drives, by name."""
    return {file.parent.name: file for file in sorted(home().glob("[!.]*/served.yaml"))}


def find_created(name: str) -> Path:
    """A created drive's description file; raises ValueError where there is none."""
    drives = created()
    if name not in drives:
        raise ValueError(
            f"no drive {name!r}: {'there are ' + ', '.join(drives) if drives else 'vcsd create makes one'}"
        )
    return drives[name]


WHAT_HELP = "config file, or names of created drives (default: all of them)"
RESTART_HELP = "restart a drive that was killed (default: yes, or as the file says)"
READY_HELP = "file descriptor to which READY=1 is written when all drives answer"
LISTEN_HELP = "address for NVMe/TCP hosts, HOST:PORT; each drive takes the next port"
REMOTE_HELP = "let --listen take an address that other machines reach; needs --hosts (names, not proofs) or --tls-ca"
HOSTS_HELP = "YAML file of the NVMe/TCP hosts that may connect, and their tenants (docs/nvme.md); others are refused"
TLS_HELP = "certificate of the drives, PEM: NVMe/TCP connections have TLS 1.3 (docs/nvme.md); needs --tls-key"
KEY_HELP = "private key of --tls-cert, PEM, not encrypted"
CA_HELP = "certificates that those of hosts must be signed by, PEM; without it hosts need none"
METRICS_HELP = "address at which Prometheus finds /metrics of the drives (docs/operations.md)"
WINDOW_HELP = "file or device in which the windows lie, one after the other"


class LogFormat(StrEnum):
    """How events are written."""

    TEXT = "text"
    JSON = "json"


def serve(
    hosting: Hosting,
    what: Annotated[list[str] | None, typer.Argument(help=WHAT_HELP)] = None,
    restart: Annotated[bool | None, typer.Option("--restart/--no-restart", help=RESTART_HELP)] = None,
    window: Annotated[Path | None, typer.Option(help=WINDOW_HELP)] = None,
    mount: Annotated[Path | None, typer.Option(help="folder in which each drive is mounted under its name")] = None,
    listen: Annotated[str | None, typer.Option(help=LISTEN_HELP, metavar="HOST:PORT")] = None,
    listen_remote: Annotated[bool, typer.Option("--listen-remote", help=REMOTE_HELP)] = False,
    hosts: Annotated[Path | None, typer.Option(help=HOSTS_HELP)] = None,
    tls_cert: Annotated[Path | None, typer.Option(help=TLS_HELP)] = None,
    tls_key: Annotated[Path | None, typer.Option(help=KEY_HELP)] = None,
    tls_ca: Annotated[Path | None, typer.Option(help=CA_HELP)] = None,
    methods: MethodsFile = None,
    layouts: LayoutsFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print errors only")] = False,
    metrics: Annotated[str | None, typer.Option(help=METRICS_HELP, metavar="HOST:PORT")] = None,
    log_format: Annotated[LogFormat, typer.Option(help="of events on stderr")] = LogFormat.TEXT,
    ready_fd: Annotated[int | None, typer.Option(min=1, max=1 << 16, help=READY_HELP)] = None,
) -> None:
    """Serve drives, each in a process of its own, until interrupted.

    A drive is printed when it answers. Under systemd, the service is ready when all drives answer (Type=notify).
    """
    from attention_engine import load_methods
    from csd_firmware.process.events import emit, set_format
    from csd_firmware.process.supervisor import Supervisor, print_to_stderr
    from csd_link.connect import find_server

    load_methods(methods)  # what is wrong with it is said here, not by every drive
    asked = {"restarts": restart, "methods": methods and methods.absolute(), "layouts": layouts and layouts.absolute()}
    drives = _placed(_config(what or []), asked, hosting, window, mount)
    tls = _credentials(tls_cert, tls_key, tls_ca)
    for given, option in ((hosts, "--hosts"), (tls, "--tls-cert")):
        if given and not listen:
            raise ValueError(f"{option} has no effect without --listen: add --listen HOST:PORT")
    if listen:
        allowed = load_hosts(hosts) if hosts else None
        at = Listen.parse(listen, tuple(drive.name for drive in drives), listen_remote, allowed, tls)
        drives = tuple(replace(drive, listen=at) for drive in drives)
    for drive in drives:
        if find_server(drive.name):
            raise ValueError(f"drive {drive.name} is served already")
    _check_open(ready_fd)

    def started(drive: ServedDrive | None) -> None:
        if drive is None:
            _notify(ready_fd)
        elif not quiet:
            where = drive.device or window_path(drive.name, drive.tenants[0])
            mounted = f", mounted at {drive.mount}" if drive.mount else ""
            said = f"drive {drive.name}: window {where}{mounted}{_heard_at(drive)}"
            emit("drive_started", said, drive=drive.name)

    set_format(log_format.value)
    with _metrics(metrics, [drive.name for drive in drives]):
        code = Supervisor(ServedDrives(drives), print_to_stderr, started=started).run()
    if not quiet and not code:
        emit("stopped", "all drives are flushed and stopped")
    sys.exit(code)


def _check_open(ready_fd: int | None) -> None:
    """Raise ValueError for a descriptor that is not open."""
    if ready_fd is not None:
        try:
            os.fstat(ready_fd)
        except OSError as error:
            raise ValueError(f"--ready-fd {ready_fd}: {error.strerror}: open it in the calling process") from error


@contextmanager
def _metrics(address: str | None, names: list[str]) -> Iterator[None]:
    """Serve the drives' metrics from a process of their own for the time of a block: the supervisor has no threads.

    Raises ValueError or OSError for an address that cannot be used.
    """
    if address is None:
        yield
        return
    from vcsd.drive_metrics import parse_address

    parse_address(address)
    command = [sys.executable, "-m", "vcsd.drive_metrics", address, str(os.getpid()), *names]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        said = process.stdout.readline().strip()
        if said != "ready":
            raise OSError(said or "metrics: their process has ended")
        yield
    finally:
        process.kill()
        process.communicate()


def _credentials(cert: Path | None, key: Path | None, ca: Path | None) -> Credentials | None:
    """Files of TLS, which are there and fit together; raises ValueError, TlsError."""
    if not cert and not key and not ca:
        return None
    if not cert or not key:
        raise ValueError("TLS needs a certificate and its key: add --tls-cert FILE --tls-key FILE")
    found = Credentials(str(cert.absolute()), str(key.absolute()), str(ca.absolute()) if ca else "")
    found.server()
    return found


def _heard_at(drive: ServedDrive) -> str:
    """Where NVMe/TCP hosts find a drive, as words."""
    if not drive.listen:
        return ""
    return f", NVMe/TCP {drive.listen.host}:{drive.listen.port_of(drive.name)} {nqn_of(drive.name)}"


def _notify(ready_fd: int | None) -> None:
    """Write a line to a descriptor and a datagram to systemd's socket, where these are given: all drives answer."""
    with suppress(OSError):
        if ready_fd is not None:
            os.write(ready_fd, b"READY=1\n")
            os.close(ready_fd)
        if address := os.environ.get("NOTIFY_SOCKET"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.connect(f"\0{address[1:]}" if address.startswith("@") else address)
                line.send(b"READY=1")


def _config(what: list[str]) -> ServedDrives:
    files = [word for word in what if word.endswith((".yaml", ".yml"))]
    if files and len(what) > 1:
        raise ValueError("serve takes one config file, or names of drives")
    if files:
        return load_config(Path(files[0]))
    names = what or list(created())
    if not names:
        raise ValueError("there is no drive: vcsd create NAME makes one, or name a config file")
    return ServedDrives(tuple(drive for name in names for drive in load_config(find_created(name)).drives))


def _placed(
    config: ServedDrives, asked: dict[str, Any], hosting: Hosting, window: Path | None, mount: Path | None
) -> tuple[ServedDrive, ...]:
    """The drives with what the options ask for; asked: fields of a drive, None where the file decides."""
    from csd_link.medium import make_window_file
    from csd_link.window import BLOCK_BYTES

    placed, at, count = [], 0, len(config.drives)
    for drive in config.drives:
        drive = replace(drive, **{name: value for name, value in asked.items() if value is not None})
        drive = replace(drive, **hosting.over(drive, count))
        drive = replace(drive, **drive.hosting_fields(count))
        if window:
            drive = replace(drive, device=window, offset_bytes=at)
            at += len(drive.tenants) * drive.layout.blocks * BLOCK_BYTES
        if mount:
            drive = replace(drive, mount=mount / drive.name)
        placed.append(drive)
    if window:
        make_window_file(window, at)
    return tuple(placed)


def running() -> list[str]:
    """Names of the drives that are served at present."""
    from csd_link.connect import find_server

    names = (path.parent.name for path in run_dir().glob(f"*/{window_path('x', ADMIN).name}"))
    return sorted(name for name in names if find_server(name))


def create(
    hosting: Hosting,
    name: Annotated[str, typer.Argument(help="name of the drive")],
    drive: Annotated[str | None, typer.Option(help="preset, or YAML description (default: the paper's drive)")] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="who may use it, once for each (default: default)")] = None,
    namespace_mib: Annotated[
        int | None, typer.Option(min=1, max=1 << 24, help="size of its block namespace (default: a quarter, or 4096)")
    ] = None,
) -> None:
    """Make a drive whose flash lies in files; `vcsd serve` begins to serve it."""
    from csd_firmware.folder import describe
    from vcsd.administer import size_namespace

    folder = home() / name
    is_file = drive is not None and drive.endswith((".yaml", ".yml"))
    entry = Entry(
        name=name,
        path=Path("."),
        drive=str(Path(drive).absolute()) if drive and is_file else drive,
        tenants=tuple(tenant or (DEFAULT,)),
        **{field: value for field, value in asdict(hosting).items() if value is not None},
    )
    made = entry.served(folder, restarts=True)
    if folder.exists():
        raise ValueError(f"drive {name} exists: vcsd delete {name} first, or take another name")
    private_dir(home())
    aside = private_dir(home() / f".{os.getpid()}")
    try:
        describe(made.spec, aside)
        if namespace_mib:
            size_namespace(aside, namespace_mib << 20)
        listed = adapter(ServeFile).dump_python(ServeFile(drives=(entry,)), mode="json", exclude_defaults=True)
        (aside / "served.yaml").write_text(yaml.safe_dump(listed))
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    err.print(f"{folder}: made; vcsd serve {name} serves it")


def list_drives(output: OutputOption = Output.NORMAL) -> None:
    """Drives that were created, and those that are served."""
    made = {name: str(file.parent) for name, file in created().items()}
    windows = {name: _window(drive_dir(name)) for name in running()}
    rows = [
        {"name": name, "served": name in windows, "path": made.get(name), "window": windows.get(name)}
        for name in sorted(made | windows)
    ]
    if output is Output.JSON:
        print_json({"drives": rows})
        return
    table = Table(title="Drives", title_justify="left")
    for column in ("name", "served", "flash", "window"):
        table.add_column(column)
    for row in rows:
        flash, window = row["path"] or "-", row["window"] or "-"
        table.add_row(str(row["name"]), "yes" if row["served"] else "no", str(flash), str(window))
    stdout().print(table)


def _window(folder: Path) -> str:
    windows = set(folder.glob("window-[!_]*"))
    return str(min(windows - {doorbell_path(window) for window in windows}))


def delete(name: Annotated[str, typer.Argument(help="name of the drive")]) -> None:
    """Delete a created drive and all its data."""
    from csd_link.connect import find_server
    from vcsd.administer import delete_drive

    folder = find_created(name).parent
    if find_server(name):
        raise ValueError(f"drive {name} is served: stop vcsd serve first")
    delete_drive(folder)
    shutil.rmtree(drive_dir(name), ignore_errors=True)
    err.print(f"{folder}: deleted")
