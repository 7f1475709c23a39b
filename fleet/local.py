"""Local fleet: a process on this machine that runs Ray's head node, which exits with that process."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from csd_link.fleet_table import ClusterAddress, local_file, missing_ray, read_local
from csd_link.liveness import is_running
from csd_link.run_dir import private_dir, run_dir

START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 20.0
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum is 75 MiB; drives do not use it
_POLL_INTERVAL_S = 0.05
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}


def start_local(cpus: float, flash: Path | None) -> tuple[ClusterAddress, str]:
    """Start the process, and wait until its cluster answers.

    Args:
        cpus: CPUs that the cluster declares.
        flash: Folder for flash, from which `stop_local` removes the fleet's files; None uses the run folder.

    Returns:
        The cluster, and the identifier for its fleet.

    Raises:
        ValueError: Ray is not installed, or a local fleet is already up.
        ConnectionError: Ray did not start.
    """
    if missing := missing_ray():
        raise ValueError(f"a fleet needs Ray: {missing.fix}")
    if local := read_local():
        state = "is up" if is_running(local["pid"]) else "has exited and left files"
        raise ValueError(f"a local fleet {state}: end it with vcsd fleet down")
    private_dir(run_dir())
    token, fleet = secrets.token_hex(32), secrets.token_hex(4)
    ray_dir = tempfile.mkdtemp(prefix="vcsd-ray-")  # under /tmp: Ray's sockets need a short path
    environment = {**os.environ, **ClusterAddress("", token).environment, **_QUIET}
    log = Path(ray_dir) / "vcsd.log"
    with log.open("wb") as errors:
        command = [sys.executable, "-m", "fleet.local", ray_dir, str(math.ceil(cpus)), fleet, str(flash or "")]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd="/",
            start_new_session=True,
        )
    try:
        return _await(process, log, token), fleet
    except BaseException:
        _stop(process.pid)
        shutil.rmtree(ray_dir, ignore_errors=True)
        local_file().unlink(missing_ok=True)
        raise


def _await(process: subprocess.Popen[bytes], log: Path, token: str) -> ClusterAddress:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if local := read_local():
            return ClusterAddress(local["address"], token)
        if process.poll() is not None:
            break
        time.sleep(_POLL_INTERVAL_S)
    said = log.read_text(errors="replace").strip().splitlines() or ["it did not answer in time"]
    raise ConnectionError(f"Ray did not start on this machine: {said[-1][:200]}")


def stop_local() -> None:
    """End the local fleet's process, and remove its files; the process may already have exited for any reason."""
    local = read_local()
    if local is None:
        return
    _stop(local["pid"])
    fleet = local["fleet"]
    _await_exit([*run_dir().glob(f"fleet-{fleet}/logs/*.pid"), *run_dir().glob(f"*-{fleet}/pid")])
    folders = [*run_dir().glob(f"*-{fleet}")]  # only this fleet's
    if local["flash"]:
        folders.append(Path(local["flash"]) / f"fleet-{fleet}")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(local["ray_dir"], ignore_errors=True)
    local_file().unlink(missing_ok=True)


def _await_exit(files: Sequence[Path]) -> None:
    """Wait for the drives' processes in these PID files, which exit soon after the process that started them."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for file in files:
        while is_running(int(file.read_text())) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)


def _stop(pid: int) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run Ray's head node until SIGTERM; its address and token are in a private file meanwhile."""
    ray_dir, cpus, fleet, flash = sys.argv[1:]
    signals = {signal.SIGTERM, signal.SIGINT}
    import ray

    context = ray.init(
        "local",  # ignore RAY_ADDRESS
        num_cpus=int(cpus),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=ray_dir,
    )
    try:
        aside = local_file().with_suffix(f".{os.getpid()}")
        aside.touch(mode=0o600)
        token = os.environ["RAY_AUTH_TOKEN"]
        address = context.address_info["gcs_address"]
        content = {"address": address, "pid": os.getpid(), "token": token, "ray_dir": ray_dir}
        content |= {"fleet": fleet, "flash": flash}
        aside.write_text(json.dumps(content))
        aside.replace(local_file())
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        signal.sigwait(signals)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
