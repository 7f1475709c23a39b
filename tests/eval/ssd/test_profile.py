"""Data files of SSDs: every constant has a source, and errors in a file are named.

partner of: eval/ssd/profile.py, eval/ssd/workload.py
"""

import pytest
import yaml

from csd_spec.checked import from_values
from nvmevirt_config.document import read_yaml
from vcsd_eval.ssd.profile import FOLDER, SharedConstants, SsdProfile, drives, shared, with_sources
from vcsd_eval.ssd.workload import WORKLOADS


@pytest.mark.parametrize("profile", [shared(), *drives().values(), *drives("simulators").values()])
def test_constants_have_sources_and_sources_are_used(profile):
    result = with_sources(profile)
    assert all(len(each["source"]) > 10 for each in result.values())
    used = {constant.source for constant in (*profile.constants.values(), *getattr(profile, "published", ()))}
    assert set(profile.sources) == used


def test_every_drive_has_four_published_figures():
    assert len(drives()) >= 6
    assert all(len(drive.published) >= 4 and all(each.value for each in drive.published) for drive in drives().values())
    assert {each.workload for drive in drives().values() for each in drive.published} == set(WORKLOADS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text["constants"].pop("channels"), "constants.channels: must be given"),
        (lambda text: text["constants"].update(tuned={"value": 1, "source": "sheet"}), "constants.tuned"),
        (lambda text: text["constants"]["dies"].update(source="nowhere"), "constants.dies.source = 'nowhere'"),
        (lambda text: text["published"][0].update(source="nowhere"), "source = 'nowhere'"),
        (lambda text: text["published"][0].update(workload="fsync"), "workload = 'fsync'"),
        (lambda text: text["published"][0].update(unit="GB/s"), "unit = 'GB/s'"),
    ],
)
def test_invalid_drive_file_is_named(tmp_path, change, reason):
    text = yaml.safe_load((FOLDER / "drives" / "wd-sn850x-2tb.yaml").read_text())
    change(text)
    path = tmp_path / "drive.yaml"
    path.write_text(yaml.safe_dump(text))
    with pytest.raises(ValueError, match=reason) as raised:
        read_yaml(path, SsdProfile)
    assert str(path) in str(raised.value)


def test_shared_constant_missing_raises():
    text = yaml.safe_load((FOLDER / "shared.yaml").read_text())
    del text["constants"]["command_us"]
    with pytest.raises(ValueError, match="command_us: must be given"):
        from_values(text, SharedConstants)
