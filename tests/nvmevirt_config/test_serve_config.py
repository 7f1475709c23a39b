"""Lists of drives to serve, from files."""

from pathlib import Path

import pytest

from csd_link.window import WindowLayout
from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH
from nvmevirt_config import load_config

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documentations_file_is_read_as_it_says(tmp_path):
    text = (DOCS / "drives.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "drives.yaml").write_text(text)
    first, second = load_config(tmp_path / "drives.yaml").drives
    assert (first.name, first.spec, first.tenants) == ("csd0", DRIVES["instcsd-overlapped"], ("alice", "bob"))
    assert (first.path, first.mount) == (tmp_path / "flash/csd0", tmp_path / "mnt/csd0")
    assert first.methods == tmp_path / "strided.py"
    assert (second.spec, second.device, second.offset_bytes) == (
        INSTCSD_ZYNQ7045_8CH,
        Path("/dev/shm/guest-ram"),
        1074790400,
    )
    assert second.layout == WindowLayout(depth=8, slot_blocks=8192)
    assert first.restarts
    assert second.restarts


def test_no_drive_of_a_file_is_restarted_where_it_says_so(tmp_path):
    (tmp_path / "drives.yaml").write_text("drives: [{name: a}, {name: b}]\nrestart: false")
    assert [drive.restarts for drive in load_config(tmp_path / "drives.yaml").drives] == [False, False]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a list named drives"),
        ("drives: []", "there is none"),
        ("drives: [5]", "a drive needs a name"),
        ("drives: [{name: a, restart: false}]", "restart: no such field"),
        ("drives: [{name: a, drive: {name: x}}]", "drive a: drive description"),
    ],
)
def test_what_is_off_is_named_with_its_file(tmp_path, text, reason):
    (tmp_path / "drives.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        load_config(tmp_path / "drives.yaml")
    assert "drives.yaml" in str(error.value)
