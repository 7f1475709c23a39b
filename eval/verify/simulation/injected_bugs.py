"""Bugs that can be planted, to see that the simulation finds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from csd_firmware.fused import FusedStep
from csd_link.wire import encode_completion
from csd_spec import Attend
from ftl.kv.owners import Owners
from ftl.recovery import STEPS, Recovery

Plant = Callable[[], AbstractContextManager[Any]]


def lock_left_out() -> AbstractContextManager[Any]:
    """Two servers may open one folder."""
    return patch("csd_firmware.folder.fcntl.flock")


def record_not_chained() -> AbstractContextManager[Any]:
    """A record that is missing is passed over."""
    return patch.object(Recovery, "_mark_record_lost")


def generation_not_checked() -> AbstractContextManager[Any]:
    """Blocks of an earlier life of either end are taken for those of this one."""
    both = ExitStack()
    for end in ("host_end", "drive_end"):
        both.enter_context(patch(f"csd_link.{end}.next_generation", lambda *used: 1))
    return both


def owner_reused() -> AbstractContextManager[Any]:
    """A sequence goes on under its owner after a crop, and after a loss of power."""
    original = Owners.new

    def new(self: Owners, handle: int, writes: int) -> int:
        own = [owner for owner, sharers in self.sharers.items() if sharers == {handle}]
        return own[-1] if own else original(self, handle, writes)

    return patch.object(Owners, "new", new)


def completion_cut() -> AbstractContextManager[Any]:
    """The last bytes of a completion's data are left out."""

    def cut(done: Any, crc: Callable[[bytes], int]) -> tuple[bytes, bytes]:
        head, data = encode_completion(done, crc)
        return head, data[:-2]

    return patch("csd_link.drive_end.encode_completion", cut)


def names_forgotten() -> AbstractContextManager[Any]:
    """After a loss of power no key leads to a sequence."""

    def forget(recovery: Recovery) -> None:
        for seq in recovery.kv.sequences.values():
            recovery.kv.names.unbind(seq.label, list(seq.names))

    return patch("ftl.recovery.STEPS", (*STEPS, forget))


def fused_not_recorded() -> AbstractContextManager[Any]:
    """The journal does not record a decode step that is one compiled call."""
    original = FusedStep.run

    def run(self: FusedStep, state: Any, command: Attend) -> Any:
        dirty = state.ftl.kv.changes.dirty
        before = set(dirty)
        data = original(self, state, command)
        dirty.intersection_update(before)
        return data

    return patch.object(FusedStep, "run", run)


PLANTS: dict[str, Plant] = {
    "lock": lock_left_out,
    "chain": record_not_chained,
    "generation": generation_not_checked,
    "owner": owner_reused,
    "completion": completion_cut,
    "names": names_forgotten,
    "fused": fused_not_recorded,
}
