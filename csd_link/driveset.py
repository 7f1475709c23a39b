"""What it runs on, as one value: how many drives of which kind, where they are, how they live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from csd_link.hosted import Hosted
from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

RECOVERY_S = 20.0
MIN_CTRL_LOSS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSet(Hosted):
    """count drives, each a `spec`.

    transport: the way to them as a user writes it, `inproc` or `window:PATH`; `csd_link.transports` has the table.
    keep: a folder in which drives that are made for this outlive it, one folder each; None is memory.
    restart: whether a drive with a process of its own is restarted when it dies.
    spares: drives in addition to `count`, which are empty until they replace lost ones.
    recovery_s: seconds that a host waits for a drive that has died, for which it keeps rows; 0: it does neither.
    methods: a Python file with methods of attention for drives that are made for this (docs/methods.md).
    layouts: a Python file with layouts of K and V for drives that are made for this (docs/layouts.md); the host that
    makes them loads it too (`csd_spec.load_layouts`).
    The other fields, of drives that are made for this: `csd_link.hosted.Hosted`.
    """

    count: int = 1
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH
    transport: str = "inproc"
    keep: Path | None = None
    restart: bool = True
    spares: int = 0
    recovery_s: float = RECOVERY_S
    methods: Path | None = None
    layouts: Path | None = None

    def __post_init__(self) -> None:
        self._check(self.keep)
        if self.count < 1:
            raise ValueError(f"drives = {self.count}: at least 1 is needed")
        if self.spares < 0:
            raise ValueError(f"spares = {self.spares}: must be at least 0")
        for path, what in ((self.methods, "methods"), (self.layouts, "layouts")):
            if path and not path.is_file():
                raise ValueError(f"{path}: no such file of {what}")

    @property
    def kind(self) -> str:
        """The transport's name."""
        return self.transport.partition(":")[0]

    @property
    def where(self) -> str:
        """What stands behind the transport's name."""
        return self.transport.partition(":")[2]

    @property
    def ctrl_loss_s(self) -> float:
        """Seconds for which a lost NVMe/TCP connection is tried to be made again."""
        return max(MIN_CTRL_LOSS_S, 3 * self.recovery_s)

    @property
    def total(self) -> int:
        """Number of drives, spares included."""
        return self.count + self.spares

    @property
    def folders(self) -> list[Path | None]:
        """Where each drive's flash lies."""
        return [self.keep / f"drive{number}" if self.keep else None for number in range(self.total)]
