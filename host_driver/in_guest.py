"""Init process of the guest VM: accesses the drives through the Linux NVMe driver and reports results.

Arguments are words vcsd.NAME=VALUE of the kernel's command line. The result is one line of JSON on the console.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SAYS = "vcsd-guest: "  # prefix of the result

_POWER_OFF = 0x4321FEDC
_MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp"))


def main() -> None:
    """Mount file systems, do the work, and power off on success or failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for kind, where in _MOUNTS:
            libc.mount(kind.encode(), where.encode(), kind.encode(), 0, None)
        answer = work(arguments(Path("/proc/cmdline").read_text()), libc)
    except BaseException as error:  # noqa: BLE001 - the machine outside reads it
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{SAYS}{json.dumps(answer)}", flush=True)
    libc.sync()
    libc.reboot(_POWER_OFF)


def arguments(command_line: str) -> dict[str, str]:
    """Arguments on the kernel's command line."""
    words = (word[5:].partition("=") for word in command_line.split() if word.startswith("vcsd."))
    return {name: value for name, _, value in words}


def work(options: dict[str, str], libc: Any) -> dict[str, Any]:
    """Load a module if one is given, find the drive, and decode over its block and its character device."""
    from csd_io.nvme import identify_controller
    from csd_link.connect import open_window
    from host_driver.in_guest_fabric import work_over_fabric

    if options.get("ports"):
        return work_over_fabric(options, partial(_insert, libc), libc)
    if options.get("module"):
        _insert(libc, Path("/module.ko"), options["module"].replace("/", " "))
    name = _find(options["model"])
    controller = identify_controller(Path(f"/dev/{name}"))
    drives = int(options["drives"])
    block, char = Path(f"/dev/{name}"), Path(f"/dev/{name.replace('nvme', 'ng', 1)}")
    # Each transport has its own drives: on used drives data is on other pages, and times differ
    ways: dict[str, Callable[[int], Any]] = {
        block.name: lambda number: open_window(block, number),
        char.name: lambda number: open_window(char, drives + number),
    }
    answer = {
        "id_ctrl": controller,
        "decodes": {way: _decode(connect, drives, options) for way, connect in ways.items()},
    }
    if "scratch" in options:
        answer["passthrough"] = _pass_through(char.with_name(f"{char.name[:-1]}{options['scratch']}"))
    return answer


def _pass_through(namespace: Path) -> dict[str, Any]:
    """Round trip of layers through a namespace with NVMe passthrough; the layers are stored next to the packages."""
    from csd_io.direct import open_queue
    from host_driver.passthrough import LAYERS_FILE, Layers, round_trip

    began = time.monotonic()
    queue = open_queue(namespace)
    try:
        report = round_trip(queue, Layers.load(Path(__file__).parents[1] / LAYERS_FILE))
    finally:
        queue.close()
    return report | {"namespace": namespace.name, "wall_s": time.monotonic() - began}


def _decode(connect: Callable[[int], Any], drives: int, options: dict[str, str]) -> dict[str, Any]:
    from host_driver.driver import Driver
    from host_driver.random_decode import SHIPPED_SHAPE, random_decode

    began = time.monotonic()
    devices = [connect(number) for number in range(drives)]
    driver = Driver(devices, SHIPPED_SHAPE)
    result = random_decode(driver, int(options["prompt"]), int(options["tokens"]))
    driver.close()
    for device in devices:
        device.close()
    return result | {"wall_s": time.monotonic() - began}


def _insert(libc: Any, file: Path, options: str = "") -> None:
    fd = os.open(file, os.O_RDONLY)
    if libc.syscall(313, fd, options.encode(), 0):  # finit_module on x86-64
        raise OSError(ctypes.get_errno(), f"{file.name} {options}: {os.strerror(ctypes.get_errno())}")


def _find(model: str) -> str:
    """Name of the first namespace of the controller whose model starts with `model`; waits for the driver."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for entry in sorted(Path("/sys/class/nvme").glob("nvme*")):
            if (entry / "model").read_text().startswith(model) and Path(f"/dev/{entry.name}n1").exists():
                return f"{entry.name}n1"
        time.sleep(0.05)
    raise FileNotFoundError(f"the NVMe driver shows no controller {model} after 30 s")


if __name__ == "__main__":
    if os.getpid() != 1:
        sys.exit("this is the init process of the guest VM: use vcsd guest run")
    main()
