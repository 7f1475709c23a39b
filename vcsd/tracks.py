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
    for piece in sorted(track, key=lambda piece: (piece.begin_ns, piece.end_ns)):
        if last and piece.name == last.name and piece.begin_ns - last.end_ns <= gap_ns:
            end_ns = max(last.end_ns, piece.end_ns)
            last = last._replace(end_ns=end_ns, pages=last.pages + piece.pages, nbytes=last.nbytes + piece.nbytes)
            continue
        if last:
            yield last
        begin_ns = max(piece.begin_ns, last.end_ns) if last else piece.begin_ns
        last = piece._replace(begin_ns=begin_ns, end_ns=max(piece.end_ns, begin_ns))
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
    bounded = {name: _bounded(tracks, MAX_EVENTS / max(1, whole), merged) for name, tracks in processes.items()}
    told = more | {"slices": count_slices(bounded), "merged_slices": whole - count_slices(bounded)}
    path.write_text(json.dumps({"traceEvents": list(_events_of(bounded)), "displayTimeUnit": "ns", "otherData": told}))
    return told


def _bounded(tracks: Tracks, share: float, merged: tuple[str, ...]) -> Tracks:
    """Tracks with about `share` of their slices."""
    if share >= 1:
        return tracks
    shortened = dict(tracks)
    for name, track in tracks.items():
        gap_ns, most = 1_000, max(64, int(share * len(track)))
        while name.startswith(merged) and len(shortened[name]) > most and gap_ns < 1 << 40:
            shortened[name], gap_ns = list(joined(track, gap_ns)), 4 * gap_ns
    return shortened


def _events_of(processes: dict[str, Tracks]) -> Iterator[dict[str, Any]]:
    """Events of the trace format; times are in us with three decimals, thus exact to the nanosecond."""
    for pid, (process, tracks) in enumerate(processes.items()):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, (name, track) in enumerate(tracks.items()):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for piece in track:
                sizes = {"pages": piece.pages, "bytes": piece.nbytes} if piece.pages or piece.nbytes else {}
                yield {
                    "ph": "X",
                    "name": piece.name,
                    "pid": pid,
                    "tid": tid,
                    "ts": piece.begin_ns / 1e3,
                    "dur": (piece.end_ns - piece.begin_ns) / 1e3,
                    "args": sizes | (piece.details or {}),
                }
