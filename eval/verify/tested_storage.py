"""Storage of the drives under test: in memory, or in files that a medium reads."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from csd_io import medium
from csd_io.folder import DiskFolder
from csd_io.medium import Kind, Medium
from csd_spec import Geometry
from ftl import Nand
from ftl.flash.files import BLOCK, NandFiles, data_sizes, entry
from vcsd_eval.verify.simulation.disk import MirroredDisk, SimDisk

CACHE_BYTES = 4 * medium.BLOCK  # few, so that pages are evicted and reloaded


class Place:
    """Disks, and arrays opened on the remains of a power cut; each is discarded after its block."""

    def __init__(self, kind: Kind, geometry: Geometry, scratch: Path) -> None:
        self.geometry, self._scratch = geometry, scratch
        self.medium = Medium(kind, CACHE_BYTES)
        self.in_files = kind != "memory"
        self._last = ExitStack()

    def array(self) -> Nand:
        """Create an array that was never written to; the previous one is discarded."""
        self.close()
        if not self.in_files:
            return Nand(self.geometry)
        folder = DiskFolder(self._fresh("array"))
        NandFiles.make(folder, self.geometry)
        self._last.callback(folder.close)
        nand = Nand(self.geometry, folder=folder, medium=self.medium)
        self._last.callback(nand.page_store.close)
        return nand

    def close(self) -> None:
        """Discard the last array."""
        self._last.close()

    @contextmanager
    def disk(self, draw: random.Random) -> Iterator[SimDisk]:
        """A disk that may lose power, with the files of an array that was never written to."""
        disk = MirroredDisk(DiskFolder(self._fresh("drive")), "host", draw) if self.in_files else None
        plain = disk or SimDisk("crash", "host", draw)
        NandFiles.make(plain, self.geometry)
        try:
            yield plain
        finally:
            if disk:
                disk.close()

    @contextmanager
    def life(self, disk: SimDisk) -> Iterator[Nand]:
        """Open the array on a disk until its process exits."""
        nand = Nand(self.geometry, folder=disk, medium=self.medium)
        try:
            yield nand
        finally:
            nand.page_store.close()

    @contextmanager
    def after(self, disk: SimDisk) -> Iterator[Nand]:
        """Array that power-on finds on a disk; the disk is not changed."""
        if not self.in_files:
            yield Nand(self.geometry, folder=disk, private=True)
            return
        copy = self._fresh("copy")
        shutil.copytree(disk.name, copy, dirs_exist_ok=True)
        with self._opened(copy) as nand:
            yield nand

    @contextmanager
    def powered(self, image: Nand, torn: list[int]) -> Iterator[Nand]:
        """Array that power-on finds in the pages of an array in memory.

        torn: pages whose program was in flight; the copies of their spare areas are written last and are missing.
        """
        if not self.in_files:
            image.power_on()
            yield image
            return
        copies = image.spare.copy()
        copies[torn] = 0
        counts = zip(image.erase_count.tolist(), image.bad.tolist(), strict=True)
        blocks = b"".join(entry(*count).tobytes() if any(count) else bytes(BLOCK.itemsize) for count in counts)
        contents = image.content.tobytes(), image.spare.tobytes(), copies.tobytes(), blocks
        copy = self._fresh("copy")
        with closing(DiskFolder(copy)) as folder:
            NandFiles.make(folder, self.geometry)
            for (name, size), content in zip(data_sizes(self.geometry).items(), contents, strict=True):
                folder.open(name, size).write(0, content)
        with self._opened(copy) as nand:
            yield nand

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Nand]:
        folder = DiskFolder(path)
        nand = Nand(self.geometry, folder=folder, medium=self.medium)
        try:
            yield nand
        finally:
            nand.page_store.close()
            folder.close()

    def _fresh(self, name: str) -> Path:
        path = self._scratch / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        return path


@contextmanager
def place(kind: Kind, geometry: Geometry) -> Iterator[Place]:
    """A place whose files are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="vcsd-") as scratch:
        chosen = Place(kind, geometry, Path(scratch))
        try:
            yield chosen
        finally:
            chosen.close()
