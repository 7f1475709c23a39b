"""The wheel works outside of the repository: modules, data files, the command line and type information.

So does an editable install. Both are in environments of their own, which have the packages of this one but not the
project; a third one is empty, and gets what `pip install` finds.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.matrix import CPU_TORCH, Row, tried

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
PACKAGES = {
    "attention_engine",
    "csd_firmware",
    "csd_io",
    "csd_link",
    "csd_spec",
    "fleet",
    "ftl",
    "host_driver",
    "kv_cache",
    "nvmevirt_config",
    "vcsd",
    "vcsd_cli",
    "vcsd_eval",
}
WHERE = f"import {', '.join(sorted(PACKAGES))}\nfor each in ({', '.join(sorted(PACKAGES))}): print(each.__file__)"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the project's files."""
    source = tmp_path_factory.mktemp("project") / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs", "report")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The project's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder], check=True)
    (result,) = folder.glob("vcsd-*.whl")
    return result


def environment(folder, *words):
    """Function that runs a program of a new environment in an empty folder; words: what pip installs in it.

    A path file has this environment's packages, and Python does not read the path files there: an editable install of
    the project stays here.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python, elsewhere = folder / "venv" / "bin" / "python", folder / "elsewhere"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = ["install", "--no-deps", "--ignore-installed", "--no-build-isolation", *words]
    subprocess.run([*PIP, "--python", python, *install], check=True)
    elsewhere.mkdir()
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}

    def run(program, *words):
        command = [python.with_name(program), *words]
        return subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Environment with the wheel."""
    return environment(tmp_path_factory.mktemp("installed"), wheel)


def test_wheel_has_the_listed_packages_alone(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == PACKAGES
    assert not tops & {"eval", "serving", "tests", "docs"}  # names of other distributions


def test_wheel_has_every_file_of_the_packages(source, wheel):
    result = {str(path.relative_to(source)) for package in PACKAGES for path in (source / package).rglob("*.*")}
    assert {"vcsd/py.typed", "vcsd_eval/papers/hilos/predictions.csv", "attention_engine/rtl/sparf_engine.sv"} < result
    assert result - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_installed_packages_are_the_wheels(installed):
    done = installed("python", "-c", WHERE)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(PACKAGES)
    assert all("/venv/lib/" in line for line in done.stdout.splitlines())


@pytest.mark.long
def test_plain_install_of_today_runs_a_model(wheel):
    """`pip install` in an empty environment takes the newest versions that pyproject.toml allows."""
    outcome = tried(Row("plain install", (CPU_TORCH,)), wheel)
    assert outcome.passed, f"{outcome.ran}: {outcome.reason}, with {outcome.versions}"


@pytest.mark.slow
def test_installed_command_runs_a_sweep(installed):
    small = ("--set", "context=256", "--set", "batch=1", "--set", "sampled_layers=1")
    done = installed("vcsd", "whatif", "instcsd-overlapped", "--vary", "channels=4,8", *small, "-o", "json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["points"] == 2


@pytest.mark.slow
def test_editable_install_imports_no_module_twice(source, tmp_path):
    run = environment(tmp_path, "-e", source)
    done = run("python", "-c", WHERE)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(source)) for line in done.stdout.splitlines())
    done = run("python", "-c", "import sys, vcsd_cli.main, vcsd_eval.papers.compare; print('eval' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr[-2000:]
