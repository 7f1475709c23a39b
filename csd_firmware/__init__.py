"""The drive's firmware: checks commands, asks attention what is needed and the FTL where it lies, attends."""

from csd_firmware.inprocess import InProcessDevice
from csd_firmware.step import Firmware

__all__ = ["Firmware", "InProcessDevice"]
