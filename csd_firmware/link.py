"""Use of a drive's link in simulated time."""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter

_KEPT = 64
_end = itemgetter(1)


class LinkUse:
    """When one direction of the link is in use.

    A transfer takes the first gap that holds it. Requests are timed one after the other, from start to end, so a
    transfer in the future, after a long computation, must leave the link free for earlier ones.
    """

    def __init__(self) -> None:
        self._uses = list[tuple[int, int]]()  # begin and end of each time of use, ns, in order

    def end_ns(self, ready_ns: int, ns: int) -> int:
        """When a transfer of `ns` that is ready at `ready_ns` would end, ns."""
        return self._gap(ready_ns, ns)[1] + ns if ns else ready_ns

    def _gap(self, ready_ns: int, ns: int) -> tuple[int, int]:
        """Place of the first gap, and when the transfer begins in it, ns."""
        at, start_ns = bisect_left(self._uses, ready_ns, key=_end), ready_ns
        while at < len(self._uses) and start_ns + ns > self._uses[at][0]:
            start_ns = max(start_ns, self._uses[at][1])
            at += 1
        return at, start_ns

    def cross(self, ready_ns: int, ns: int) -> int:
        """Book a transfer of `ns` that is ready at `ready_ns`; returns its end, ns."""
        if not ns:
            return ready_ns
        at, start_ns = self._gap(ready_ns, ns)
        end_ns = start_ns + ns
        first = at - (at > 0 and self._uses[at - 1][1] == start_ns)
        last = at + (at < len(self._uses) and self._uses[at][0] == end_ns)
        begin_ns = self._uses[first][0] if first < at else start_ns
        until_ns = self._uses[at][1] if at < last else end_ns
        self._uses[first:last] = [(begin_ns, until_ns)]  # in one step: a drive that fails here must go on reading
        if len(self._uses) > _KEPT:  # the oldest time matters only to a host whose clock is far behind
            del self._uses[0]
        return end_ns
