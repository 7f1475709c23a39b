"""Tracks of a timeline: slices of simulated time, their merging, and their events in the trace format of Chrome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_EVENTS = 80_000  # of a file, about 15 MiB; neighbouring slices are merged beyond it


class Slice(NamedTuple):
    """A slice of a track.

    Attributes:
        name: What happens.
        begin_ns, end_ns: Simulated time since the begin of the timeline.
        pages: Pages that it stands for; 0: none.
        nbytes: Bytes that it moves.
        details: More values to show.
    """

    name: str
    begin_ns: int
    end_ns: int
    pages: int = 0
    nbytes: int = 0
    details: dict[str, Any] | None = None


Tracks = dict[str, list[Slice]]  # slices by name of the track; those of one track do not overlap, or are nested


def joined(track: list[Slice], gap_ns: int = 0) -> Iterator[Slice]:
    """Slices of a track in order; those of one kind that overlap, touch, or are `gap_ns` apart become one."""
    last: Slice | None = None
    for each in sorted(track, key=lambda each: (each.begin_ns, each.end_ns)):
        if last and each.name == last.name and each.begin_ns - last.end_ns <= gap_ns:
            end_ns = max(last.end_ns, each.end_ns)
            last = last._replace(end_ns=end_ns, pages=last.pages + each.pages, nbytes=last.nbytes + each.nbytes)
            continue
        if last:
            yield last
        begin_ns = max(each.begin_ns, last.end_ns) if last else each.begin_ns
        last = each._replace(begin_ns=begin_ns, end_ns=max(each.end_ns, begin_ns))
    if last:
        yield last


def count_slices(processes: Mapping[str, Tracks]) -> int:
    """Number of slices of all tracks."""
    return sum(len(track) for tracks in processes.values() for track in tracks.values())


def write_trace(
    path: Path, processes: dict[str, Tracks], merged: tuple[str, ...], more: dict[str, Any]
) -> dict[str, Any]:
    """Write a trace for Perfetto of bounded size.

    Args:
        path: The file.
        processes: Tracks by process.
        merged: Beginnings of names of the tracks whose neighbouring slices may become one.
        more: Further values of the file's description.

    Returns:
        The description: `more`, the number of slices, and how many of them were merged.
    """
    whole = count_slices(processes)
    kept = {name: _bounded(tracks, MAX_EVENTS / max(1, whole), merged) for name, tracks in processes.items()}
    told = more | {"slices": count_slices(kept), "merged_slices": whole - count_slices(kept)}
    path.write_text(json.dumps({"traceEvents": list(_events_of(kept)), "displayTimeUnit": "ns", "otherData": told}))
    return told


def _bounded(tracks: Tracks, share: float, merged: tuple[str, ...]) -> Tracks:
    """Tracks with about `share` of their slices."""
    if share >= 1:
        return tracks
    found = dict(tracks)
    for name, track in tracks.items():
        gap_ns, most = 1_000, max(64, int(share * len(track)))
        while name.startswith(merged) and len(found[name]) > most and gap_ns < 1 << 40:
            found[name], gap_ns = list(joined(track, gap_ns)), 4 * gap_ns
    return found


def _events_of(processes: dict[str, Tracks]) -> Iterator[dict[str, Any]]:
    """Events of the trace format; times are in us with three decimals, thus exact to the nanosecond."""
    for pid, (process, tracks) in enumerate(processes.items()):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, (name, track) in enumerate(tracks.items()):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for each in track:
                sizes = {"pages": each.pages, "bytes": each.nbytes} if each.pages or each.nbytes else {}
                yield {
                    "ph": "X",
                    "name": each.name,
                    "pid": pid,
                    "tid": tid,
                    "ts": each.begin_ns / 1e3,
                    "dur": (each.end_ns - each.begin_ns) / 1e3,
                    "args": sizes | (each.details or {}),
                }
