"""Models of flash time, by the name that `NandTiming.model` gives. One small file each, one line here."""

from ftl.flash.timing.calendar import FlashCalendar
from ftl.flash.timing.model import FlashTiming, Listener, Reading, TimingModel

TIMINGS: dict[str, TimingModel] = {"calendar": FlashCalendar}

__all__ = ["TIMINGS", "FlashTiming", "Listener", "Reading", "TimingModel"]
