"""Prometheus metrics of served drives and of a fleet, read at each scrape.

`python -m vcsd.drive_metrics HOST:PORT PID DRIVE...` serves those of drives while process PID runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter as Count
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from csd_io.parent_death import end_with_parent
from csd_link.fleet_table import FleetTable
from csd_link.host_end import DriveLostError
from csd_spec import DriveError, LogPage
from vcsd.administer import admin_window, read_log

Logs = dict[LogPage, dict[str, Any]]
Rows = Callable[[Logs], dict[tuple[str, ...], float]]  # values of a metric by its labels after `drive`
PAGES = LogPage.SMART, LogPage.WEAR, LogPage.ERROR, LogPage.LATENCY
STATES = "starting", "up", "draining", "lost"


def _one(page: LogPage, key: str) -> Rows:
    return lambda logs: {(): float(logs[page][key])}


def _programmed(logs: Logs) -> dict[tuple[str, ...], float]:
    kinds = ("groups", "blocks", "journal", "moved")
    return {(kind,): float(logs[LogPage.WEAR][f"pages_{kind}"]) for kind in kinds}


def _erased(logs: Logs) -> dict[tuple[str, ...], float]:
    histogram = logs[LogPage.WEAR]["erase_histogram"]
    return {(): float(sum(int(erases) * blocks for erases, blocks in histogram.items()))}


def _refused(logs: Logs) -> dict[tuple[str, ...], float]:
    return {(status,): float(count) for status, count in logs[LogPage.ERROR]["refused"].items()}


def _commands(logs: Logs) -> dict[tuple[str, ...], float]:
    return {(kind,): float(times["commands"]) for kind, times in logs[LogPage.LATENCY].items()}


def _seconds(logs: Logs) -> dict[tuple[str, ...], float]:
    return {(kind,): times["commands"] * times["mean_ns"] / 1e9 for kind, times in logs[LogPage.LATENCY].items()}


# Name (counters get _total), help text, labels after `drive`, values
COUNTERS: tuple[tuple[str, str, tuple[str, ...], Rows], ...] = (
    ("vcsd_drive_host_reads", "Commands that read", (), _one(LogPage.SMART, "host_read_commands")),
    ("vcsd_drive_host_writes", "Commands that stored something", (), _one(LogPage.SMART, "host_write_commands")),
    ("vcsd_drive_flash_pages_programmed", "Flash pages programmed, by purpose; moved: GC", ("purpose",), _programmed),
    ("vcsd_drive_flash_pages_read", "Flash pages read for commands", (), _one(LogPage.WEAR, "pages_read")),
    ("vcsd_drive_flash_blocks_erased", "Flash blocks erased", (), _erased),
    ("vcsd_drive_media_errors", "Pages that the ECC could not correct", (), _one(LogPage.SMART, "media_errors")),
    ("vcsd_drive_errors", "Commands refused in the drive's life", (), _one(LogPage.SMART, "num_err_log_entries")),
    ("vcsd_drive_refusals", "Commands refused since power-on, by status", ("status",), _refused),
    ("vcsd_drive_hosts_refused", "NVMe/TCP hosts refused since power-on", (), _one(LogPage.SMART, "hosts_refused")),
    ("vcsd_drive_power_ons", "Times that the drive was started", (), _one(LogPage.SMART, "power_cycles")),
    ("vcsd_drive_unsafe_shutdowns", "Ends without being closed", (), _one(LogPage.SMART, "unsafe_shutdowns")),
    ("vcsd_drive_commands", "Commands since power-on, by verb", ("verb",), _commands),
    ("vcsd_drive_simulated_seconds", "Simulated time of commands since power-on, by verb", ("verb",), _seconds),
)
GAUGES: tuple[tuple[str, str, tuple[str, ...], Rows], ...] = (
    ("vcsd_drive_write_amplification", "Write amplification (WAF)", (), _one(LogPage.SMART, "waf")),
    ("vcsd_drive_nvme_tcp_connections", "NVMe/TCP connections", (), _one(LogPage.SMART, "connections")),
    ("vcsd_drive_sequences", "Sequences", (), _one(LogPage.SMART, "sequences")),
    ("vcsd_drive_values", "Values by key", (), _one(LogPage.SMART, "values")),
    ("vcsd_drive_spare_percent", "Spare blocks available, %", (), _one(LogPage.SMART, "avail_spare")),
    ("vcsd_drive_used_percent", "Endurance used, %", (), _one(LogPage.SMART, "percent_used")),
    ("vcsd_drive_free_blocks", "Erased blocks", (), _one(LogPage.WEAR, "free_blocks")),
    ("vcsd_drive_bad_blocks", "Bad blocks", (), _one(LogPage.WEAR, "bad_blocks")),
)


def read_logs(drive: str) -> Logs | None:
    """Log pages of a served drive; None if it does not answer or its admin window is in use."""
    try:
        with closing(admin_window(drive)) as device:
            return {page: read_log(device, page) for page in PAGES}
    except (DriveLostError, OSError, DriveError):
        return None


class DriveCollector(Collector):
    """Metrics of drives served on this machine."""

    def __init__(self, drives: Sequence[str], read: Callable[[str], Logs | None] = read_logs) -> None:
        self._drives, self._read = drives, read

    def describe(self) -> list[Metric]:
        """Empty, so that no drive is read at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        by_drive = {drive: self._read(drive) for drive in self._drives}
        answers = GaugeMetricFamily("vcsd_drive_answers", "Whether the drive answered this scrape", labels=["drive"])
        for drive, logs in by_drive.items():
            answers.add_metric([drive], float(logs is not None))
        yield answers
        for kind, rows in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text, labels, values in rows:
                metric = kind(name, text, labels=["drive", *labels])
                for drive, logs in by_drive.items():
                    for more, value in values(logs).items() if logs else ():
                        metric.add_metric([drive, *more], value)
                yield metric


class FleetCollector(Collector):
    """Metrics of a fleet, from its table."""

    def __init__(self, read: Callable[[], FleetTable | None]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Empty, as in `DriveCollector`."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            table = self._read()
        except (DriveLostError, ValueError):
            table = None
        members = table.members if table else ()
        yield GaugeMetricFamily("vcsd_fleet_answers", "Whether a fleet is up", value=float(table is not None))
        count = Count[str](member.state for member in members)
        states = GaugeMetricFamily("vcsd_fleet_drives", "Drives and spares, by state", labels=["state"])
        for state in STATES:
            states.add_metric([state], count[state])
        yield states
        restarts = CounterMetricFamily("vcsd_fleet_drive_restarts", "Restarts of a generation", labels=["drive"])
        generation = GaugeMetricFamily("vcsd_fleet_drive_generation", "Generation of a drive", labels=["drive"])
        for member in members:
            restarts.add_metric([member.name], member.restarts)
            generation.add_metric([member.name], member.generation)
        yield from (restarts, generation)


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT; raises ValueError if it is invalid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"metrics = {text!r}: must be HOST:PORT, as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def serve_metrics(address: str, collector: Collector) -> None:
    """Serve `/metrics` from a background thread; raises ValueError or OSError for an unusable address."""
    host, port = parse_address(address)
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), address) from error


def main() -> None:
    """Serve metrics of drives until the parent process exits; prints `ready`, or an error."""
    address, parent, *drives = sys.argv[1:]
    end_with_parent(int(parent))
    try:
        serve_metrics(address, DriveCollector(drives))
    except OSError as error:
        print(f"metrics: {error.strerror}: {address!r}", flush=True)
        sys.exit(1)
    print("ready", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
