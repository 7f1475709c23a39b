"""Configuration file of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from csd_link.fleet_table import MAX_DRIVES, FleetPlan
from csd_link.hosting import HostingOptions
from csd_spec.checked import frozen_value
from nvmevirt_config.document import read_yaml
from nvmevirt_config.serve_config import NameOrDescription, resolve_spec


@frozen_value
class FleetFile(HostingOptions):
    """A fleet. Paths of descriptions are relative to the file; `flash` is a path on each node.

    Attributes:
        drives: Number of drives that hosts use.
        spares: Number of additional drives, which replace lost ones.
        drive: Preset, description file, or a description.
        flash: Folder for flash on each node's own disk (default: the run folder, in memory).
        address: HOST:PORT of the Ray cluster's GCS (default: `RAY_ADDRESS`, then a cluster on this machine).
        cpus: CPUs that Ray reserves per drive.
    """

    drives: Annotated[int, Field(ge=1, le=MAX_DRIVES)]
    spares: Annotated[int, Field(ge=0, le=MAX_DRIVES)] = 0
    drive: NameOrDescription | None = None
    flash: Path | None = None
    address: str = ""
    cpus: Annotated[float, Field(gt=0, le=1024)] = FleetPlan(drives=1).cpus

    def plan(self, folder: Path) -> FleetPlan:
        """Convert to a plan; paths of descriptions are relative to `folder`."""
        if self.flash and not self.flash.is_absolute():
            raise ValueError(f"flash: {str(self.flash)!r}: must be an absolute path, which each node has")
        return FleetPlan(
            drives=self.drives,
            spares=self.spares,
            spec=resolve_spec(self.drive, folder),
            flash=self.flash,
            cpus=self.cpus,
            address=self.address,
            **self.overrides,
        )


def load_fleet(path: Path) -> FleetPlan:
    """Load a fleet from YAML; raises ValueError with the file and the invalid field."""
    file = read_yaml(path, FleetFile)
    try:
        return file.plan(path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
