"""Drive firmware: checks commands, locates data through the FTL, and runs attention methods."""

from csd_firmware.inprocess import InProcessDrive
from csd_firmware.step import Firmware

__all__ = ["Firmware", "InProcessDrive"]
