"""Files for contributors and for CI: workflow, hooks of commits, citation, container."""

import json
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEV = (ROOT / "dev").read_text()


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def test_workflow_runs_commands_of_dev():
    jobs = read(".github/workflows/test.yml")["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    commands = [run.split()[1] for run in runs if run.startswith("./dev ")]
    assert commands == ["test", "docs"]
    assert all(re.search(rf"^  {command}\) ", DEV, re.MULTILINE) for command in commands)


def test_workflow_installs_packages_of_dev():
    steps = read(".github/workflows/test.yml")["jobs"]["test"]["steps"]
    (install,) = [step["run"] for step in steps if "apt-get" in step.get("run", "")]
    packages = re.search(r"^PACKAGES=\((.*)\)", DEV, re.MULTILINE)[1].split()
    assert set(install.partition("--no-install-recommends")[2].split()) < set(packages)


def test_commit_hooks_run_programs_of_lint():
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    programs = [hook["entry"] for hook in repository["hooks"]]
    lint = re.search(r"^lint\(\) \{\n(.*?)^\}", DEV, re.MULTILINE | re.DOTALL)[1]
    assert len(programs) == 3
    assert all(program.removesuffix(" --fix") in lint for program in programs)


def test_citation_has_version_and_license_of_package():
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == SETTINGS["project"]["version"]
    assert citation["license"] == SETTINGS["project"]["license"]


def test_container_starts_program_of_package():
    text = (ROOT / "Dockerfile").read_text()
    (entry,) = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    assert entry in SETTINGS["project"]["scripts"]
    assert "-c /src/constraints.txt '/src[endpoint,metrics]'" in text  # as its --help offers
