"""Configuration of a set of drives: number, description, transport, lifetime."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from csd_link.hosting import HostingOptions
from csd_spec import DriveSpec
from csd_spec.checked import Whole, frozen_value
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

TRANSPORTS = (  # `form` of each of csd_link.transports, which import this module
    "inproc, process, fuse, window:PATH, nvme:/dev/ngXnY, nvme+tcp, nvme+tcp://HOST:PORT, ray, ray://HOST:PORT"
)
RECOVERY_S = 20.0
MIN_CTRL_LOSS_S = 5.0


@frozen_value
class DriveOptions(HostingOptions):
    """Drives; how they are created or reached.

    The remaining fields, for drives created by this process, are those of `csd_link.hosting.HostingOptions`.

    Attributes:
        spec: Description of each created drive.
        recovery_s: Seconds to wait for the restart of a drive, for which rows are kept; 0 disables both.
    """

    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH
    transport: Annotated[str, Field(description=f"{TRANSPORTS}, or one of a plug-in (docs/drives.md)")] = "inproc"
    data_dir: Annotated[
        Path | None, Field(description="folder for the files of created drives, one subfolder each, which are kept")
    ] = None
    restart_drives: Annotated[bool, Field(description="restart a drive process that dies")] = True
    methods_file: Annotated[
        Path | None, Field(description="Python file with custom attention methods, for created drives")
    ] = None
    layouts_file: Annotated[
        Path | None, Field(description="Python file with custom KV layouts, for this process and created drives")
    ] = None
    recovery_s: float = RECOVERY_S

    def __post_init__(self) -> None:
        self._check(self.data_dir)
        for path, what in ((self.methods_file, "methods"), (self.layouts_file, "layouts")):
            if path and not path.is_file():
                raise ValueError(f"{path}: no such file of {what}")


@frozen_value
class DriveSetConfig(DriveOptions):
    """A set of `count` identical drives.

    Attributes:
        count: Number of drives.
        spares: Additional drives, which stay empty until they replace lost ones.
    """

    count: Annotated[Whole, Field(ge=1)] = 1
    spares: Annotated[Whole, Field(ge=0)] = 0

    @classmethod
    def of(cls, options: DriveOptions, **changes: Any) -> DriveSetConfig:
        """Drives with these options, but for `changes`. options: may have further fields, as a subclass does."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(DriveOptions)} | changes)

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
