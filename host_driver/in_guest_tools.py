"""Use of a drive inside the guest VM: nvme-cli, a file system, fio, a decode."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host_driver.in_guest_fabric import (
    BLOCKS_NSID,
    HOST,
    SEQUENCES_NSID,
    VALUES_NSID,
    connect_again,
    nvme,
    run,
    wait_for_node,
)

_FILE_BYTES = 4 << 20
_FIO = (
    *("--ioengine=io_uring_cmd", "--cmd_type=nvme", "--thread", "--bs=4k", "--size=4m", "--iodepth=8"),
    *("--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"),
    "--output-format=json",
)


def use(nodes: Sequence[dict[int, Path]], options: dict[str, str], libc: Any) -> dict[str, Any]:
    """Use the blocks of every drive, then decode in their sequences.

    Args:
        nodes: Character devices of the namespaces of each drive, by NSID.
        options: Arguments on the kernel's command line: prompt, tokens.
        libc: C library, for mounts.

    """
    first = nodes[0][BLOCKS_NSID]
    # Decode first: on a drive that holds values, KV data is on other pages, and times differ
    decoded = _decode([node[SEQUENCES_NSID] for node in nodes], options)
    return {
        "id_ctrl": nvme("id-ctrl", str(first), "-o", "json"),
        "commands": _commands(first),
        "values_equal": _values(nodes[0][VALUES_NSID]),
        "filesystem": [_filesystem(node[BLOCKS_NSID], libc) for node in nodes],
        "fio": _fio(first),
        "paths": _paths(first, int(options["ports"].split(",")[0])),
        "decodes": {"nvme+tcp": decoded},
    }


def _commands(node: Path) -> dict[str, Any]:
    """nvme-cli's report about a drive, its block namespace and its health."""
    wrong = ["/usr/sbin/nvme", "get-log", str(node), "--log-id=0x7f", "--log-len=512"]
    for _ in range(3):  # so that the error log has entries
        subprocess.run(wrong, capture_output=True)
    smart = nvme("smart-log", str(node), "-o", "json")
    errors = [entry["error_count"] for entry in nvme("error-log", str(node), "-e", "64", "-o", "json")["errors"]]
    return {
        "list": len(nvme("list", "-o", "json")["Devices"]),
        "id_ns": {key: nvme("id-ns", str(node), "-o", "json")[key] for key in ("nsze", "ncap", "nuse")},
        "smart_log": {key: smart[key] for key in ("critical_warning", "percent_used", "power_cycles")},
        "errors": {"smart_log": int(smart["num_err_log_entries"]), "error_log": max(errors)},
    }


def _values(node: Path) -> bool:
    """Store, retrieve and delete values with Key Value commands of nvme-cli; returns whether all were correct."""
    is_right = True
    for number, size in enumerate((5, 4096, 100_000)):
        value, file = os.urandom(size), Path("/tmp/value")
        file.write_bytes(value)
        key = f"--cdw2={number + 1}", "--cdw11=4"
        _passthru(node, 0x01, *key, f"--cdw10={size}", f"--data-len={size}", "--write", f"--input-file={file}")
        retrieved = _passthru(node, 0x02, *key, f"--cdw10={size}", f"--data-len={size}", "--read", "--raw-binary")
        _passthru(node, 0x10, *key)
        is_right &= (
            retrieved == value and subprocess.run(_command(node, 0x14, *key), capture_output=True).returncode != 0
        )
    return is_right


def _passthru(node: Path, opcode: int, *words: str) -> bytes:
    return subprocess.run(_command(node, opcode, *words), capture_output=True, check=True).stdout


def _command(node: Path, opcode: int, *words: str) -> list[str]:
    return ["/usr/sbin/nvme", "io-passthru", str(node), f"--opcode={opcode}", f"--namespace-id={VALUES_NSID}", *words]


def _filesystem(node: Path, libc: Any) -> dict[str, Any]:
    """Create ext4 on a block namespace, write and remove a file, trim; returns the namespace's NUSE at each step."""
    block, where = str(node.with_name(node.name.replace("ng", "nvme", 1))), "/tmp/mounted"
    wait_for_node(Path(block))
    run(
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
    run("/usr/sbin/fstrim", where)
    _unmount(libc, where)
    return {
        "bytes_equal": is_same,
        "fsck_clean": is_clean and _fsck(block),
        "nuse_with_file": used_with_file,
        "nuse_trimmed": _used(node),
    }


def _fio(node: Path) -> dict[str, Any]:
    """Verified random writes and reads of a block namespace with fio; raises OSError on a mismatch.

    They bypass the kernel's block layer: io_uring commands on the character device.
    """
    counts = dict[str, int]()
    for kind in ("randwrite", "randread"):
        said = json.loads(run("/usr/sbin/fio", f"--name={kind}", f"--filename={node}", f"--rw={kind}", *_FIO))
        (job,) = said["jobs"]
        counts |= {f"{kind}_{way}s": job[way]["total_ios"] for way in ("write", "read")} | {"error": job["error"]}
    return {"version": said["fio version"], "node": node.name} | counts


def _paths(node: Path, port: int) -> dict[str, Any]:
    """fio on a block namespace over a second connection to the same drive, of this host and of another one.

    First both connections get commands in turn, then the new one gets all of them.
    """
    nqn, results = nvme("id-ctrl", str(node), "-o", "json")["subnqn"], {}
    (subsystem,) = (path.parent for path in Path("/sys/class/nvme-subsystem").glob("*/subsysnqn") if _is(path, nqn))
    (subsystem / "iopolicy").write_text("round-robin")
    for name, host in {"same_host": HOST, "other_host": f"{HOST[:-1]}2"}.items():
        (before,) = _controllers(nqn)
        connect_again(port, nqn, host)
        count, both = len(_controllers(nqn)), _fio(node)
        nvme("disconnect", "-d", before)
        results[name] = {"controllers": count, "both": both, "alone": _fio(node)}
    return results


def _controllers(nqn: str) -> list[str]:
    """Names of the controllers that Linux has of a subsystem."""
    return [path.parent.name for path in Path("/sys/class/nvme").glob("*/subsysnqn") if _is(path, nqn)]


def _is(path: Path, text: str) -> bool:
    return path.read_text().strip() == text


def _fsck(block: str) -> bool:
    return subprocess.run(["/usr/sbin/e2fsck", "-f", "-n", block], capture_output=True, check=False).returncode == 0


def _used(node: Path) -> int:
    return int(nvme("id-ns", str(node), "-o", "json")["nuse"])


def _mount(libc: Any, block: str, where: str) -> None:
    if libc.mount(block.encode(), where.encode(), b"ext4", 0, None):
        raise OSError(f"cannot mount {block} at {where}")


def _unmount(libc: Any, where: str) -> None:
    if libc.umount2(where.encode(), 0):
        raise OSError(f"cannot unmount {where}")


def _decode(nodes: Sequence[Path], options: dict[str, str]) -> dict[str, Any]:
    from csd_link.nvmeof.node import NodeDrive
    from host_driver.driver import Driver
    from host_driver.random_decode import SHIPPED_SHAPE, random_decode

    began = time.monotonic()
    devices = [NodeDrive(node) for node in nodes]
    driver = Driver(devices, SHIPPED_SHAPE)
    result = random_decode(driver, int(options["prompt"]), int(options["tokens"]))
    limits = {"nodes": [node.name for node in nodes], "how": devices[0].how, "max_bytes": devices[0].max_bytes}
    driver.close()
    for device in devices:
        device.close()
    return result | limits | {"wall_s": time.monotonic() - began}
