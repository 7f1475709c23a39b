"""Models of flash time, by the name in `NandTiming.model`. To add one: a module here, and an entry in TIMINGS."""

from ftl.flash.timing.calendar import FlashCalendar
from ftl.flash.timing.model import FlashOperation, FlashTiming, Listener, Reading, TimingModel

TIMINGS: dict[str, TimingModel] = {"calendar": FlashCalendar}

__all__ = ["TIMINGS", "FlashOperation", "FlashTiming", "Listener", "Reading", "TimingModel"]
