"""Configuration of a set of drives: number, description, transport, lifetime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from csd_link.hosting import HostingOptions
from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

RECOVERY_S = 20.0
MIN_CTRL_LOSS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSetConfig(HostingOptions):
    """A set of `count` identical drives.

    The remaining fields, for drives created by this process, are those of `csd_link.hosting.HostingOptions`.

    Attributes:
        count: Number of drives.
        spec: Description of each drive.
        transport: Transport as in the command line, `inproc` or `window:PATH`; see `csd_link.transports`.
        data_dir: Folder that keeps created drives, one subfolder each; None keeps them in memory.
        restart_drives: Whether a drive with its own process is restarted when it dies.
        spares: Additional drives, which stay empty until they replace lost ones.
        recovery_s: Seconds to wait for the restart of a drive, for which rows are kept; 0 disables both.
        methods_file: Python file with attention methods for created drives (docs/methods.md).
        layouts_file: Python file with KV layouts for created drives (docs/layouts.md); the host loads it, too
            (`csd_spec.load_layouts`).
    """

    count: int = 1
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH
    transport: str = "inproc"
    data_dir: Path | None = None
    restart_drives: bool = True
    spares: int = 0
    recovery_s: float = RECOVERY_S
    methods_file: Path | None = None
    layouts_file: Path | None = None

    def __post_init__(self) -> None:
        self._check(self.data_dir)
        if self.count < 1:
            raise ValueError(f"drives = {self.count}: must be at least 1")
        if self.spares < 0:
            raise ValueError(f"spares = {self.spares}: must be at least 0")
        for path, what in ((self.methods_file, "methods"), (self.layouts_file, "layouts")):
            if path and not path.is_file():
                raise ValueError(f"{path}: no such file of {what}")

    @property
    def kind(self) -> str:
        """Name of the transport."""
        return self.transport.partition(":")[0]

    @property
    def where(self) -> str:
        """Part of `transport` after the name and colon."""
        return self.transport.partition(":")[2]

    @property
    def ctrl_loss_s(self) -> float:
        """Time for which a lost NVMe/TCP connection is retried, seconds."""
        return max(MIN_CTRL_LOSS_S, 3 * self.recovery_s)

    @property
    def total(self) -> int:
        """Number of drives, spares included."""
        return self.count + self.spares

    @property
    def folders(self) -> list[Path | None]:
        """Folder of each drive's flash; None in memory."""
        return [self.data_dir / f"drive{number}" if self.data_dir else None for number in range(self.total)]
