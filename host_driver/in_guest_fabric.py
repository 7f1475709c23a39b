"""The guest machine as a host of drives on another machine: Linux's NVMe/TCP initiator, nvme-cli, a file system.

Runs inside the guest, as the first program's work. The drives listen on the machine outside.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OUTSIDE, INSIDE, NETMASK = "10.0.2.2", "10.0.2.15", "255.255.255.0"  # of QEMU's user network
BLOCKS_NSID, SEQUENCES_NSID = 1, 3
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK = 0x8914, 0x8916, 0x891C  # linux/sockios.h
_UP_AND_RUNNING = 0x41
_PATIENCE_S = 60.0
_FILE_BYTES = 4 << 20
_HOST = "nqn.2014-08.org.nvmexpress:uuid:6c7b3a52-0d6e-4d7f-9a0e-0f3b8f0a7c11"


def work_over_fabric(given: dict[str, str], insert: Callable[[Path], None], libc: Any) -> dict[str, Any]:
    """Connect to the drives, use their blocks and their sequences, and say what came of it.

    Args:
        given: Words of the kernel's command line: ports, prompt, tokens.
        insert: Loads a kernel module.
        libc: For mounts.

    """
    for module in sorted(Path("/modules").iterdir()):
        insert(module)
    _network()
    ports = [int(port) for port in given["ports"].split(",")]
    found = _nvme("discover", *_at(ports[0]), "-o", "json")["records"]
    for port, record in zip(ports, found, strict=True):
        _nvme("connect", *_at(port), "-n", record["subnqn"], "--hostnqn", _HOST)
    nodes = [_nodes(record["subnqn"]) for record in found]
    controllers = [_awaited(node[BLOCKS_NSID]) for node in nodes]
    return {
        "id_ctrl": _nvme("id-ctrl", str(controllers[0]), "-o", "json"),
        "discovered": [record["subnqn"] for record in found],
        "commands": _commands(controllers[0]),
        "filesystem": [_filesystem(node[BLOCKS_NSID], libc) for node in nodes],
        "decodes": {"nvme+tcp": _decode([_awaited(node[SEQUENCES_NSID]) for node in nodes], given)},
    }


def _at(port: int) -> tuple[str, ...]:
    return "-t", "tcp", "-a", OUTSIDE, "-s", str(port)


def _network() -> None:
    """Configure loopback and the only other interface."""
    (card,) = (each.name for each in Path("/sys/class/net").iterdir() if each.name != "lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for name, address, mask in (("lo", "127.0.0.1", "255.0.0.0"), (card, INSIDE, NETMASK)):
            for request, value in ((_SET_ADDRESS, address), (_SET_NETMASK, mask)):
                words = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(line, request, struct.pack("<16s", name.encode()) + words)
            fcntl.ioctl(line, _SET_FLAGS, struct.pack("<16sh14x", name.encode(), _UP_AND_RUNNING))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _nvme(*words: str) -> Any:
    """Run nvme-cli; what it prints, as JSON where it prints some."""
    said = _run("/usr/sbin/nvme", *words)
    return json.loads(said) if "json" in words else said


def _nodes(nqn: str) -> dict[int, Path]:
    """Character devices of a subsystem's namespaces, by NSID, as soon as there are as many as the drive has."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = {}
        for entry in Path("/sys/class/nvme-generic").glob("ng*"):
            if (entry / "device/subsysnqn").read_text().strip() == nqn:
                node = _awaited(Path("/dev") / entry.name)
                found[_nsid(node)] = node
        if {BLOCKS_NSID, SEQUENCES_NSID} <= found.keys():
            return found
        time.sleep(0.1)
    raise OSError(f"Linux shows no namespaces of {nqn}")


def _nsid(node: Path) -> int:
    fd = os.open(node, os.O_RDONLY)
    try:
        return fcntl.ioctl(fd, 0x4E40)  # NVME_IOCTL_ID
    finally:
        os.close(fd)


def _awaited(node: Path) -> Path:
    deadline = time.monotonic() + _PATIENCE_S
    while not node.exists():
        if time.monotonic() > deadline:
            raise OSError(f"{node} does not come")
        time.sleep(0.02)
    return node


def _commands(node: Path) -> dict[str, Any]:
    """What nvme-cli says of a drive, its block namespace and its health."""
    smart = _nvme("smart-log", str(node), "-o", "json")
    return {
        "list": len(_nvme("list", "-o", "json")["Devices"]),
        "id_ns": {key: _nvme("id-ns", str(node), "-o", "json")[key] for key in ("nsze", "ncap", "nuse")},
        "smart_log": {key: smart[key] for key in ("critical_warning", "percent_used", "power_cycles")},
    }


def _filesystem(node: Path, libc: Any) -> dict[str, Any]:
    """Make ext4 on a block namespace, write a file, remove it, trim; NUSE of the namespace at each step."""
    block, where = str(node.with_name(node.name.replace("ng", "nvme", 1))), "/tmp/mounted"
    _awaited(Path(block))
    _run(
        "/usr/sbin/mke2fs",
        "-q",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-E",
        "lazy_itable_init=0",
        block,
        "64m",
    )
    os.makedirs(where, exist_ok=True)
    file, content = Path(where) / "file", os.urandom(_FILE_BYTES)
    _mount(libc, block, where)
    file.write_bytes(content)
    _unmount(libc, where)
    used_with_file = _used(node)
    is_clean = _fsck(block)
    _mount(libc, block, where)
    is_same = hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(content).digest()
    file.unlink()
    os.sync()
    _run("/usr/sbin/fstrim", where)
    _unmount(libc, where)
    return {
        "bytes_equal": is_same,
        "fsck_clean": is_clean and _fsck(block),
        "nuse_with_file": used_with_file,
        "nuse_trimmed": _used(node),
    }


def _fsck(block: str) -> bool:
    return subprocess.run(["/usr/sbin/e2fsck", "-f", "-n", block], capture_output=True, check=False).returncode == 0


def _used(node: Path) -> int:
    return int(_nvme("id-ns", str(node), "-o", "json")["nuse"])


def _mount(libc: Any, block: str, where: str) -> None:
    if libc.mount(block.encode(), where.encode(), b"ext4", 0, None):
        raise OSError(f"{block} cannot be mounted")


def _unmount(libc: Any, where: str) -> None:
    if libc.umount2(where.encode(), 0):
        raise OSError(f"{where} cannot be unmounted")


def _decode(nodes: Sequence[Path], given: dict[str, str]) -> dict[str, Any]:
    from csd_link.nvmeof.node import NodeDevice
    from host_driver.driver import Driver
    from host_driver.exercise import SHIPPED_SHAPE, exercise

    began = time.monotonic()
    devices = [NodeDevice(node) for node in nodes]
    driver = Driver(devices, SHIPPED_SHAPE)
    result = exercise(driver, int(given["prompt"]), int(given["tokens"]))
    limits = {"nodes": [node.name for node in nodes], "how": devices[0].how, "max_bytes": devices[0].max_bytes}
    driver.close()
    for device in devices:
        device.close()
    return result | limits | {"wall_s": time.monotonic() - began}
