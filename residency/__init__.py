"""Where KV lives, when it moves, and where it is attended: one table, policies, and executors of time and of bytes."""

from __future__ import annotations

from residency.machine import CSD, DEVICE, DIRECT, HOST, PAGE_CACHE, Link, Machine, Path, Place
from residency.modelled.executor import Modelled, Work
from residency.policies import POLICIES, load_policies
from residency.table import Extent, Refused, Table, Ticket
from residency.turn import Policy, Residency, Turn

__all__ = [
    "CSD",
    "DEVICE",
    "DIRECT",
    "HOST",
    "PAGE_CACHE",
    "POLICIES",
    "Extent",
    "Link",
    "Machine",
    "Modelled",
    "Path",
    "Place",
    "Policy",
    "Refused",
    "Residency",
    "Table",
    "Ticket",
    "Turn",
    "Work",
    "load_policies",
]
