"""Mooncake's store, as published on PyPI, on the Key Value namespace of a drive that is killed during the run.

The guest VM connects to the drive with Linux's NVMe/TCP initiator. Mooncake's client offloads objects to the namespace
by passthrough ioctl; its master and its client run inside the guest.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from csd_link.driveset import DriveSetConfig
from csd_link.run_dir import pid_path
from csd_spec.optional import MissingExtraError
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.real import mooncake_guest
from vcsd.guest import GuestDecodeTest
from vcsd.guest_fabric import GuestWork, answer_over_fabric

MEMORY_BYTES = 2 << 30  # of the guest
BOOTS_S, BETWEEN_S = 40.0, 25.0  # from start until the guest uses the drive; between two kills
LIMIT_S = 3600.0


class RepeatedKiller:
    """Kills a drive's process a given number of times while it runs."""

    def __init__(self, kills: int) -> None:
        self.kills, self.done = kills, 0
        self._ended = threading.Event()

    def begin(self, names: Sequence[str]) -> None:
        """Kill the first of these drives from a thread."""
        threading.Thread(target=self._kill, args=(names[0],), daemon=True).start()

    def end(self) -> None:
        """Stop killing."""
        self._ended.set()

    def _kill(self, name: str) -> None:
        wait_s = BOOTS_S
        while self.done < self.kills and not self._ended.wait(wait_s):
            os.kill(int(pid_path(name).read_text()), signal.SIGKILL)
            self.done += 1
            wait_s = BETWEEN_S


def offload(objects: int, kills: int, seed: int, console: Path | None = None) -> dict[str, Any]:
    """Put, evict, remove and read objects of 1 KiB to 4 MiB.

    Returns:
        Counters of `mooncake_guest.exercise`, and the number of kills.

    Raises:
        ValueError: Mooncake is not installed.
    """
    result = find_spec("mooncake")
    if result is None or not result.submodule_search_locations:
        raise MissingExtraError("Mooncake's client", "mooncake", "mooncake")
    package = Path(next(iter(result.submodule_search_locations)))
    work = GuestWork(
        then=Path(mooncake_guest.__file__).stem,
        words={"objects": objects, "seed": seed},
        packages=[Path(mooncake_guest.__file__), package, *package.parent.glob("mooncake*.libs")],
        memory_bytes=MEMORY_BYTES,
    )
    killer = RepeatedKiller(kills)
    with tempfile.TemporaryDirectory(prefix="vcsd-mooncake-") as folder:
        drives = DriveSetConfig(count=1, spec=INSTCSD_ZYNQ7045_8CH, data_dir=Path(folder) / "drive")
        run = GuestDecodeTest(drives=drives, prompt=0, tokens=0, timeout_s=LIMIT_S, console=console)
        try:
            answer, accelerator = answer_over_fabric(run, work, killer.begin)
        finally:
            killer.end()
    counted = {key: value for key, value in answer.items() if key != "discovered"}
    release = version("mooncake-transfer-engine-non-cuda")
    return counted | {"kills": killer.done, "accelerator": accelerator, "mooncake": release, "seed": seed}
