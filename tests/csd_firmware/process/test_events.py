"""Events of served drives, for people and for programs."""

import json
import os
import subprocess
import sys

import pytest

from csd_firmware.process import events


@pytest.fixture(autouse=True)
def text_again():
    yield
    events.set_format("text")


def test_event_is_text_line_or_json_object(capsys):
    events.emit("stopped", "all drives stopped", code=0)
    assert capsys.readouterr().err == "all drives stopped\n"
    events.set_format("json")
    events.emit("drive_error", "one line\nand another", "error", "csd0", code=1)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    event = json.loads(line)
    assert event.pop("time").endswith("Z")
    assert event == {
        "level": "error",
        "event": "drive_error",
        "message": "one line\nand another",
        "drive": "csd0",
        "code": 1,
    }


def test_event_without_reader_is_no_error():
    """`vcsd drive serve` exited with 1 where its last event had no reader."""
    code = "from csd_firmware.process.events import emit; emit('stopped', 'all drives stopped')"
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run([sys.executable, "-c", code], stderr=writes, check=False)
    finally:
        os.close(writes)
    assert done.returncode == 0
