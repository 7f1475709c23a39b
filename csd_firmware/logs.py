"""Log pages of a drive, with the key names of nvme-cli's JSON if NVMe has the field."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_engine import Methods
from csd_spec import LogPage, Status
from csd_spec.arrays import F32, U8
from ftl import Ftl
from ftl.kv.values import is_value

UNSIZED_BYTES = 4 << 30  # maximum default size of the block namespace
NS_PER_MINUTE = 60_000_000_000
_LATENCY_BITS = 7


@dataclass(slots=True)
class AttentionLoss:
    """Approximation loss of a method, accumulated over rows (one query head's attention in one step)."""

    rows: int = 0
    lost: float = 0.0
    lost_worst: float = 0.0
    errors: float = 0.0
    error_worst: float = 0.0

    def add(self, lost: F32, errors: F32) -> None:
        """Add rows."""
        self.rows += lost.size
        self.lost += float(lost.sum())
        self.errors += float(errors.sum())
        self.lost_worst = max(self.lost_worst, float(lost.max()))
        self.error_worst = max(self.error_worst, float(errors.max()))

    def figures(self) -> dict[str, float]:
        """Mean and worst values."""
        rows = max(1, self.rows)
        return {
            "rows": self.rows,
            "lost_mass": self.lost / rows,
            "lost_mass_worst": self.lost_worst,
            "error_estimate": self.errors / rows,
            "error_estimate_worst": self.error_worst,
        }


class Latency:
    """Simulated latency of one kind of request."""

    def __init__(self) -> None:
        self.requests = self.nbytes = self.total_ns = self.max_ns = 0
        self._buckets: Counter[int] = Counter()  # requests by latency, rounded down to _LATENCY_BITS binary digits

    def add(self, ns: int, nbytes: int = 0) -> None:
        """Add a request of `nbytes` bytes that took `ns`."""
        self.requests += 1
        self.nbytes += nbytes
        self.total_ns += ns
        self.max_ns = max(self.max_ns, ns)
        shift = max(0, ns.bit_length() - _LATENCY_BITS)
        self._buckets[ns >> shift << shift] += 1

    def percentile_ns(self, percent: float) -> int:
        """Latency that `percent` of the requests do not exceed, at most 1.6 % too long, ns; 0 without requests."""
        left = percent / 100 * self.requests
        for ns in sorted(self._buckets):
            left -= self._buckets[ns]
            if left <= 0:
                return min(self.max_ns, ns + (1 << max(0, ns.bit_length() - _LATENCY_BITS)) - 1)
        return 0

    def to_dict(self) -> dict[str, float]:
        """Return mean, 99th percentile and maximum for a latency log, ns."""
        mean_ns = self.total_ns / max(1, self.requests)
        return {"mean_ns": mean_ns, "p99_ns": self.percentile_ns(99), "max_ns": self.max_ns}


class CommandStats:
    """Statistics since power-on: last errors, and simulated latency by kind of command."""

    def __init__(self) -> None:
        self.errors: deque[dict[str, Any]] = deque(maxlen=64)
        self.latency: dict[str, Latency] = {}
        self.attended: dict[str, AttentionLoss] = {}  # by method
        self.hosts_refused = 0  # rejected NVMe/TCP hosts
        self.refused: Counter[str] = Counter()  # rejected commands by status
        self.connections: Callable[[], int] = int  # current NVMe/TCP connections

    def refuse(self, command: str, status: Status, reason: str) -> None:
        """Record a rejected command."""
        entry = {"command": command, "status_field": int(status), "reason": reason}
        self.errors.appendleft(entry)
        self.refused[status.name.lower()] += 1

    def refuse_host(self, reason: str) -> None:
        """Record a rejected host."""
        self.hosts_refused += 1
        self.refuse("Connect", Status.INVALID_HOST, reason)

    def attend(self, method: str, lost: F32, errors: F32) -> None:
        """Record attended rows: softmax weight that the mean of V replaces, and estimated quantization error."""
        self.attended.setdefault(method, AttentionLoss()).add(lost, errors)

    def done(self, command: str, ns: int, nbytes: int = 0) -> None:
        """Record a command that took `ns` of simulated time."""
        self.latency.setdefault(command, Latency()).add(ns, nbytes)


def page_bytes(ftl: Ftl, history: CommandStats, methods: Methods, page: int) -> U8:
    """Return a log page as JSON text."""
    pages: dict[int, Callable[[], dict[str, Any]]] = {
        LogPage.ERROR: lambda: {"errors": list(history.errors), "refused": dict(history.refused)},
        LogPage.SMART: lambda: (
            smart(ftl) | {"hosts_refused": history.hosts_refused, "connections": history.connections()}
        ),
        LogPage.WEAR: lambda: wear(ftl),
        LogPage.LATENCY: lambda: latency(history),
        LogPage.PROGRAMS: lambda: programs(methods, history.attended),
        LogPage.NAMESPACE: lambda: namespace(ftl),
    }
    return np.frombuffer(json.dumps(pages[page]()).encode(), np.uint8)


def latency(history: CommandStats) -> dict[str, Any]:
    """Vendor log page C1h: simulated latency of commands, and of requests for blocks and values, since power-on, ns."""
    return {kind: {"commands": latency.requests} | latency.to_dict() for kind, latency in history.latency.items()}


def programs(methods: Methods, attended: Mapping[str, AttentionLoss]) -> dict[str, Any]:
    """Vendor log page C2h: device-defined programs (attention methods), and their approximation loss since power-on.

    Dense attention is exact and is not counted.
    """
    texts = {name: (getattr(method, "func", method).__doc__ or "").strip() for name, method in methods.items()}
    described = enumerate((name, text.partition("\n")[0]) for name, text in texts.items())
    rows = [{"pind": number, "name": name, "does": text} for number, (name, text) in described]
    return {"programs": [row | attended.get(str(row["name"]), AttentionLoss()).figures() for row in rows]}


def namespace_pages(ftl: Ftl) -> int:
    """Pages of the block namespace; the default size if it was not set."""
    geometry = ftl.spec.geometry
    return ftl.blocks.pages or min(UNSIZED_BYTES, geometry.capacity_bytes // 4) // geometry.page_bytes


def namespace(ftl: Ftl) -> dict[str, Any]:
    """Identify Namespace (NVMe Base Specification 2.0, figure 97) of the block namespace, in flash pages."""
    blocks, size = ftl.blocks, ftl.spec.geometry.page_bytes
    pages = namespace_pages(ftl)
    return {"nsze": pages, "ncap": pages, "nuse": blocks.mapped, "lba_bytes": size}


def smart(ftl: Ftl) -> dict[str, Any]:
    """SMART / Health Information (NVMe Base Specification 2.0, figure 207).

    critical_warning: bit 0, few spare blocks; bit 2, data was found lost at power-on (see the error log); bit 3, the
    drive is read-only. Data units are 1000 x 512 bytes that hosts sent or received with commands that store or return
    data; controller_busy_time is in minutes of simulated time. A shutdown is unsafe if the drive was not closed.
    Sequences, values and write amplification are vendor-specific fields.
    """
    values = sum(use.sequences for label, use in ftl.kv.usage.by_label() if is_value(label))
    c, nand = ftl.counters, ftl.nand
    usable = ftl.spec.geometry.blocks - nand.bad_blocks
    spare = ftl.spec.geometry.blocks // 2
    return {
        "critical_warning": int(usable <= spare) | bool(ftl.findings) << 2 | bool(nand.failed) << 3,
        "avail_spare": max(0, 100 * (usable - spare) // max(1, ftl.spec.geometry.blocks - spare)),
        "spare_thresh": 10,
        "percent_used": int(100 * nand.erase_count.mean() / nand.faults.endurance),
        "data_units_read": -(-c.host_read_bytes // 512_000),
        "data_units_written": -(-c.host_written_bytes // 512_000),
        "host_read_commands": c.host_reads,
        "host_write_commands": c.host_writes,
        "controller_busy_time": c.busy_ns // NS_PER_MINUTE,
        "power_cycles": c.power_cycles,
        "unsafe_shutdowns": c.unsafe_shutdowns,
        "media_errors": c.unrecovered,
        "num_err_log_entries": c.refused,
        "sequences": len(ftl.sequences) - values,
        "values": values,
        "waf": c.waf,
    }


def wear(ftl: Ftl) -> dict[str, Any]:
    """Vendor log page C0h: write amplification, erase count histogram, bad blocks."""
    counts, c = ftl.nand.erase_count, ftl.counters
    values, blocks = np.unique(counts, return_counts=True)
    return {
        "waf": c.waf,
        "pages_groups": c.groups,
        "pages_blocks": c.blocks,
        "pages_journal": c.journal,
        "pages_moved": c.moved,
        "pages_read": c.read,
        "erase_min": int(counts.min()),
        "erase_max": int(counts.max()),
        "erase_mean": float(counts.mean()),
        "erase_histogram": {str(value): int(count) for value, count in zip(values, blocks, strict=True)},
        "bad_blocks": ftl.nand.bad_blocks,
        "free_blocks": ftl.placement.free_blocks,
    }
