"""Text of a refused value in the reason of a completion."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_spec import (
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    LogPage,
    SeqCreate,
    SeqFork,
    Status,
)


@pytest.mark.parametrize("length", [1, 38, 39, 500])
def test_rejected_value_is_shown_in_40_characters(small_drive, length):
    value = "x" * length
    shown = (
        Firmware(small_drive).step(SeqCreate(value, 1, 2, 16, 64), 0).reason.removeprefix("count = ").partition(":")[0]
    )
    assert shown == repr(value) if length <= 38 else (len(shown), shown[-3:]) == (40, "...")


@pytest.mark.parametrize("integer", [np.int64, np.uint64, np.int32])
@pytest.mark.parametrize("tenant", [False, True])
def test_numpy_integers_are_integers_everywhere(small_drive, integer, tenant):
    """In handles, scalars and times: what is stored, journaled and logged holds Python's."""
    firmware = Firmware(small_drive)
    device = Tenant(firmware, bytes(32), "one", 0.5) if tenant else firmware

    def ask(command, submit_ns=0):
        values = {field.name: getattr(command, field.name) for field in fields(command)}
        changed = {name: integer(value) for name, value in values.items() if type(value) is int}
        changed |= {"seqs": tuple(wide(seq) for seq in command.seqs)} if "seqs" in values else {}
        done = device.step(replace(command, **changed), integer(submit_ns))
        assert done.status is Status.SUCCESS, done.reason
        return done

    wide = np.uint64 if tenant else integer  # a tenant's handles have 64 bits
    one, other = ask(SeqCreate(2, 1, 2, 16, 512)).data[0]
    rows = np.ones((40, 2, 16), np.float16)
    for handle in (one, other):
        ask(KvAppend((handle,), 0, np.array([40]), rows, rows))
    (copy,) = ask(SeqFork((one,), np.array([30]))).data[0]
    ask(KvCrop((other,), 0, np.array([20])))
    assert len(ask(KvRead((one, other), 0)).data[0]) == 60
    ask(Flush(), 10**6)
    ask(KvFree((copy,)))
    ask(Flush())
    for page in LogPage:
        json.loads(bytes(ask(GetLog(page)).data[0]))
    assert not firmware.ftl.nand.failed
    assert all(type(handle) is int for handle in firmware.ftl.sequences)
