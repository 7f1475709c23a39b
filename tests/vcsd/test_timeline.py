"""Timelines of decode steps: slices add up to the simulated time, whatever schedule and transport.

partner of: vcsd/tracks.py, vcsd/timeline_picture.py, csd_firmware/trace.py
"""

import itertools
import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace

import pytest

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig, CompressionBudget, ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl.flash.timing.model import FlashOperation
from host_driver.driver import Driver
from host_driver.random_decode import SHIPPED_SHAPE, random_decode
from vcsd import tracks as module
from vcsd.timeline import StepRecorder, _flash_tracks, check_timeline_path
from vcsd.tracks import Slice, joined
from vcsd.transport import open_drives

OVERLAPPED = replace(INSTCSD_ZYNQ7045_8CH, engine=replace(INSTCSD_ZYNQ7045_8CH.engine, schedule="overlapped"))
SPECS = {"serial": INSTCSD_ZYNQ7045_8CH, "overlapped": OVERLAPPED}
MANY_LAYERS = ModelShape(name="many", layers=32, q_heads=8, kv_heads=4, head_dim=64)


def decode(path=None, spec=INSTCSD_ZYNQ7045_8CH, method="sparf", shape=SHIPPED_SHAPE, prompt=700, drives=2):
    """Decode 3 steps; returns the simulated times of the steps, and what `write` returns."""
    attention = AttentionConfig(method, CompressionBudget(1 if method == "dense" else 8))
    with ExitStack() as undo:
        devices = [InProcessDrive(spec) for _ in range(drives)]
        for device in devices:
            undo.callback(device.close)
        driver = Driver(devices, shape, attention)
        undo.callback(driver.close)
        if path is None:
            return random_decode(driver, prompt, 3)["step_ns"], None
        with StepRecorder(driver) as recorder:
            times = random_decode(driver, prompt, 3)["step_ns"]
            return times, recorder.write(path)


def tracks_in(path):
    """Slices (name, begin, end, args) in ns, by process and track."""
    names, tracks = {}, defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        key = event["pid"], event.get("tid")
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[key] = event["args"]["name"]
        if event["ph"] == "X":
            begin, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
            tracks[names[event["pid"], None], names[key]].append((event["name"], begin, begin + took, event["args"]))
    return tracks


@pytest.mark.parametrize("schedule", SPECS)
@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_slices_add_up_to_the_step(tmp_path, schedule, method):
    times, told = decode(tmp_path / "step.json", SPECS[schedule], method)
    tracks = tracks_in(tmp_path / "step.json")
    layers = tracks["host", "micro-batch 0"]
    assert told["step_ns"] == times[-1] == sum(end - begin for _, begin, end, _ in layers) == layers[-1][2]
    assert tracks["host", "step"][0][1:3] == (0, times[-1])
    for drive in ("drive 0", "drive 1"):
        path = sum(end - begin for _, begin, end, _ in tracks[drive, "critical path"])
        commands = tracks[drive, "commands"]
        assert path == sum(end - begin for _, begin, end, _ in commands) > 0
        assert all(sum(args["breakdown_ns"].values()) == end - begin for _, begin, end, args in commands)
    slowest = [max(tracks[f"drive {drive}", "commands"][layer][2] for drive in (0, 1)) for layer in range(4)]
    assert slowest == [end for _, _, end, _ in layers]


@pytest.mark.parametrize("schedule", SPECS)
def test_recording_changes_no_simulated_time(tmp_path, schedule):
    assert decode(tmp_path / "step.json", SPECS[schedule])[0] == decode(None, SPECS[schedule])[0]


@pytest.mark.parametrize("schedule", SPECS)
def test_slices_of_a_resource_do_not_overlap(tmp_path, schedule):
    decode(tmp_path / "step.json", SPECS[schedule])
    for (_, track), slices in tracks_in(tmp_path / "step.json").items():
        for (_, _, end, _), (_, begin, _, _) in itertools.pairwise(slices):
            assert begin >= end, track


def test_pages_of_lanes_are_those_of_the_commands(tmp_path):
    decode(tmp_path / "step.json", OVERLAPPED)
    tracks = tracks_in(tmp_path / "step.json")
    lanes = [slices for (process, track), slices in tracks.items() if process == "drive 0" and "lane" in track]
    sensed = [args for slices in lanes for name, _, _, args in slices if name == "sense"]
    wanted = [args for _, _, _, args in tracks["drive 0", "commands"]]
    assert sum(args["pages"] for args in sensed) == sum(args["pages"] for args in wanted) > 0
    assert sum(args["bytes"] for args in sensed) == sum(args["bytes"] for args in wanted)


def test_step_of_32_layers_is_at_most_20_mib(tmp_path, monkeypatch):
    path = tmp_path / "step.json"
    times, told = decode(path, method="sparf", shape=MANY_LAYERS, prompt=1900)
    assert path.stat().st_size <= 20 << 20 and told["step_ns"] == times[-1]
    monkeypatch.setattr(module, "MAX_EVENTS", 2000)
    _, fewer = decode(path, method="sparf", shape=MANY_LAYERS, prompt=1900)
    assert fewer["merged_slices"] > 0 and fewer["slices"] + fewer["merged_slices"] == told["slices"]
    layers = tracks_in(path)["host", "micro-batch 0"]
    assert sum(end - begin for _, begin, end, _ in layers) == times[-1]


def test_drives_in_processes_have_their_commands(tmp_path):
    with open_drives(DriveSetConfig(transport="process")) as devices:
        driver = Driver(devices, SHIPPED_SHAPE, AttentionConfig("dense", CompressionBudget(1)))
        with StepRecorder(driver) as recorder:
            times = random_decode(driver, 100, 2)["step_ns"]
            recorder.write(tmp_path / "step.json")
        driver.close()
    tracks = tracks_in(tmp_path / "step.json")
    assert [name for name, *_ in tracks["drive 0", "commands"]] == [f"Attend, layer {layer}" for layer in range(4)]
    assert tracks["drive 0", "commands"][-1][2] == times[-1]


def test_closed_recorder_leaves_no_trace(tmp_path):
    with ExitStack() as undo:
        device = InProcessDrive(INSTCSD_ZYNQ7045_8CH)
        undo.callback(device.close)
        driver = Driver([device], SHIPPED_SHAPE)
        undo.callback(driver.close)
        recorder = StepRecorder(driver)
        recorder.close()
        random_decode(driver, 50, 1)
        assert driver.observer is None and device.firmware.trace is None and recorder.last is None
        with pytest.raises(ValueError, match="no decode step was run"):
            recorder.write(tmp_path / "step.json")


@pytest.mark.parametrize("name", ["step.svg", "step.png"])
def test_picture_is_written(tmp_path, name):
    decode(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(("name", "reason"), [("step.txt", "must end in .json"), ("no/step.json", "no folder")])
def test_path_that_cannot_be_written_is_refused(tmp_path, name, reason):
    with pytest.raises(ValueError, match=reason):
        check_timeline_path(tmp_path / name)


def test_joined_slices_keep_pages_bytes_and_ends():
    track = [Slice("a", 0, 4, 1, 10), Slice("a", 2, 5, 1, 10), Slice("b", 4, 9), Slice("b", 11, 12)]
    assert list(joined(track)) == [Slice("a", 0, 5, 2, 20), Slice("b", 5, 9), Slice("b", 11, 12)]
    assert list(joined(track, 2)) == [Slice("a", 0, 5, 2, 20), Slice("b", 5, 12)]


@pytest.mark.parametrize(("waits_ns", "begins_ns"), [(0, 0), (7_000, 7_000), (-500, 0)])
def test_a_page_is_sensed_by_its_die_and_then_moved_over_its_channel(waits_ns, begins_ns):
    """Its transfer ends with the read, and begins when the page has been sensed, or later if the channel is busy."""
    spec, zero = SPECS["serial"], 1_000
    sensed, nbytes = 5_000 + spec.timing.read_ns, spec.geometry.page_bytes
    took_ns = -(-nbytes * 10**9 // spec.channel_timing.channel_bytes_per_s)
    end, lane = sensed + took_ns + waits_ns, spec.geometry.channels + 3
    operations = [FlashOperation("read", lane, nbytes, 5_000, end), FlashOperation("erase", 0, 0, 9_000, 12_000)]
    tracks = _flash_tracks(operations, spec, zero)
    assert tracks == {
        "channel 00, lane 00": [Slice("erase", 8_000, 11_000, 1, 0)],
        "channel 03": [Slice("transfer", sensed + begins_ns - zero, end - zero, 1, nbytes)],
        "channel 03, lane 01": [Slice("sense", 4_000, sensed - zero, 1, nbytes)],
    }
