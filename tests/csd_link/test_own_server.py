"""Server processes of a run's own."""

import pytest

from csd_link.run_dir import drive_dir
from tests.served import serving

pytestmark = pytest.mark.usefixtures("own_run_dir")


def test_a_server_lives_as_long_as_its_block(tmp_path):
    with serving(tmp_path, "csd0", "csd1") as server:
        assert server.poll() is None
        assert drive_dir("csd0").exists()
    assert server.returncode == 0
    assert not drive_dir("csd0").exists()


def test_a_folder_that_others_may_open_is_refused(tmp_path):
    (tmp_path / "csd0").mkdir(mode=0o755)
    with pytest.raises(ConnectionError, match="nobody else"), serving(tmp_path, "csd0", flash=tmp_path):
        raise AssertionError("it was served")
