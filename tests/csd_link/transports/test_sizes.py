"""Commands around the size of a window's slot, and far above: the same tokens, times and bytes on every transport."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from csd_link.driveset import DriveSetConfig
from csd_link.recovery import RecoveringDrive
from csd_link.served_drive import ServedDrive
from csd_link.splitting import SplitRead, submit_reads
from csd_link.window import WindowLayout
from csd_spec import AttentionConfig, CompressionBudget, KvAppend, KvRead, ModelShape, SeqCreate, Status
from host_driver.driver import Driver
from host_driver.prefixes.cache_keys import PrefixNames
from host_driver.prefixes.identity import ModelIdentity
from host_driver.prefixes.store import PrefixStore
from tests.served import SHAPE, kill, serving, window_of
from vcsd.drive_report import DriveReport
from vcsd.transport import open_drives

pytestmark = pytest.mark.usefixtures("own_run_dir")
LAYOUT = WindowLayout(depth=3, slot_blocks=16)
TOKEN = 4 * SHAPE.kv_heads * SHAPE.head_dim  # bytes of keys and values in a layer, on one drive
FITS = (LAYOUT.slot_bytes - 16) // TOKEN  # tokens of one sequence in a slot
PROMPTS = (FITS - 1, FITS, FITS + 1, FITS + 2, 9 * FITS)  # one more is read than is appended; more parts than depth
MODEL = ModelIdentity.from_text("m")
WAYS = ["process", "fuse", "window:{}/windows", "nvme+tcp"]


@pytest.fixture
def small_slots(monkeypatch):
    """Drives that are made for a run have small slots."""
    monkeypatch.setattr("csd_link.private_server.ServedDrive", partial(ServedDrive, layout=LAYOUT))


def half(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16)


def turns(devices, lengths, attention):
    """Two turns of sequences that are opened together: their results, and the host's counters."""
    driver, generator, outputs = Driver(devices, SHAPE, attention), np.random.default_rng(0), []
    batch, count, every = driver.create(len(lengths), 2 * max(lengths) + 9), len(lengths), slice(None)
    for _ in range(2):
        for layer in range(SHAPE.layers):
            rows = half(generator, sum(lengths), 4, 16), half(generator, sum(lengths), 4, 16)
            driver.append(batch, every, layer, np.array(lengths), lambda rows=rows: rows)
        with driver.step(1) as (part,):
            q, k, v = (half(generator, count, 4, 16) for _ in range(3))
            outputs += [driver.decode(batch, every, part, layer, q, k, v) for layer in range(SHAPE.layers)]
        outputs += [*driver.read(batch, every, 1), *driver.read(batch, every, 0, 5, FITS + 1)]
    driver.free(batch)
    return outputs, (DriveReport.of(driver).to_dict(), driver.now_ns)


def all_turns(devices):
    """Prompts of one sequence, of sequences that share a command, and a batch whose Attend is larger than a slot."""
    sparf = AttentionConfig("sparf", CompressionBudget(4))
    batches = [[prompt] for prompt in PROMPTS] + [[1, 0, FITS, 2 * FITS + 3, 7], [3] * 300]
    return [turns(devices, lengths, sparf) for lengths in batches]


@pytest.fixture(scope="module")
def expected():
    """Results in this process: of drives that take any size, and of drives limited to the size of a slot."""
    runs = []
    for most in (1 << 60, LAYOUT.slot_bytes):
        with open_drives(DriveSetConfig()) as devices:
            devices[0].max_bytes = most
            runs.append(all_turns(devices))
    return runs


@pytest.mark.parametrize("way", WAYS)
def test_payload_sizes_equal_on_all_transports(way, expected, small_slots, tmp_path, request):
    if way == "fuse":
        request.getfixturevalue("fuse")
    with open_drives(DriveSetConfig(transport=way.format(tmp_path))) as devices:
        result = all_turns(devices)
    for (outputs, figures), (whole, _), (cut, same) in zip(result, *expected, strict=True):
        for triple in zip(outputs, whole, cut, strict=True):
            assert np.array_equal(triple[0], triple[1]) and np.array_equal(triple[0], triple[2])
        assert figures == same, "times and bytes are those of parts of the same size in this process"


def test_command_with_more_parts_than_ring_entries(small_slots):
    with open_drives(DriveSetConfig(transport="process")) as devices:
        window, under_way = devices[0]._device, []
        submit = window._end.submit

        def counted(*arguments):
            sequence = submit(*arguments)
            under_way.append(window._end.begun - window._end.ended)
            return sequence

        window._end.submit = counted
        turns(devices, [9 * FITS], AttentionConfig("dense"))
        assert max(under_way) == LAYOUT.depth


@pytest.mark.parametrize("when", [1, 2, 5])
def test_kill_during_split_append_and_read(when, tmp_path):
    generator = np.random.default_rng(1)
    before, more = (half(generator, tokens, 4, 16) for tokens in (40, 6 * FITS))
    with serving(tmp_path, "csd0", layout=LAYOUT), closing(RecoveringDrive(window_of("csd0"))) as device:
        (seq,) = device.submit(SeqCreate(1, 1, 4, 16, 8 * FITS), 0).result().data[0].tolist()

        def append(rows):
            done = device.submit(KvAppend((seq,), 0, np.array([len(rows)]), rows, -rows), 0).result()
            assert done.status is Status.SUCCESS, done.reason

        append(before)
        kill_before_request(device, when)
        append(more)
        assert len(device.recoveries) == 1
        kill_before_request(device, when)
        read = SplitRead(device, KvRead((seq,), 0), TOKEN, [40 + 6 * FITS])
        k, v = submit_reads([read], 0)[0].result().data
        assert len(device.recoveries) == 2
    np.testing.assert_array_equal(k, np.concatenate([before, more]))
    np.testing.assert_array_equal(v, -k)


def kill_before_request(device, number):
    """Kill the drive when `number` requests from now on were submitted."""
    end, counted = device._device._end, []
    submit = end.submit

    def submit_after_a_kill(*arguments):
        counted.append(arguments)
        if len(counted) == number:
            kill("csd0")
        return submit(*arguments)

    end.submit = submit_after_a_kill


def test_prefix_commands_are_split_to_slot_size(tmp_path):
    names = PrefixNames(shape=SHAPE, model=MODEL, block_tokens=8)
    tokens, generator = list(range(8 * FITS)), np.random.default_rng(2)
    k = half(generator, SHAPE.layers, len(tokens), 4, 16)
    with serving(tmp_path, "csd0", layout=LAYOUT):
        for host in range(2):  # the second one finds what the first one has stored
            with closing(window_of("csd0")()) as device:
                store = PrefixStore([device], names)
                assert host or store.store(names.keys(tokens), k, -k) == FITS
                loaded = store.load(names.keys(tokens))
                assert loaded is not None
                np.testing.assert_array_equal(loaded[0], k)
                np.testing.assert_array_equal(loaded[1], -k)


def test_indivisible_command_is_refused_before_storing(tmp_path):
    wide = ModelShape(name="wide", layers=1, q_heads=32, kv_heads=8, head_dim=64)
    reason = "drive csd0 takes 4,096 bytes per command, one token of this model needs {}: .*slot_blocks: {} or more"
    with serving(tmp_path, "csd0", layout=WindowLayout(depth=2, slot_blocks=1)), closing(window_of("csd0")()) as device:
        with pytest.raises(ValueError, match=reason.format("6,.*", 2)):
            Driver([device], wide)
        with pytest.raises(ValueError, match=reason.format("4,112", 2)):
            PrefixStore([device], PrefixNames(shape=replace(wide, kv_heads=16, q_heads=16), model=MODEL))
        (few,) = turns([device], [40, 3], AttentionConfig("dense"))[0][:1]
        assert few.shape == (2, 4, 16)
