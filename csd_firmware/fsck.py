"""What is wrong with a drive's folder, and mending what can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csd_firmware.folder import DESCRIPTION, SECRET, Hold, mend_secret, read_description, read_secret, sealed
from csd_io.folder import DiskFolder, Folder
from csd_io.keeping import UndoLogFolder
from csd_spec import DriveSpec
from ftl import Ftl, Nand
from ftl.flash.files import FOOTER_BYTES, older_files, read_generations, sizes, write_generation
from ftl.flash.upgrade import is_old, upgrade


@dataclass(slots=True)
class Report:
    """What was found: where, what, and what became of it. kept: the folder with what was there before."""

    findings: list[dict[str, str]] = field(default_factory=list)
    kept: str | None = None
    lost: int = 0  # findings that stand for data that is gone

    def add(self, where: str, what: str, action: str, lost: bool = False) -> None:
        """One finding."""
        self.findings.append({"where": where, "what": what, "action": action})
        self.lost += lost

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"clean": not self.findings, "lost": self.lost, "findings": self.findings, "kept": self.kept}


def fsck(path: Path, dry_run: bool, spec: DriveSpec | None = None) -> Report:
    """Check a folder that no process has open, and mend it unless it is a dry run.

    spec: what drive it holds, should its description be lost. Raises ValueError where that is not known, or another
    process has the folder.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    if spec is None and not (path / DESCRIPTION).exists():
        raise ValueError(f"no drive in {path}: where its {DESCRIPTION} is lost, say what drive it was (--drive FILE)")
    report, mended = Report(), "would be mended" if dry_run else "mended"
    with _changing(path, dry_run) as folder:
        spec = _check_description(path, folder, report, mended, spec)
        _check_secret(path, folder, report, mended)
        if folder is None and is_old(DiskFolder(path, writable=False)):
            report.add("flash", "files of format 1", "would be brought up to date")
            return report
        if folder:
            _check_files(folder, spec, report)
        opened = folder or DiskFolder(path, writable=False)
        if _check_generations(opened, spec, report, dry_run) or folder:
            _check_flash(opened, spec, report, mended)
        if folder and folder.changed:
            report.kept = str(_kept_in(path, -1))
    return report


@contextmanager
def _changing(path: Path, dry_run: bool) -> Iterator[UndoLogFolder | None]:
    """The folder, held, for who changes it; None for who does not."""
    held = Hold(path, shared=dry_run)
    disk, kept = DiskFolder(path, "host"), DiskFolder(_kept_in(path, 0), "host")
    try:
        yield None if dry_run else UndoLogFolder(disk, kept)
    finally:
        disk.close()
        kept.close()
        held.close()


def _kept_in(path: Path, which: int) -> Path:
    """Where the bytes of a run are kept: of the next one, or with -1 of the last."""
    number = sum(1 for each in path.iterdir() if each.name.startswith("fsck-"))
    return path / f"fsck-{number + 1 + which}"


def _check_description(
    path: Path, folder: UndoLogFolder | None, report: Report, mended: str, asked: DriveSpec | None
) -> DriveSpec:
    try:
        spec, whole = read_description(path)
    except ValueError as error:
        if asked is None:
            raise ValueError(f"{error}: say what drive it was (--drive FILE)") from error
        spec, whole = asked, False
    if not whole:
        old = is_old(DiskFolder(path, writable=False))
        report.add(DESCRIPTION, "of format 1" if old else "does not match its checksum", mended)
        if folder:
            folder.put(DESCRIPTION, sealed(spec))
    return spec


def _check_secret(path: Path, folder: UndoLogFolder | None, report: Report, mended: str) -> None:
    if not (path / SECRET).exists():
        return
    try:
        if read_secret(DiskFolder(path, writable=False))[1]:
            return
        report.add(SECRET, "a bit was wrong", mended)
        if folder:
            mend_secret(folder)
    except ValueError:
        report.add(SECRET, "cannot be read: handles that hosts have are void", "a new one is drawn", lost=True)
        if folder:
            folder.remove(SECRET)


def _check_files(folder: UndoLogFolder, spec: DriveSpec, report: Report) -> None:
    """Old files become new ones; those that are missing or of another size get theirs."""
    if is_old(folder):
        upgrade(DiskFolder(Path(folder.name), "host"), spec.geometry)  # removes nothing before all of it is new
        report.add("flash", "files of format 1", "brought up to date")
    have = folder.sizes()
    for name, size in sizes(spec.geometry).items():
        if have.get(name) not in (size, size - FOOTER_BYTES):
            what = "is missing" if name not in have else f"has {have[name]:,} bytes instead of {size:,}"
            report.add(name, what, "zeros stand where nothing is left", lost=True)
            folder.resize(name, size)
        elif have[name] < size:  # an earlier version wrote no footers
            folder.resize(name, size)


def _check_generations(folder: Folder, spec: DriveSpec, report: Report, dry_run: bool) -> bool:
    """Whether all files belong together; if they are to be repaired, they do so afterwards."""
    have, wanted = folder.sizes(), sizes(spec.geometry)
    whole = {name: size for name, size in wanted.items() if have.get(name) in (size, size - FOOTER_BYTES)}
    files = {name: (folder.open(name, size), size) for name, size in whole.items()}
    generations = read_generations({name: file for name, (file, _) in files.items()}, spec.geometry)
    older = older_files(generations)
    reported = {each["where"] for each in report.findings}
    for name, what in older.items() if not older.keys() <= reported else ():
        report.add(name, what, "would be taken as it is" if dry_run else "taken as it is", lost=True)
    for file, size in files.values() if older and not dry_run else ():
        write_generation(file, size, max(each for each in generations.values() if each is not None))
    return not older


def _check_flash(folder: Folder, spec: DriveSpec, report: Report, mended: str) -> None:
    """Open the drive: what it corrects, what it misses. What is lost is then recorded, so that it is found once."""
    dry_run = not isinstance(folder, UndoLogFolder)
    nand = Nand(spec.geometry, folder=folder, private=dry_run)
    nand.damage.files += [each["where"] for each in report.findings if each["where"] in sizes(spec.geometry)]
    ftl = Ftl(spec, nand)
    if nand.damage.corrected:
        report.add("flash", f"{nand.damage.corrected} pages, spare areas or blocks had a wrong bit", mended)
    for finding in (each for each in ftl.findings if dry_run or each not in nand.damage.files):
        where, _, what = finding.rpartition(": ") if ": " in finding else ("flash", "", finding)
        report.add(where, what, "lost", lost=True)
    if ftl.findings and not dry_run:
        ftl.store.garbage = ftl.placement.erasable_blocks()  # what shows the losses may go: they are reported
        ftl.journal.record(0, everything=True)
        nand.sync()
