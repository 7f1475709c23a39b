"""The wheel works outside of the repository: modules, data files, the command line and type information."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
RUN = "from vcsd_cli.main import main; main()"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from a copy of its files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignored)
    subprocess.run([*PIP, "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder], check=True)
    (found,) = folder.glob("vcsd-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Function that runs Python with the wheel in place of the checkout, in an empty folder."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(code, *words):
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False), site

    return run


def test_wheel_has_no_tests_and_is_typed(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "vcsd/py.typed" in names and not any(name.startswith(("tests/", "docs/")) for name in names)


def test_installed_packages_are_the_wheels(installed):
    packages = (
        "attention_engine, csd_firmware, csd_io, csd_link, csd_spec, eval, fleet, ftl, host_driver, kv_cache, vcsd"
    )
    done, site = installed(f"import {packages}\nfor each in ({packages}): print(each.__file__)")
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(site)) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_installed_command_runs_a_model_and_a_sweep(installed):
    done, _ = installed(RUN, "run", "--max-new-tokens", "2", "-o", "json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["agreement"]["top1_match_rate"] > 0
    small = ("--set", "context=256", "--set", "batch=1", "--set", "sampled_layers=1")
    done, _ = installed(RUN, "whatif", "instcsd-overlapped", "--vary", "channels=4,8", *small, "-o", "json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["points"] == 2
