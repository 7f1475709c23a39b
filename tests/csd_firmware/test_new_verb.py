"""A new verb needs a table row and a handler: it is then sent, checked, tied to its tenant and fuzzed.

partner of: csd_firmware/handlers.py, csd_firmware/check.py, csd_firmware/state.py
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from csd_firmware import Firmware, InProcessDrive
from csd_firmware.handlers import HANDLERS, CommandHandler
from csd_firmware.tenants import Tenant
from csd_link.doorbell import Polling
from csd_link.drive_end import WindowController, WindowServer
from csd_link.host_end import WindowDrive
from csd_link.medium import MappedMedium
from csd_link.recovery import RecoveringDrive
from csd_link.window import BLOCK_BYTES, Identity, WindowLayout
from csd_link.wire import WireError, decode, encode
from csd_spec import Completion, KvAppend, SeqCreate, Status
from csd_spec.verbs import VERBS, Array, ArrayType, CommandSpec, Scalar, SequenceAccess
from vcsd_eval.verify import fuzz
from vcsd_eval.verify.tested_storage import place

H, D, TOKENS = 2, 16, 30


@dataclass(frozen=True, slots=True)
class KvTail:
    """The last `tokens` rows of K of one layer, with `shift` added to each."""

    seqs: tuple[int, ...]
    layer: int
    tokens: int
    shift: np.ndarray


ROW = CommandSpec(
    command=KvTail,
    opcode=0xD2,
    parameters=("B", Scalar("layer", high="last_layer"), "H", "d", Scalar("tokens", 1, 64, example=3)),
    arrays=(Array("seqs", ArrayType.HANDLES, "B"), Array("shift", ArrayType.VALUES, "B H d")),
    reply=(Array("rows", ArrayType.VALUES, "B tokens H d"),),
    access=SequenceAccess.ALIKE,
)


def tail(state, command, watch):
    rows = [state.ftl.read_back(handle, command.layer)[0][-command.tokens :] for handle in command.seqs]
    watch.spend("logit", 100)
    return Completion(status=Status.SUCCESS, data=(np.stack(rows) + command.shift[:, None],))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """All that a new verb takes."""
    monkeypatch.setitem(VERBS, KvTail, ROW)
    monkeypatch.setitem(HANDLERS, KvTail, CommandHandler(tail))


ROWS = np.random.default_rng(0).standard_normal((TOKENS, H, D)).astype(np.float16)


def filled(device):
    """A sequence of `TOKENS` rows on a device; its handles."""
    seqs = tuple(device.submit(SeqCreate(1, 1, H, D, 512), 0).result().data[0].tolist())
    assert device.submit(KvAppend(seqs, 0, np.array([TOKENS]), ROWS, ROWS), 0).result().status is Status.SUCCESS
    return seqs


def tailed(seqs, tokens=5):
    return KvTail(seqs, 0, tokens, np.ones((1, H, D), np.float16))


@pytest.fixture(params=["inproc", "window", "recovering"])
def device(request, small_drive, tmp_path):
    """A drive in this process, and one behind a window."""
    if request.param == "inproc":
        drive = InProcessDrive(small_drive)
        yield drive
        drive.close()
        return
    layout = WindowLayout(depth=2, slot_blocks=4)
    MappedMedium.create(tmp_path / "window", layout.blocks * BLOCK_BYTES)
    end = WindowController(
        MappedMedium(tmp_path / "window"), Identity("d", small_drive, layout), Tenant(Firmware(small_drive), b"s")
    )
    server = WindowServer(end, Polling())
    server.start()
    medium = MappedMedium(tmp_path / "window")
    drive = WindowDrive(medium) if request.param == "window" else RecoveringDrive(lambda: WindowDrive(medium))
    yield drive
    drive.close()
    server.stop()


def test_new_verb_runs_on_every_device(device):
    done = device.submit(tailed(filled(device)), 0).result()
    assert (done.status, done.reason) == (Status.SUCCESS, "")
    np.testing.assert_array_equal(done.data[0], ROWS[None, -5:] + np.float16(1))
    assert done.link_bytes == 64 + H * D * 2 + 5 * H * D * 2
    assert done.breakdown_ns["logit"] == 100
    assert sum(done.breakdown_ns.values()) == done.latency_ns


def test_new_verb_encoding_round_trips():
    """A payload of another size is refused."""
    command = tailed((3,))
    request = encode(command)
    assert (request.opcode, request.parameters) == (0xD2, (1, 0, H, D, 5))
    again = decode(request)
    assert (again.seqs, again.layer, again.tokens) == ((3,), 0, 5)
    np.testing.assert_array_equal(again.shift, command.shift)
    with pytest.raises(WireError, match="payload"):
        decode(replace(request, payload=bytes(request.payload)[:-1]))


def test_new_verb_invalid_fields_are_refused(small_drive):
    device = InProcessDrive(small_drive)
    good = tailed(filled(device))
    for command, status, reason in (
        (replace(good, tokens=65), Status.INVALID_FIELD, "tokens = 65: must be from 1 to 64"),
        (replace(good, layer=1), Status.INVALID_FIELD, "layer = 1"),
        (replace(good, shift=good.shift[:, :1]), Status.INVALID_FIELD, "shift: must have shape (1, 2, 16)"),
        (replace(good, shift=good.shift * np.float16("inf")), Status.INVALID_FIELD, "shift: holds infinity"),
        (replace(good, seqs=(77,)), Status.UNKNOWN_SEQUENCE, "77"),
    ):
        done = device.submit(command, 0).result()
        assert (done.status, reason in done.reason) == (status, True), done.reason
    device.close()


def test_new_verb_obeys_tenant_and_window_limits(small_drive):
    firmware = Firmware(small_drive)
    alice, bob = (Tenant(firmware, b"secret", name) for name in ("alice", "bob"))
    hers = tuple(alice.step(SeqCreate(1, 1, H, D, 512), 0).data[0].tolist())
    alice.step(KvAppend(hers, 0, np.array([TOKENS]), ROWS, ROWS), 0)
    assert alice.step(tailed(hers), 0).status is Status.SUCCESS
    assert bob.step(tailed(hers), 0).status is Status.UNKNOWN_SEQUENCE
    done = alice.step(tailed(hers, 20), 0, max_bytes=20 * H * D * 2 - 1)
    assert (done.status, "1,280 bytes to the host" in done.reason) == (Status.INVALID_FIELD, True)


def test_new_verb_is_fuzzed(monkeypatch):
    with place("memory", fuzz.DRIVE.geometry) as where:
        world = fuzz.FuzzWorld(3, where, 16)
    seeds = [command.seqs for command in world.seeds() if isinstance(command, KvTail)]
    assert seeds == [(world.own_handle,), (world.secret_handle,), (1,)]
    runs = []
    monkeypatch.setitem(HANDLERS, KvTail, CommandHandler(lambda *args: runs.append(1) or tail(*args)))
    # among the inputs of all verbs it gets too few, so the result would depend on chance
    monkeypatch.setattr(fuzz, "VERBS", {KvTail: ROW})
    result = fuzz.bench_fuzz(12_000, 3, lambda _: None)
    assert (result["crashes"], result["hangs"], result["leaks"], result["state_changes"]) == (0, 0, 0, 0), result[
        "notes"
    ]
    assert len(runs) > 50
