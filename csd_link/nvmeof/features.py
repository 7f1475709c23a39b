"""Features of a controller: Get Features and Set Features (NVMe Base Specification 2.0, section 5.27)."""

from __future__ import annotations

from enum import IntEnum

from csd_link.nvmeof.commands import Answer, Code, CommandError, Sqe


class Feature(IntEnum):
    """Feature identifiers."""

    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    VOLATILE_WRITE_CACHE = 0x06
    NUMBER_OF_QUEUES = 0x07
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENTS = 0x0B
    KEEP_ALIVE_TIMER = 0x0F
    COMMAND_SET_PROFILE = 0x19
    KEY_VALUE_CONFIGURATION = 0x20
    HOST_IDENTIFIER = 0x81


_DELETE_OF_NO_KEY_FAILS = 1 << 0
_FIXED = {
    Feature.VOLATILE_WRITE_CACHE: 1,
    Feature.POWER_MANAGEMENT: 0,
    Feature.COMMAND_SET_PROFILE: 0,
    Feature.KEY_VALUE_CONFIGURATION: _DELETE_OF_NO_KEY_FAILS,
}
_FREE = (
    Feature.ARBITRATION,
    Feature.TEMPERATURE_THRESHOLD,
    Feature.ERROR_RECOVERY,
    Feature.WRITE_ATOMICITY,
    Feature.ASYNC_EVENTS,
    Feature.KEEP_ALIVE_TIMER,
)
_SAVE = 1 << 31
_CURRENT, _DEFAULT, _SAVED, _CAPABILITIES = range(4)
_CHANGEABLE = 1 << 2
_MAX_QUEUES_ASKED = 0xFFFE


class Features:
    """Values of one controller; they are not saved across a reset."""

    def __init__(self, io_queues: int, host_identifier: bytes) -> None:
        """`io_queues` is the maximum number of I/O queues; `host_identifier` has 16 bytes."""
        self._queues = (io_queues - 1) * 0x10001  # submission and completion queues, 0's based
        self._host = host_identifier
        self._values = dict.fromkeys(_FREE, 0)

    @property
    def keep_alive_ms(self) -> int:
        """Keep-alive timeout, ms; 0 disables it."""
        return self._values[Feature.KEEP_ALIVE_TIMER]

    @keep_alive_ms.setter
    def keep_alive_ms(self, value: int) -> None:
        self._values[Feature.KEEP_ALIVE_TIMER] = value

    @property
    def events(self) -> int:
        """Events that the host has enabled, as bits."""
        return self._values[Feature.ASYNC_EVENTS]

    def get(self, sqe: Sqe) -> Answer:
        """Get Features; raises CommandError."""
        feature, select = sqe.cdw10 & 0xFF, sqe.cdw10 >> 8 & 7
        if select > _CAPABILITIES or not self._is_known(feature):
            raise CommandError(Code.INVALID_FIELD)
        if select == _CAPABILITIES:
            changeable = feature in _FREE or feature == Feature.NUMBER_OF_QUEUES
            return Answer(result=_CHANGEABLE * changeable)
        if feature == Feature.HOST_IDENTIFIER:
            return Answer((self._host,))
        if feature == Feature.NUMBER_OF_QUEUES:
            return Answer(result=self._queues)
        if feature in _FIXED:
            return Answer(result=_FIXED[Feature(feature)])
        return Answer(result=self._values[Feature(feature)] if select == _CURRENT else 0)

    def set(self, sqe: Sqe) -> Answer:
        """Set Features; raises CommandError."""
        feature = sqe.cdw10 & 0xFF
        if sqe.cdw10 & _SAVE:
            raise CommandError(Code.NOT_SAVEABLE)
        if not self._is_known(feature):
            raise CommandError(Code.INVALID_FIELD)
        if feature == Feature.NUMBER_OF_QUEUES:
            queues = sqe.cdw11 & 0xFFFF, sqe.cdw11 >> 16
            if max(queues) > _MAX_QUEUES_ASKED:
                raise CommandError(Code.INVALID_FIELD)
            return Answer(result=self._queues)
        if feature not in _FREE and _FIXED.get(Feature(feature)) != sqe.cdw11:
            raise CommandError(Code.NOT_CHANGEABLE)
        if feature in _FREE:
            self._values[Feature(feature)] = sqe.cdw11
        return Answer()

    @staticmethod
    def _is_known(feature: int) -> bool:
        return feature in Feature.__members__.values()
