"""`vcsd drive serve`, `create`, `list`, `delete`: drives in their own processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from csd_io.paths import expand
from csd_link.hosting import HostingOptions
from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.nvmeof.tls import Credentials
from csd_link.run_dir import doorbell_path, drive_dir, private_dir, run_dir, window_path
from csd_link.served_drive import ADMIN, DEFAULT, ServedDrive, ServedDrives
from csd_spec.checked import adapter
from csd_spec.optional import require
from nvmevirt_config import load_config
from nvmevirt_config.document import dump_yaml
from nvmevirt_config.serve_config import DriveEntry, ServeFile, check_files, load_hosts
from vcsd.options import MethodsFile, OptionError, check_text
from vcsd_cli.shared import Output, OutputOption, print_json, report_done, stdout


def home() -> Path:
    """Folder of created drives: $VCSD_HOME, or ~/.local/share/vcsd."""
    return Path(os.environ.get("VCSD_HOME") or Path.home() / ".local/share/vcsd")


def created() -> dict[str, Path]:
    """Description files of created drives, by name."""
    return {file.parent.name: file for file in sorted(home().glob("[!.]*/served.yaml"))}


def find_created(name: str) -> Path:
    """Description file of a created drive; raises ValueError for an unknown name."""
    drives = created()
    if name not in drives:
        raise ValueError(
            f"no drive {name!r}: {'there are ' + ', '.join(drives) if drives else 'vcsd drive create makes one'}"
        )
    return drives[name]


WHAT_HELP = "config file, or names of created drives (default: all of them)"
RESTART_HELP = "restart a drive process that dies (default: yes, or as in the config file)"
READY_HELP = "file descriptor to which READY=1 is written when all drives answer"
LISTEN_HELP = "address for NVMe/TCP hosts, HOST:PORT; each drive takes the next port"
REMOTE_HELP = "allow an address for --listen that other machines reach; needs --hosts-file (not a proof) or --tls-ca"
HOSTS_HELP = "YAML file of the allowed NVMe/TCP hosts and their tenants (docs/nvme.md); others are refused"
TLS_HELP = "certificate of the drives, PEM: enables TLS 1.3 for NVMe/TCP (docs/nvme.md); needs --tls-key"
KEY_HELP = "private key of --tls-cert, PEM, not encrypted"
CA_HELP = "CA certificates of hosts, PEM; without it hosts need no certificate"
METRICS_HELP = "address for Prometheus metrics of the drives (docs/operations.md)"
WINDOW_HELP = "file or device that holds the windows, one after another"


class LogFormat(StrEnum):
    """Format of events."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Processes and places of the drives; None: as in the config file."""

    restart: Annotated[bool | None, typer.Option("--restart/--no-restart", help=RESTART_HELP)] = None
    window: Annotated[Path | None, typer.Option("--window-device", help=WINDOW_HELP)] = None
    mount: Annotated[Path | None, typer.Option(help="folder; each drive is mounted there under its name")] = None
    methods_file: MethodsFile = None
    layouts_file: Annotated[
        Path | None, typer.Option("--layouts-file", help="Python file with custom KV layouts", callback=check_text)
    ] = None

    def fields(self) -> dict[str, Any]:
        """Fields of a drive that these options set."""
        files = {"methods_file": self.methods_file, "layouts_file": self.layouts_file}
        fields = {"restarts": self.restart} | {name: file and file.absolute() for name, file in files.items()}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """NVMe/TCP."""

    listen: Annotated[str | None, typer.Option(help=LISTEN_HELP, metavar="HOST:PORT")] = None
    listen_remote: Annotated[bool, typer.Option("--listen-remote", help=REMOTE_HELP)] = False
    hosts: Annotated[Path | None, typer.Option("--hosts-file", help=HOSTS_HELP)] = None
    tls_cert: Annotated[Path | None, typer.Option(help=TLS_HELP)] = None
    tls_key: Annotated[Path | None, typer.Option(help=KEY_HELP)] = None
    tls_ca: Annotated[Path | None, typer.Option(help=CA_HELP)] = None

    def address(self, names: tuple[str, ...]) -> Listen | None:
        """Where drives of these names listen; raises ValueError or TlsError for options that do not fit together."""
        tls = self._credentials()
        for setting, option in ((self.hosts, "--hosts-file"), (tls, "--tls-cert")):
            if setting and not self.listen:
                raise ValueError(f"{option} has no effect without --listen: add --listen HOST:PORT")
        if not self.listen:
            return None
        return Listen.parse(self.listen, names, self.listen_remote, load_hosts(self.hosts) if self.hosts else None, tls)

    def _credentials(self) -> Credentials | None:
        """TLS files, checked to exist and to match."""
        cert, key, ca = (path and str(path.absolute()) for path in (self.tls_cert, self.tls_key, self.tls_ca))
        if not cert and not key and not ca:
            return None
        if not cert or not key:
            raise ValueError("TLS needs a certificate and its key: add --tls-cert FILE --tls-key FILE")
        credentials = Credentials(cert, key, ca or "")
        credentials.server()
        return credentials


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Events and metrics."""

    quiet: Annotated[bool, typer.Option("--quiet", help="print errors only")] = False
    metrics: Annotated[str | None, typer.Option(help=METRICS_HELP, metavar="HOST:PORT")] = None
    log_format: Annotated[LogFormat, typer.Option(help="format of events on stderr")] = LogFormat.TEXT
    ready_fd: Annotated[int | None, typer.Option(min=1, max=1 << 16, help=READY_HELP)] = None

    def check(self, listen: Listen | None) -> None:
        """Raise ValueError for an address or descriptor that cannot be used."""
        if self.metrics is not None and listen:
            _check_metrics(self.metrics, listen)
        if self.ready_fd is not None:
            try:
                os.fstat(self.ready_fd)
            except OSError as error:
                raise ValueError(
                    f"--ready-fd {self.ready_fd}: {error.strerror}: open it in the calling process"
                ) from error


def serve(
    hosting: HostingOptions,
    placement: PlacementOptions,
    tcp: TcpOptions,
    reports: ReportOptions,
    what: Annotated[list[str] | None, typer.Argument(help=WHAT_HELP)] = None,
) -> None:
    """Serve drives, one process per drive, until interrupted.

    A line is printed when a drive answers. Under systemd, the service is ready when all drives answer (Type=notify).
    """
    from attention_engine import load_methods
    from csd_firmware.process.events import emit, set_format
    from csd_firmware.process.supervisor import Supervisor, print_to_stderr
    from csd_link.connect import find_server

    if reports.metrics is not None:
        require("--metrics", "metrics", "prometheus_client")
    load_methods(placement.methods_file)  # reports errors once, here, instead of in every drive
    drives = _apply_options(_config(what or []), placement, hosting)
    listen = tcp.address(tuple(drive.name for drive in drives))
    if listen:
        drives = tuple(replace(drive, listen=listen) for drive in drives)
    for drive in drives:
        if find_server(drive.name):
            raise ValueError(f"drive {drive.name} is served already: stop the other vcsd drive serve first")
    reports.check(listen)

    def started(drive: ServedDrive | None) -> None:
        if drive is None:
            _notify(reports.ready_fd)
        elif not reports.quiet:
            where = drive.device or window_path(drive.name, drive.tenants[0])
            mounted = f", mounted at {drive.mount}" if drive.mount else ""
            said = f"drive {drive.name}: window {where}{mounted}{_listen_address(drive)}"
            emit("drive_started", said, drive=drive.name)

    set_format(reports.log_format.value)
    with _metrics(reports.metrics, [drive.name for drive in drives]):
        code = Supervisor(ServedDrives(drives), print_to_stderr, started=started).run()
    if not reports.quiet and not code:
        emit("stopped", "all drives are flushed and stopped")
    sys.exit(code)


def _check_metrics(metrics: str, listen: Listen) -> None:
    """Raise OptionError if --metrics is a port of --listen at the same address, however its host is written."""
    from vcsd.drive_metrics import parse_address

    host, port = parse_address(metrics)
    last = listen.port + len(listen.drives) - 1
    hosts = [{info[4][0] for info in socket.getaddrinfo(name, None)} for name in (host, listen.host)]
    if listen.port <= port <= last and (hosts[0] & hosts[1] or {"0.0.0.0", "::"} & (hosts[0] | hosts[1])):
        raise OptionError(f"--metrics {metrics}: --listen takes ports {listen.port} to {last}: choose another port")


@contextmanager
def _metrics(address: str | None, names: list[str]) -> Iterator[None]:
    """Serve the drives' metrics from a separate process while the block runs: the supervisor has no threads.

    Raises:
        ValueError, OSError: The address cannot be used.
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
            raise OSError(said or "metrics: their process exited without a reason")
        yield
    finally:
        process.kill()
        process.communicate()


def _listen_address(drive: ServedDrive) -> str:
    """NVMe/TCP address of a drive, as text."""
    if not drive.listen:
        return ""
    return f", NVMe/TCP {drive.listen.host}:{drive.listen.port_of(drive.name)} {nqn_of(drive.name)}"


def _notify(ready_fd: int | None) -> None:
    """Report that all drives answer: a line to the descriptor, a datagram to systemd's socket, if given."""
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
        raise ValueError("serve takes one config file, or names of drives, not both")
    if files:
        return load_config(expand(Path(files[0])))
    names = what or list(created())
    if not names:
        raise ValueError("there is no drive: create one with vcsd drive create NAME, or name a config file")
    return ServedDrives(tuple(drive for name in names for drive in load_config(find_created(name)).drives))


def _apply_options(
    config: ServedDrives, placement: PlacementOptions, hosting: HostingOptions
) -> tuple[ServedDrive, ...]:
    """The drives with the options applied."""
    from csd_link.medium import make_window_file
    from csd_link.window import BLOCK_BYTES

    window, mount = placement.window, placement.mount
    placed, at, count = [], 0, len(config.drives)
    for drive in config.drives:
        drive = replace(drive, **placement.fields())
        drive = replace(drive, **drive.hosting_fields(count) | hosting.overrides)
        if window:
            drive = replace(drive, device=window, offset_bytes=at)
            at += len(drive.tenants) * drive.layout.blocks * BLOCK_BYTES
        if mount:
            drive = replace(drive, mount=mount / drive.name)
        placed.append(drive)
    check_files(placed)
    if window:
        make_window_file(window, at)
    return ServedDrives(tuple(placed)).drives


def running() -> list[str]:
    """Names of served drives."""
    from csd_link.connect import find_server

    names = (path.parent.name for path in run_dir().glob(f"*/{window_path('x', ADMIN).name}"))
    return sorted(name for name in names if find_server(name))


def create(
    hosting: HostingOptions,
    name: Annotated[str, typer.Argument(help="name of the drive")],
    drive: Annotated[
        str | None, typer.Option("--drive-config", help="preset, or YAML description (default: the paper's drive)")
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="tenant with access; repeatable (default: default)")] = None,
    namespace_mib: Annotated[
        int | None, typer.Option(min=1, max=1 << 24, help="block namespace, MiB (default: a quarter, at most 4096)")
    ] = None,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Create a file-backed drive. Start it with `vcsd drive serve NAME`."""
    from csd_firmware.folder import describe
    from vcsd.administer import size_namespace

    folder = home() / name
    is_file = drive is not None and drive.endswith((".yaml", ".yml"))
    entry = DriveEntry(
        name=name,
        path=Path("."),
        drive=str(expand(Path(drive)).absolute()) if drive and is_file else drive,
        tenants=tuple(tenant or (DEFAULT,)),
        **hosting.overrides,
    )
    served = entry.served(folder, restarts=True)
    if folder.exists():
        raise ValueError(f"drive {name} exists: vcsd drive delete {name} first, or take another name")
    private_dir(home())
    aside = private_dir(home() / f".{os.getpid()}")
    try:
        describe(served.spec, aside)
        if namespace_mib:
            size_namespace(aside, namespace_mib << 20)
        listed = adapter(ServeFile).dump_python(ServeFile(drives=(entry,)), mode="json", exclude_defaults=True)
        (aside / "served.yaml").write_text(dump_yaml(listed))
        (aside / "served.yaml").chmod(0o600)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    done = f"{folder}: created; start it with vcsd drive serve {name}"
    report_done(done, {"name": name, "folder": str(folder), "drive": served.spec.name}, output)


def list_drives(output: OutputOption = Output.NORMAL) -> None:
    """List created and served drives."""
    folders = {name: str(file.parent) for name, file in created().items()}
    windows = {name: _window(drive_dir(name)) for name in running()}
    rows = [
        {"name": name, "served": name in windows, "path": folders.get(name), "window": windows.get(name)}
        for name in sorted(folders | windows)
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


def delete(
    name: Annotated[str, typer.Argument(help="name of the drive")],
    yes: Annotated[bool, typer.Option("--yes", help="delete without confirmation")] = False,
    output: OutputOption = Output.NORMAL,
) -> None:
    """Delete a created drive and all its data; asks for confirmation on a terminal."""
    from csd_link.connect import find_server
    from vcsd.administer import delete_drive

    folder = find_created(name).parent
    if find_server(name):
        raise ValueError(f"drive {name} is served: stop vcsd drive serve first")
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Delete {folder} and all its data?", err=True):
        raise ValueError(f"{folder} was not deleted: say --yes")
    delete_drive(folder)
    shutil.rmtree(drive_dir(name), ignore_errors=True)
    report_done(f"{folder}: deleted", {"name": name, "folder": str(folder)}, output)
