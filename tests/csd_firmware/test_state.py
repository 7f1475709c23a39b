"""Sums of V survive with their sequences, and equal sums that are recomputed from the rows."""

import numpy as np
import pytest

from attention_engine import METHODS
from csd_firmware.state import DriveState
from csd_firmware.step import Firmware
from csd_spec import Attend, Flush, KvAppend, KvCrop, KvFree, SeqCreate, Status
from ftl import Ftl, Nand, journal, record
from vcsd_eval.verify.random_host import DRIVE

HEADS, DIM, LAYERS = 2, 16, 2


def rows(generator, tokens):
    return generator.standard_normal((tokens, HEADS, DIM)).astype(np.float16)


def created(firmware):
    create = SeqCreate(count=1, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, max_tokens=128)
    return int(firmware.step(create, 0).data[0][0])


def powered_on(nand):
    """The drive that an array holds."""
    again = nand.copy()
    again.power_on()
    return DriveState(DRIVE, again, METHODS)


def added_anew(state):
    """Sums of V of every layer, from the rows."""
    sums = {handle: np.zeros_like(v_sum) for handle, v_sum in state.v_sums.items()}
    for handle, seq in state.ftl.sequences.items():
        for layer in np.flatnonzero(seq.lengths).tolist():
            for row in state.ftl.read_back(handle, layer)[1].astype(np.float32):
                sums[handle][layer] += row
    return sums


def assert_same(sums, others):
    assert set(sums) == set(others)
    for handle, stored in sums.items():
        np.testing.assert_array_equal(stored.view(np.uint32), others[handle].view(np.uint32))


@pytest.mark.parametrize("seed", range(3))
def test_sums_in_records_equal_sums_of_rows(seed):
    """Records come in the middle of verbs too, where collection needs them."""
    generator, firmware, handles = np.random.default_rng(seed), Firmware(DRIVE, Nand(DRIVE.geometry)), []
    for _ in range(60):
        draw, layer = generator.integers(0, 10), int(generator.integers(0, LAYERS))
        if not handles or (draw == 0 and len(handles) < 4):
            handles.append(created(firmware))
            continue
        handle = handles[int(generator.integers(0, len(handles)))]
        length = int(firmware.ftl.sequences[handle].lengths[layer])
        if draw < 5:
            tokens = int(generator.integers(1, 60))
            added = rows(generator, tokens), rows(generator, tokens)
            command = KvAppend(seqs=(handle,), layer=layer, lengths=np.array([tokens]), k=added[0], v=added[1])
        elif draw < 7:
            q, k, v = (rows(generator, 1) for _ in range(3))
            params = {"top_k": np.array([1]), "recent": np.array([0])}
            command = Attend(seqs=(handle,), layer=layer, q=q[:, :, None], k=k, v=v, method="dense", r=1, **params)
        elif draw == 7:
            command = KvCrop(seqs=(handle,), layer=layer, lengths=np.array([length // 2]))
        elif draw == 8:
            command = KvFree(seqs=(handle,))
        else:
            command = Flush()
        status = firmware.step(command, firmware.free_ns).status
        assert status in (Status.SUCCESS, Status.CAPACITY_EXCEEDED)
        if status is Status.CAPACITY_EXCEEDED:
            command = KvFree(seqs=(handle,))
            firmware.step(command, firmware.free_ns)
        if isinstance(command, KvFree):
            handles.remove(handle)
        if firmware.ftl.nand.writes:
            state = powered_on(firmware.ftl.nand)
            assert_same(state.v_sums, added_anew(state))


def filled(generator):
    firmware = Firmware(DRIVE, Nand(DRIVE.geometry))
    handle = created(firmware)
    for layer in range(LAYERS):
        k, v = rows(generator, 90), rows(generator, 90)
        firmware.step(KvAppend(seqs=(handle,), layer=layer, lengths=np.array([90]), k=k, v=v), firmware.free_ns)
    return firmware


def test_power_on_reads_no_rows_for_sums(monkeypatch):
    firmware = filled(np.random.default_rng(0))
    firmware.step(Flush(), firmware.free_ns)
    monkeypatch.setattr(Ftl, "read_back", None)
    assert_same(powered_on(firmware.ftl.nand).v_sums, firmware.state.v_sums)


def test_journal_without_sums_recomputes_them(monkeypatch):
    firmware = filled(np.random.default_rng(1))
    with monkeypatch.context() as patch:
        patch.setattr(journal, "describe", lambda *arguments: {**record.describe(*arguments), "sums": False})
        firmware.step(Flush(), firmware.free_ns)
    state = powered_on(firmware.ftl.nand)
    assert_same(state.v_sums, firmware.state.v_sums)


def test_fork_has_its_own_sums():
    firmware = filled(np.random.default_rng(2))
    ((handle, parent),) = firmware.ftl.sequences.items()
    child = firmware.ftl.sequence(firmware.ftl.fork(handle))
    np.testing.assert_array_equal(child.v_sums, parent.v_sums)
    parent.v_sums[:] = 0
    assert child.v_sums.any()


def test_power_on_findings_are_in_error_log(monkeypatch):
    firmware = filled(np.random.default_rng(3))
    firmware.step(Flush(), firmware.free_ns)
    finding = "block namespace: logical page 3 cannot be read"
    original = Ftl.__init__

    def found(self, *arguments):
        original(self, *arguments)
        self.findings = (*self.findings, finding)

    monkeypatch.setattr(Ftl, "__init__", found)
    (entry,) = powered_on(firmware.ftl.nand).history.errors
    assert entry == {
        "command": "power-on",
        "status_field": int(Status.UNRECOVERED_READ_ERROR),
        "reason": finding,
    }
