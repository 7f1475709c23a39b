"""Fleet descriptions read from files."""

from pathlib import Path

import pytest

from csd_io.medium import Medium
from csd_link.fleet_table import FleetPlan
from csd_spec.presets import DRIVES
from nvmevirt_config.fleet_config import load_fleet

DOCS = Path(__file__).parents[2] / "docs"


def load(tmp_path, text):
    (tmp_path / "FLEET.yaml").write_text(text)
    return load_fleet(tmp_path / "FLEET.yaml")


def test_fleet_file_of_docs_is_read(tmp_path):
    plan = load(tmp_path, (DOCS / "fleet.md").read_text().partition("```yaml\n")[2].partition("```")[0])
    assert (plan.drives, plan.spares, plan.spec) == (4, 1, DRIVES["instcsd-overlapped"])
    assert (plan.flash, plan.address, plan.cpus) == (Path("/var/lib/vcsd"), "10.0.0.1:6379", 1.0)
    assert (plan.durability, plan.storage, plan.threads) == ("host", Medium("direct", 512 << 20), 2)


def test_fleet_file_needs_only_number_of_drives(tmp_path):
    assert load(tmp_path, "drives: 3") == FleetPlan(drives=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spares: 1", "drives: is missing"),
        ("drives: 0", "drives: "),
        ("drives: 2\nspare: 1", "spare: no such field: did you mean spares?"),
        ("drives: 2\nflash: here", "flash: 'here': must be an absolute path"),
        ("drives: 2\ndrive: nothing", "drive = 'nothing': neither a file nor a preset"),
        ("drives: 2\ncpus: 0", "cpus: "),
        ("drives: two", "drives: "),
        ("- 1", ""),
    ],
)
def test_invalid_fleet_file_is_one_line_error(tmp_path, text, says):
    with pytest.raises(ValueError) as raised:
        load(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path}/FLEET.yaml: {says}") and "\n" not in str(raised.value)
