"""A decode in drives over NVMe/TCP whose connections are cut, delayed and damaged; and hosts that are refused.

A proxy stands between our initiator and each drive, with header and data digests on: bytes that are dropped, doubled or
changed inside a TCP stream are damage that TCP did not see, and only digests tell it from data.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from csd_link.host_end import DriveLostError
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import host_nqn
from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.nvmeof.pdu import Digests
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import port_path, private_dir, run_dir
from csd_link.served_drive import ServedDrive
from csd_spec import Command, Completion, DriveError, GetLog, LogPage
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.administer import admin_window, read_log
from vcsd.progress import Tick
from vcsd.transport import FACTORY
from vcsd_eval.verify.decode import ReferenceDecode
from vcsd_eval.verify.faulty_proxy import FAULTS, FaultyProxy

DIGESTS = Digests(header=True, data=True)
MOST_BYTES = 4 << 20  # between two faults of a drive
KINDS = FAULTS
DRIVES, TOKENS = 2, 64  # of a decode
REFUSALS = 10  # of each kind
_LOOPBACK = "127.0.0.1"


class CountingDevice(NvmeDrive):
    """A drive over NVMe/TCP that counts the commands it is given, by name, without those that read logs."""

    def __init__(self, locate: Callable[[], Endpoint], name: str) -> None:
        self.submitted = Counter[str]()
        super().__init__(locate, name, DIGESTS)

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        self.submitted[type(command).__name__] += not isinstance(command, GetLog)
        return super()._submit(command, submit_ns)


@contextmanager
def _drives(count: int, seed: int) -> Iterator[tuple[list[CountingDevice], list[FaultyProxy], list[ServedDrive], str]]:
    """Drives of a server process, each through a proxy, for one host alone, and the host's name."""
    host = host_nqn()
    with tempfile.TemporaryDirectory(prefix="cuts-", dir=private_dir(run_dir())) as scratch, ExitStack() as undo:
        folder = Path(scratch)
        names = [f"{folder.name}-{number}" for number in range(count)]
        drives = [
            ServedDrive(
                name=name, spec=INSTCSD_ZYNQ7045_8CH, listen=Listen(_LOOPBACK, 0, (name,), (AllowedHost(host),))
            )
            for name in names
        ]
        placed = [ServerEndpoint(each, partial(NvmeDrive, partial(_direct, each), host)) for each in drives]
        undo.enter_context(own_server(placed, folder, FACTORY.server))
        proxies, devices = list[FaultyProxy](), list[CountingDevice]()
        for number, drive in enumerate(drives):
            proxies.append(FaultyProxy(_direct(drive).port, random.Random(seed + number), MOST_BYTES, KINDS))
            undo.callback(proxies[-1].close)
            devices.append(CountingDevice(partial(Endpoint, _LOOPBACK, proxies[-1].port, nqn_of(drive.name)), host))
            undo.callback(devices[-1].close)
        yield devices, proxies, drives, host


def _direct(drive: ServedDrive) -> Endpoint:
    return Endpoint(_LOOPBACK, int(port_path(drive.name).read_text()), nqn_of(drive.name))


def _executed(drive: ServedDrive) -> Counter[str]:
    """Commands that a drive has executed, by name, without those that read logs."""
    window = admin_window(drive.name)
    try:
        log = read_log(window, LogPage.LATENCY)
    finally:
        window.close()
    return Counter({name: figures["commands"] for name, figures in log.items() if name != GetLog.__name__})


@torch.inference_mode()
def bench_nvme_cuts(cuts: int, seed: int, tick: Tick, drives: int = DRIVES, tokens: int = TOKENS) -> dict[str, Any]:
    """Repeat decodes of `tokens` tokens until connections to drives had `cuts` faults.

    Returns:
        lost: Tokens that a decode did not reach, and commands that a drive has not executed. wrong: Tokens that differ
            from the undisturbed run. twice: Commands that a drive executed more often than they were submitted.
            refused_*: Refused attaches with another subsystem's NQN, and of other hosts. refusals_missed: Such attaches
            that were accepted, and commands that drives executed meanwhile.
    """
    decode = ReferenceDecode.of(tokens, seed, drives)
    broken, runs, reason = Counter[str](), 0, ""
    with _drives(drives, seed) as (devices, proxies, served, host):
        before = [_executed(each) for each in served]
        while (done := sum(proxy.count for proxy in proxies)) < cuts and not reason:
            _set(proxies, True)
            runs += 1
            try:
                with decode.in_drives(drives=devices):
                    broken += decode.repeat()
            except DriveError as error:
                broken["lost"] += tokens
                reason = str(error)
            _set(proxies, False)
            for _ in range(min(cuts, sum(proxy.count for proxy in proxies)) - done):
                tick(None)
        for drive, device, counts in zip(served, devices, before, strict=True):
            executed = _executed(drive) - counts
            broken["twice"] += (executed - device.submitted).total()
            broken["lost"] += (device.submitted - executed).total()
        refusals = _refusals(served, host)
        faults = {f"faults_{kind}": sum(proxy.faults[kind] for proxy in proxies) for kind in FAULTS}
    count = sum(faults.values())
    return {"cuts": count, **{key: broken[key] for key in ("lost", "wrong", "twice")}, **refusals, **faults} | {
        "decodes": runs,
        "tokens_of_each": tokens,
        "reason": reason,
    }


def _set(proxies: list[FaultyProxy], is_active: bool) -> None:
    for proxy in proxies:
        proxy.is_active = is_active


def _refusals(drives: list[ServedDrive], host: str) -> dict[str, int]:
    """Attaches that must be refused."""
    before, refused = [_executed(served) for served in drives], Counter[str]()
    for drive in drives:
        at = _direct(drive)
        for _ in range(REFUSALS):
            for kind, nqn, name in (("nqn", f"{at.nqn}x", host), ("host", at.nqn, host_nqn())):
                try:
                    NvmeDrive(partial(Endpoint, at.host, at.port, nqn), name, DIGESTS).close()
                except DriveLostError:
                    refused[kind] += 1
    missed = 2 * REFUSALS * len(drives) - refused.total()
    changed = sum((_executed(served) - counts).total() for served, counts in zip(drives, before, strict=True))
    return {"refused_nqn": refused["nqn"], "refused_host": refused["host"], "refusals_missed": missed + changed}
