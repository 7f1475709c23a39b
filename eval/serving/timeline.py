"""Timeline of a policy on a trace: what device, drives and copies do in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kv_cache.event_timer import EventTimer
from vcsd.tracks import Slice, Tracks, write_trace

ALONE = {"compute": "device", "drives": "drives"}  # track of activities that do not overlap


class PolicyTimeline:
    """Collects the activities of an engine's iterations."""

    def __init__(self, events: EventTimer) -> None:
        self._spans: list[tuple[str, int, float, float, int]] = []
        events.transfers.tracer = lambda *span: self._spans.append(span)

    def tracks(self) -> Tracks:
        """Slices by track: device with its waits, drives, and as many tracks per route as it has copies at a time."""
        tracks: Tracks = {"device": []}
        ends: dict[str, list[int]] = {}
        for activity, layer, began, ended, nbytes in sorted(self._spans, key=lambda span: span[2:4]):
            begin_ns, end_ns = round(began), round(ended)
            name = "device" if activity.startswith("wait ") else ALONE.get(activity)
            if name is None:
                lanes = ends.setdefault(activity, [])
                lane = next((number for number, last in enumerate(lanes) if last <= begin_ns), len(lanes))
                lanes[lane : lane + 1] = [end_ns]
                name, activity = f"copy {activity}, {lane}", "copy"
            slice_ = Slice(activity, begin_ns, end_ns, nbytes=nbytes, details={"layer": layer})
            tracks.setdefault(name, []).append(slice_)
        return tracks

    def write(self, path: Path) -> dict[str, Any]:
        """Write a trace for Perfetto; returns the number of slices, and how many were merged."""
        return write_trace(path, {"host": self.tracks()}, ("copy", "device", "drives"), {})
