"""External parts that tests need: vLLM's environment, NVMeVirt's module, two hosts."""

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from nvmevirt_config.guest import MODULES, find_kernel
from tests.conftest import missing
from tests.real.network import two_hosts

ROOT = Path(__file__).parents[2]
SEED = 0  # of frames that are lost and reordered


@pytest.fixture
def vllm_python():
    """The Python that has vLLM and LMCache."""
    python = ROOT / "build" / "vllm" / "bin" / "python"
    return python if python.is_file() else missing("vllm", f"{python} is not there: ./dev test --real makes it")


@pytest.fixture
def nvmevirt_module(guest_machine, tmp_path):
    """NVMeVirt's module, built from a copy of the checkout that VCSD_NVMEVIRT names, for the guest's kernel."""
    headers = MODULES / find_kernel().name.removeprefix("vmlinuz-") / "build"
    if "VCSD_NVMEVIRT" not in os.environ:
        missing("nvmevirt", "VCSD_NVMEVIRT names no checkout of NVMeVirt (github.com/snu-csl/nvmevirt)")
    if not headers.exists() or not shutil.which("make"):
        missing("nvmevirt", "NVMeVirt cannot be built: apt-get install linux-headers-cloud-amd64 make gcc")
    sources = tmp_path / "nvmevirt"
    shutil.copytree(os.environ["VCSD_NVMEVIRT"], sources, ignore=shutil.ignore_patterns(".git"))
    subprocess.run(["make", "-C", headers, f"M={sources}", "modules"], check=True)
    return sources / "nvmev.ko"


@pytest.fixture
def hosts():
    """Two hosts and the link between them."""
    with ExitStack() as undo:
        try:
            made = undo.enter_context(two_hosts(SEED))
        except OSError as error:
            missing("namespaces", f"no network namespaces ({error}): they need root, iproute2 and /dev/net/tun")
        yield made
