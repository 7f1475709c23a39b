"""Notebooks and scripts of examples/ run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ("attach_in_3_lines.py", "kv_larger_than_memory.py", "policy_on_a_trace.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def test_notebook_runs_in_an_empty_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    kernel = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    kernel.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short_and_runs(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 40
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=EXAMPLES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "kv_larger_than_memory.py":
        assert "same tokens as without tiers: True" in done.stdout
