"""Drives described in files."""

import pytest

from csd_spec.presets import DRIVES
from nvmevirt_config import SHIPPED, load_drive


def test_shipped_descriptions_are_the_presets():
    found = {path.stem: load_drive(path) for path in SHIPPED.glob("*.yaml")}
    assert found == DRIVES


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("channels: 8", "channels: 0", "channels = 0"),
        ("channels: 8", "chanels: 8", "chanels"),
        ("read_ns: 50000", "read_ms: 0.05", "read_ms"),
        ("read_ns: 50000", "read_ns: 0.05", "read_ns = 0.05: must be a whole number"),
        ("read_ns: 50000", "read_ns: 50", "read_ns = 50: must lie between 1000"),
        ("channel_bytes_per_s: 1400000000", "channel_bytes_per_s: 1400", "channel_bytes_per_s = 1400: must lie"),
        ("page_bytes: 4096", "page_bytes: 4100", "page_bytes = 4100"),
        ("dram_bytes: 4294967296", "dram_bytes: 4 GB", "drive description"),
        ("geometry:", "geometry: [", "while parsing"),
    ],
)
def test_what_is_off_is_named(tmp_path, old, new, reason):
    text = (SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text()
    assert old in text
    (tmp_path / "drive.yaml").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=reason) as error:
        load_drive(tmp_path / "drive.yaml")
    assert "drive.yaml" in str(error.value)
