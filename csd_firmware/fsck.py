"""Consistency check and repair of a drive's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from csd_firmware.folder import (
    DESCRIPTION,
    SECRET,
    FolderLock,
    encode_description,
    read_description,
    read_secret,
    repair_secret,
)
from csd_io.folder import DiskFolder, Folder
from csd_io.undo_log import UndoLogFolder
from csd_spec import DriveSpec
from ftl import Ftl, Nand
from ftl.flash.files import older_files, read_generations, sizes, write_generation


@dataclass(slots=True)
class CheckReport:
    """Findings of a check (location, problem, action); `kept` is the folder with overwritten bytes."""

    findings: list[dict[str, str]] = field(default_factory=list)
    kept: str | None = None
    lost: int = 0  # number of findings that mean lost data

    def add(self, where: str, what: str, action: str, lost: bool = False) -> None:
        """Add a finding."""
        self.findings.append({"where": where, "what": what, "action": action})
        self.lost += lost

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {"clean": not self.findings, "lost": self.lost, "findings": self.findings, "kept": self.kept}


def fsck(path: Path, dry_run: bool, spec: DriveSpec | None = None) -> CheckReport:
    """Check a folder that no process has open, and repair it unless it is a dry run.

    Args:
        path: Folder of the drive.
        dry_run: Report only.
        spec: Drive description, in case that of the folder is lost.

    Raises:
        ValueError: The description is unknown, or another process has the folder.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    if spec is None and not (path / DESCRIPTION).exists():
        raise ValueError(f"no drive in {path}: if its {DESCRIPTION} is lost, specify the drive (--drive-config FILE)")
    report, mended = CheckReport(), "would be repaired" if dry_run else "repaired"
    with _changing(path, dry_run) as folder:
        spec = _check_description(path, folder, report, mended, spec)
        _check_secret(path, folder, report, mended)
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
    """Lock the folder; yields it with an undo log for changes, or None for a dry run."""
    held = FolderLock(path, shared=dry_run)
    disk, undo = DiskFolder(path, "host"), DiskFolder(_kept_in(path, 0), "host")
    try:
        yield None if dry_run else UndoLogFolder(disk, undo)
    finally:
        disk.close()
        undo.close()
        held.close()


def _kept_in(path: Path, which: int) -> Path:
    """Folder for the overwritten bytes of the next run (0) or the last one (-1)."""
    number = sum(1 for entry in path.iterdir() if entry.name.startswith("fsck-"))
    return path / f"fsck-{number + 1 + which}"


def _check_description(
    path: Path, folder: UndoLogFolder | None, report: CheckReport, mended: str, requested: DriveSpec | None
) -> DriveSpec:
    try:
        spec, whole = read_description(path)
    except ValueError as error:
        if requested is None:
            raise ValueError(f"{error}: specify the drive (--drive-config FILE)") from error
        spec, whole = requested, False
    if not whole:
        report.add(DESCRIPTION, "does not match its checksum", mended)
        if folder:
            folder.put(DESCRIPTION, encode_description(spec))
    return spec


def _check_secret(path: Path, folder: UndoLogFolder | None, report: CheckReport, mended: str) -> None:
    if not (path / SECRET).exists():
        return
    try:
        if read_secret(DiskFolder(path, writable=False))[1]:
            return
        report.add(SECRET, "a bit was wrong", mended)
        if folder:
            repair_secret(folder)
    except (ValueError, OSError):
        report.add(SECRET, "cannot be read: handles that hosts have are void", "a new one is drawn", lost=True)
        if folder:
            folder.remove(SECRET)


def _check_files(folder: UndoLogFolder, spec: DriveSpec, report: CheckReport) -> None:
    """Fill missing or truncated files with zeros."""
    have = folder.sizes()
    for name, size in sizes(spec.geometry).items():
        if have.get(name) != size:
            what = "is missing" if name not in have else f"has {have[name]:,} bytes instead of {size:,}"
            report.add(name, what, "missing parts were filled with zeros", lost=True)
            folder.resize(name, size)


def _check_generations(folder: Folder, spec: DriveSpec, report: CheckReport, dry_run: bool) -> bool:
    """Whether all files belong together; a repair makes them so."""
    have, wanted = folder.sizes(), sizes(spec.geometry)
    whole = {name: size for name, size in wanted.items() if have.get(name) == size}
    files = {name: (folder.open(name, size), size) for name, size in whole.items()}
    generations = read_generations({name: file for name, (file, _) in files.items()}, spec.geometry)
    older = older_files(generations)
    reported = {finding["where"] for finding in report.findings}
    for name, what in older.items() if not older.keys() <= reported else ():
        report.add(name, what, "would be used unchanged" if dry_run else "used unchanged", lost=True)
    for file, size in files.values() if older and not dry_run else ():
        write_generation(file, size, max(generation for generation in generations.values() if generation is not None))
    return not older


def _check_flash(folder: Folder, spec: DriveSpec, report: CheckReport, mended: str) -> None:
    """Open the drive to correct and find errors; losses are journaled, so that they are reported only once."""
    dry_run = not isinstance(folder, UndoLogFolder)
    nand = Nand(spec.geometry, folder=folder, private=dry_run)
    nand.damage.files += [finding["where"] for finding in report.findings if finding["where"] in sizes(spec.geometry)]
    ftl = Ftl(spec, nand)
    if nand.damage.corrected:
        report.add("flash", f"{nand.damage.corrected} pages, spare areas or blocks had a wrong bit", mended)
    for finding in (finding for finding in ftl.findings if dry_run or finding not in nand.damage.files):
        where, _, what = finding.rpartition(": ") if ": " in finding else ("flash", "", finding)
        report.add(where, what, "lost", lost=True)
    for handle in (handle for handle, seq in ftl.sequences.items() if seq.kept):
        report.add("flash", f"sequence {handle}: its layout is not loaded", "left as it is")
    if ftl.findings and not dry_run:
        ftl.store.garbage = ftl.placement.erasable_blocks()  # evidence of losses may be erased: it is reported
        ftl.journal.record(0, everything=True)
        nand.sync()
