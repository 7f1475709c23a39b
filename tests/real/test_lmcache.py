"""LMCache's engine, launcher and memory with the plug-in that keeps chunks in drives."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.real.conftest import ROOT
from tests.served import serving

CHILD = Path(__file__).with_name("lmcache_child.py")
FOUND = 256  # tokens of whole chunks


@pytest.mark.usefixtures("own_run_dir")
def test_lmcache_loads_chunks_after_restart(vllm_python, tmp_path):
    """An engine finds and loads the KV cache that an engine of an earlier process has stored, in restarted drives."""
    names = [f"{tmp_path.name}-{number}" for number in range(2)]
    for verb in ("store", "load"):
        with serving(tmp_path, *names, flash=tmp_path):
            answer = ask(vllm_python, verb, *names)
        assert answer == {
            "backends": ["LocalCPUBackend", "vcsd"],
            "found": FOUND,
            "loaded": FOUND,
            "equal": True,
            "found_of_others": 0,
        }


def ask(python, *words):
    # without PYTHONHASHSEED, LMCache's keys depend on a random number of each process
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    done = subprocess.run(
        [python, CHILD, *words], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
