"""Guest VM as NVMe/TCP host of drives outside of it, with Linux's initiator and nvme-cli.

Runs inside the guest in its init process. The drives listen on the machine outside.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

OUTSIDE, INSIDE, NETMASK = "10.0.2.2", "10.0.2.15", "255.255.255.0"  # QEMU's user network
BLOCKS_NSID, VALUES_NSID, SEQUENCES_NSID = 1, 2, 3
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK = 0x8914, 0x8916, 0x891C  # linux/sockios.h
_UP_AND_RUNNING = 0x41
_PATIENCE_S = 60.0
HOST = "nqn.2014-08.org.nvmexpress:uuid:6c7b3a52-0d6e-4d7f-9a0e-0f3b8f0a7c11"


def work_over_fabric(options: dict[str, str], insert: Callable[[Path], None], libc: Any) -> dict[str, Any]:
    """Connect to the drives, and do the work named on the kernel's command line.

    Args:
        options: Arguments of the command line: ports; then, a module whose `use` gets the connected drives.
        insert: Loads a kernel module.
        libc: C library, for mounts.

    Returns:
        Discovered NQNs, and the result of `use`.

    """
    for module in sorted(Path("/modules").iterdir()):
        insert(module)
    _network()
    ports = [int(port) for port in options["ports"].split(",")]
    records = nvme("discover", *_at(ports[0]), "-o", "json")["records"]
    for port, record in zip(ports, records, strict=True):
        nvme("connect", *_at(port), "-n", record["subnqn"], "--hostnqn", HOST, "--reconnect-delay", "1")
    nodes = [_nodes(record["subnqn"]) for record in records]
    used: dict[str, Any] = import_module(options["then"]).use(nodes, options, libc)
    return {"discovered": [record["subnqn"] for record in records]} | used


def connect_again(port: int, nqn: str, host: str) -> None:
    """Connect to a drive that is connected already, which nvme-cli refuses."""
    fields = f"transport=tcp,traddr={OUTSIDE},trsvcid={port},nqn={nqn},hostnqn={host},hostid={host.rpartition(':')[2]}"
    fd = os.open("/dev/nvme-fabrics", os.O_RDWR)
    try:
        os.write(fd, f"{fields},reconnect_delay=1,duplicate_connect".encode())
    finally:
        os.close(fd)


def _at(port: int) -> tuple[str, ...]:
    return "-t", "tcp", "-a", OUTSIDE, "-s", str(port)


def _network() -> None:
    """Configure loopback and the only other interface."""
    (card,) = (path.name for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for name, address, mask in (("lo", "127.0.0.1", "255.0.0.0"), (card, INSIDE, NETMASK)):
            for request, value in ((_SET_ADDRESS, address), (_SET_NETMASK, mask)):
                words = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(line, request, struct.pack("<16s", name.encode()) + words)
            fcntl.ioctl(line, _SET_FLAGS, struct.pack("<16sh14x", name.encode(), _UP_AND_RUNNING))


def _nodes(nqn: str) -> dict[int, Path]:
    """Character devices of a subsystem's namespaces by NSID; waits until Linux shows all three."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        nodes = {}
        for entry in Path("/sys/class/nvme-generic").glob("ng*"):
            if (entry / "device/subsysnqn").read_text().strip() == nqn:
                node = wait_for_node(Path("/dev") / entry.name)
                nodes[_nsid(node)] = node
        if {BLOCKS_NSID, VALUES_NSID, SEQUENCES_NSID} <= nodes.keys():
            return nodes
        time.sleep(0.1)
    raise OSError(f"Linux shows no namespaces of {nqn} after {_PATIENCE_S:.0f} s")


def _nsid(node: Path) -> int:
    fd = os.open(node, os.O_RDONLY)
    try:
        return fcntl.ioctl(fd, 0x4E40)  # NVME_IOCTL_ID
    finally:
        os.close(fd)


def wait_for_node(node: Path) -> Path:
    """Wait for a device file."""
    deadline = time.monotonic() + _PATIENCE_S
    while not node.exists():
        if time.monotonic() > deadline:
            raise OSError(f"{node} did not appear in {_PATIENCE_S:.0f} s")
        time.sleep(0.02)
    return node


def run(*command: str) -> str:
    """Run a program; raises OSError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def nvme(*words: str) -> Any:
    """Run nvme-cli; returns its output, parsed if it is JSON."""
    said = run("/usr/sbin/nvme", *words)
    return json.loads(said) if "json" in words else said
