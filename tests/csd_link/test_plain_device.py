"""A served drive without recovery."""

from dataclasses import dataclass

from csd_link.host_end import DriveLostError
from csd_link.plain_device import PlainDrive

GONE = DriveLostError("gone")


@dataclass
class Served:
    """An attached drive; commands are noted."""

    restarts: bool = True
    lost: Exception | None = None
    name, spec, max_bytes = "a", None, 64
    closed: int = 0

    @property
    def identity(self):
        return self

    def close(self):
        self.closed += 1


def test_reconnected_drive_is_shared_by_all_groups():
    answers = [Served(lost=GONE), DriveLostError("not yet"), second := Served()]

    def connect():
        answer = answers.pop(0)
        if isinstance(answer, DriveLostError):
            raise answer
        return answer

    device = PlainDrive(connect)
    again = device.reconnect()
    assert again is device.reconnect()
    device.close()
    assert second.closed == 1


def test_drive_without_restart_is_not_waited_for():
    connects = []

    def connect():
        connects.append(1)
        return Served(restarts=False, lost=GONE)

    assert PlainDrive(connect).reconnect() is None
    assert len(connects) == 1


def test_running_drive_is_not_reconnected():
    first = Served()
    device = PlainDrive(lambda: first)
    assert device.reconnect() is None
    assert not first.closed
