"""What tests with real parts need of this machine."""

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import missing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def vllm_python():
    """The Python that has vLLM and LMCache."""
    python = ROOT / "build" / "vllm" / "bin" / "python"
    return python if python.is_file() else missing("vllm", f"{python} is not there: ./dev vllm makes it")


@pytest.fixture
def network_namespaces():
    """Two hosts on this machine."""
    if os.geteuid():
        missing("namespaces", "network namespaces need root")
    for program in ("ip", "nsenter", "sysctl"):
        if not shutil.which(program):
            missing("namespaces", f"{program} is not installed: apt-get install iproute2 util-linux procps")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        missing("namespaces", "/dev/net/tun is not there")
