"""What it runs on, as one value: how many drives of which kind, where they are, how they live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from csd_io.folder import DURABILITIES, Durability
from csd_io.medium import IN_MEMORY, Medium
from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSet:
    """count drives, each a `spec`.

    transport: the way to them as a user writes it, `inproc` or `window:PATH`; `csd_link.transports` has the table.
    keep: a folder in which drives that are made for this outlive it, one folder each; None is memory.
    restart: whether a drive with a process of its own is restarted when it dies.
    methods: a Python file with methods of attention for drives that are made for this (docs/methods.md).
    durability: what a flush to `keep` outlives: `process`, the drive's own; `host`, a power cut of this machine.
    medium: where pages are meanwhile: in memory, or in the files of `keep`, for drives in this process.
    """

    count: int = 1
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH
    transport: str = "inproc"
    keep: Path | None = None
    restart: bool = True
    methods: Path | None = None
    durability: Durability = "process"
    medium: Medium = IN_MEMORY

    def __post_init__(self) -> None:
        if self.durability not in DURABILITIES:
            raise ValueError(f"durability = {self.durability!r}: must be one of {', '.join(DURABILITIES)}")
        if self.medium.kind != "memory" and not (self.keep and self.kind == "inproc"):
            raise ValueError(f"medium = {self.medium.kind}: needs a folder to keep drives in, and transport inproc")
        if self.count < 1:
            raise ValueError(f"drives = {self.count}: at least 1 is needed")
        if self.methods and not self.methods.is_file():
            raise ValueError(f"{self.methods}: no such file of methods")

    @property
    def kind(self) -> str:
        """The transport's name."""
        return self.transport.partition(":")[0]

    @property
    def where(self) -> str:
        """What stands behind the transport's name."""
        return self.transport.partition(":")[2]

    @property
    def folders(self) -> list[Path | None]:
        """Where each drive's flash lies."""
        return [self.keep / f"drive{number}" if self.keep else None for number in range(self.count)]
