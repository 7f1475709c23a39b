"""Drive firmware: checks commands, locates data through the FTL, and runs attention methods."""

from csd_firmware.inprocess import InProcessDevice
from csd_firmware.step import Firmware

__all__ = ["Firmware", "InProcessDevice"]
