"""Mutated PDUs find no defects in a controller, and find planted ones.

partner of: eval/verify/nvme_fuzz.py, eval/verify/nvme_mutants.py
"""

import time

import pytest

from csd_firmware.process.listen import SharedBlocks
from csd_link.nvmeof.controllers import Controllers
from csd_link.nvmeof.pdu import COMMON, IcResp, PduType, pack_ic
from csd_link.nvmeof.sequences import SequenceNamespace
from csd_link.nvmeof.stream import PduStream
from vcsd_eval.verify import nvme_fuzz
from vcsd_eval.verify.nvme_fuzz import bench_nvme_fuzz
from vcsd_eval.verify.nvme_mutants import STATES, statuses

CLEAN = {"crashes": 0, "hangs": 0, "leaks": 0, "state_changes": 0}
PLANTED = 8000  # PDUs; a few in a thousand find a planted defect


def run(pdus):
    result = bench_nvme_fuzz(pdus, 5, lambda _: None)
    return result, {key: result[key] for key in CLEAN}


def test_nvme_fuzz_finds_nothing_in_any_state():
    result, outcome = run(1500)
    assert outcome == CLEAN, result["notes"]
    assert result["successes"] > 20
    assert all(result[f"pdus_{state}"] > 50 for state in STATES)
    assert result["pdus"] >= 1500


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(nvme_fuzz, "SETTLE_S", 0.5)
    monkeypatch.setattr(nvme_fuzz, "HANG_S", 0.5)


@pytest.mark.usefixtures("impatient")
def test_unreleased_budget_is_a_leak(monkeypatch):
    monkeypatch.setattr(Controllers, "release_bytes", lambda self, owner, size: None)
    assert run(300)[1]["leaks"] > 0


@pytest.mark.usefixtures("impatient")
def test_remaining_controller_is_a_leak(monkeypatch):
    monkeypatch.setattr(Controllers, "disconnect", lambda self, controller, queue: None)
    result = run(600)[1]
    assert result["leaks"] > 0 and result["hangs"] > 0


@pytest.mark.usefixtures("impatient")
def test_unclosed_connection_is_a_hang(monkeypatch):
    close = PduStream.close

    def late(self):
        time.sleep(1.0)
        close(self)

    monkeypatch.setattr(PduStream, "close", late)
    assert run(4)[1]["hangs"] > 0


def test_exception_in_connection_is_a_crash(monkeypatch):
    def broken(self, sqe):
        raise IndexError("log")

    monkeypatch.setattr("csd_link.nvmeof.controller.Controller._log", broken)
    assert run(200)[1]["crashes"] > 0


def test_firmware_error_is_a_crash(monkeypatch):
    def broken(data):
        raise IndexError("entry")

    monkeypatch.setattr("csd_link.drive_end.decode", broken)
    with pytest.raises(ConnectionError, match="INTERNAL_ERROR"):  # the honest host cannot store anything either
        run(10)


def test_write_to_foreign_blocks_is_a_change(monkeypatch):
    write = SharedBlocks.write
    monkeypatch.setattr(SharedBlocks, "write", lambda self, offset, data: write(self, offset % 65536, data))
    assert run(PLANTED)[1]["state_changes"] > 0


def test_stolen_session_is_a_change(monkeypatch):
    def drop_oldest(self):
        while len(self) > 8:
            self._sessions.popitem(last=False)

    monkeypatch.setattr(SequenceNamespace, "_drop", drop_oldest)
    result, outcome = run(PLANTED)
    assert outcome["state_changes"] > 0, result


def test_invalid_controller_pdus_are_refused():
    good = pack_ic(IcResp())
    assert statuses(good + good[:20]) == []
    for bad in (bytes(8), COMMON.pack(PduType.CAPSULE_RESP, 0, 24, 0, 8)):
        with pytest.raises(ValueError, match="no PDU of a controller"):
            statuses(good + bad)
