"""Use of a drive's link in simulated time."""

from __future__ import annotations

from bisect import bisect_left

_KEPT = 64


class LinkUse:
    """When one direction of the link is in use.

    A transfer takes the first gap that holds it. Requests are timed one after the other, from start to end, so a
    transfer in the future, after a long computation, must leave the link free for earlier ones.
    """

    def __init__(self) -> None:
        self._begins, self._ends = list[int](), list[int]()  # of each time of use, in order

    def end_ns(self, ready_ns: int, ns: int) -> int:
        """When a transfer of `ns` that is ready at `ready_ns` would end, ns."""
        return self._gap(ready_ns, ns)[1] + ns if ns else ready_ns

    def _gap(self, ready_ns: int, ns: int) -> tuple[int, int]:
        """Place of the first gap, and when the transfer begins in it, ns."""
        at, start_ns = bisect_left(self._ends, ready_ns), ready_ns
        while at < len(self._begins) and start_ns + ns > self._begins[at]:
            start_ns = max(start_ns, self._ends[at])
            at += 1
        return at, start_ns

    def cross(self, ready_ns: int, ns: int) -> int:
        """Book a transfer of `ns` that is ready at `ready_ns`; returns its end, ns."""
        if not ns:
            return ready_ns
        begins, ends = self._begins, self._ends
        at, start_ns = self._gap(ready_ns, ns)
        end_ns = start_ns + ns
        after, before = at > 0 and ends[at - 1] == start_ns, at < len(begins) and begins[at] == end_ns
        if after and before:
            del ends[at - 1], begins[at]
        elif after:
            ends[at - 1] = end_ns
        elif before:
            begins[at] = start_ns
        else:
            begins.insert(at, start_ns)
            ends.insert(at, end_ns)
            if len(begins) > _KEPT:  # the oldest time matters only to a host whose clock is far behind
                del begins[0], ends[0]
        return end_ns
