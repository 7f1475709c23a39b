"""Drive descriptions read from files.

partner of: nvmevirt_config/describe.py
"""

import pytest

from csd_spec.presets import DRIVES
from nvmevirt_config import SHIPPED, load_drive


def test_shipped_descriptions_are_the_presets():
    result = {path.stem: load_drive(path) for path in SHIPPED.glob("*.yaml")}
    assert result == DRIVES


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("channels: 8", "channels: 0", "geometry.channels: must be greater than or equal to 1, got 0"),
        ("channels: 8", "chanels: 8", "geometry.chanels: no such field: did you mean channels"),
        ("read_ns: 50000", "read_ms: 0.05", "timing.read_ms: no such field: did you mean read_ns"),
        ("read_ns: 50000", "read_ns: 0.05", "timing.read_ns: must be a valid integer, got 0.05"),
        ("read_ns: 50000", "read_ns: 50", "timing.read_ns: must be greater than or equal to 1000, got 50"),
        ("channel_bytes_per_s: 1400000000", "channel_bytes_per_s: 1400", "timing.channel_bytes_per_s: must be greater"),
        ("page_bytes: 4096", "page_bytes: 4100", "geometry.page_bytes: .*multiple of 16, got 4100"),
        ("dram_bytes: 4294967296", "dram_bytes: 4 GB", "dram_bytes: must be a valid integer, got '4 GB'"),
        ("geometry:", "geometry: [", "while parsing"),
        ("channels: 8", "channels: 1000000", "geometry.channels: must be less than or equal to 1024"),
        ("channels: 8", f"channels: {'9' * 400}", "geometry.channels: must be less than"),
        ("channels: 8", f"channels: 0x{'F' * 5000}", "Exceeds the limit"),
        ("channels: 8", f"channels: {'[' * 2000}{']' * 2000}", "nested too deeply"),
        ("channels: 8", "channels: 8\n  channels: 9", "a key is given twice"),
        ("kernels: 2", "kernels: &a 2\n  lanes: *a", "aliases are not supported"),
        ("kernel_efficiency: 0.906", "kernel_efficiency: .nan", "engine.kernel_efficiency: must be a finite number"),
        ("codeword_bytes: null", "codeword_bytes: -4", "timing.codeword_bytes: must be greater than or equal to 16"),
        ("codeword_bytes: null", "codeword_bytes: a", "timing.codeword_bytes: must be a valid integer"),
        ("codeword_bytes: null", "codeword_bytes: 1000000000", "timing.codeword_bytes: must be less than"),
        ("codeword_bytes: null", "codeword_bytes: 8192", "codeword_bytes = 8192: a page has 4096"),
        ("cache_read: false", "cache_read: 'no'", "timing.cache_read: must be a valid boolean, got 'no'"),
    ],
)
def test_invalid_drive_description_is_named(tmp_path, old, new, reason):
    text = (SHIPPED / "instcsd-zynq7045-8ch.yaml").read_text()
    assert old in text
    (tmp_path / "drive.yaml").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=reason) as error:
        load_drive(tmp_path / "drive.yaml")
    assert "drive.yaml" in str(error.value)
