"""`vcsd serve`, `create`, `list`, `delete`, as a person uses them."""

import json
import subprocess
import sys

import pytest

from nvmevirt_config import load_config
from tests.served import until
from vcsd_cli.serve import _placed, find_created

pytestmark = pytest.mark.usefixtures("own_run_dir")


def vcsd(*words):
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_create_list_serve_delete(tmp_path):
    assert vcsd("create", "one").returncode == 0
    assert "exists" in vcsd("create", "one").stderr
    for name in ("", ".", ".."):
        assert "letters" in vcsd("create", name).stderr
    assert "letters" in vcsd("create", "a/b").stderr
    assert "nowhere.yaml" in vcsd("create", "two", "--drive", "/nowhere.yaml").stderr
    server = subprocess.Popen([sys.executable, "-c", "from vcsd_cli.main import main; main()", "serve", "--quiet"])
    try:
        until(lambda: json.loads(vcsd("list", "-o", "json").stdout)["drives"][0]["served"])
        (drive,) = json.loads(vcsd("list", "-o", "json").stdout)["drives"]
        assert drive["window"].endswith("window-default")
        assert "served already" in vcsd("serve", "one").stderr
        assert "stop" in vcsd("delete", "one").stderr
    finally:
        server.terminate()
        assert server.wait() == 0
    assert vcsd("delete", "one").returncode == 0
    assert json.loads(vcsd("list", "-o", "json").stdout) == {"drives": []}
    assert "no drive 'one'" in vcsd("delete", "one").stderr


def test_how_durable_a_drive_is_stays_with_it_and_may_be_asked_for():
    assert vcsd("create", "one", "--durability", "host").returncode == 0
    config = load_config(find_created("one"))
    assert config.drives[0].durability == "host"
    nothing = dict.fromkeys(("restarts", "methods", "durability"))
    assert _placed(config, nothing, None, None) == config.drives
    (drive,) = _placed(config, nothing | {"durability": "process", "restarts": False}, None, None)
    assert (drive.durability, drive.restarts) == ("process", False)
