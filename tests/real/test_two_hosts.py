"""A decode over NVMe/TCP between two hosts whose link delays, loses and reorders frames, and is cut twice."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from time import sleep

import pytest

from csd_link.connect import find_server
from csd_spec import GetLog, LogPage
from tests.served import HANG_S, until
from vcsd.administer import admin_window, read_log

VCSD = sys.executable, "-c", "from vcsd_cli.main import main; main()"
TOKENS, LAYERS = 64, 4  # LAYERS: of the bundled model
ATTENDS = (TOKENS - 1) * LAYERS
DECODE = "run", "--no-compare", "--max-new-tokens", TOKENS, "--drives", 2, "-o", "json"
NQN = "nqn.2026-11.dev.example:engine"
NAMES = "csd0", "csd1"
DEFAULT_RETRIES, FEW_RETRIES = 15, 3  # TCP gives a connection up after 15 minutes, after 3 s
EXECUTED_ONCE = {"SeqCreate": 1, "KvAppend": LAYERS, "Attend": ATTENDS, "KvFree": 1}


@pytest.mark.usefixtures("own_run_dir")
def test_decode_over_cut_link_executes_commands_once(hosts, tmp_path):
    """Tokens, link bytes and flash pages are those of drives in process, and each drive has executed each command once.

    TCP connections survive the first cut. In the second one the host's TCP gives them up, when drives have executed
    commands whose completions were lost: our initiator connects and sends these commands again.
    """
    expected = json.loads(subprocess.run([*map(str, (*VCSD, *DECODE))], stdout=subprocess.PIPE, check=True).stdout)
    drives, host, link = hosts
    with served(drives, tmp_path):
        transport = f"nvme+tcp://{drives.address}:4420?hostnqn={NQN}"
        with running(host.command(*VCSD, *DECODE, "--transport", transport), stdout=subprocess.PIPE) as decode:
            opened = []
            for attends, tcp_retries in ((ATTENDS // 4, DEFAULT_RETRIES), (ATTENDS // 2, FEW_RETRIES)):
                until(lambda attends=attends: executed(NAMES[0])["Attend"] >= attends)
                opened.append(host.tcp_counters()["ActiveOpens"])
                host.set_tcp_retries(tcp_retries)
                cut(link, drives)
            result = json.loads(decode.communicate(timeout=HANG_S)[0])
        assert all(result[key] == expected[key] for key in ("tokens", "link_bytes", "flash"))
        assert list(map(executed, NAMES)) == [EXECUTED_ONCE] * 2
        assert opened[0] == opened[1] < host.tcp_counters()["ActiveOpens"]
        assert all(each.tcp_counters()["RetransSegs"] for each in (drives, host)) and link.lost and link.reordered


@contextmanager
def served(on, folder):
    """Drives that listen on a host, for one host name alone."""
    (folder / "hosts.yaml").write_text(f"hosts: {{'{NQN}': default}}\n")
    for name in NAMES:
        subprocess.run([*VCSD, "drive", "create", name], check=True)
    listen = "--listen", f"{on.address}:4420", "--listen-remote", "--hosts-file", folder / "hosts.yaml"
    with running(on.command(*VCSD, "drive", "serve", *listen)):
        until(lambda: all(map(find_server, NAMES)))
        yield


@contextmanager
def running(command, **options):
    """A process that ends with the block."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


def cut(link, sender):
    """Cut the link; meanwhile no drive executes a command."""
    with link.cut(sender):
        sleep(1)
        before = list(map(executed, NAMES))
        sleep(1)
        assert list(map(executed, NAMES)) == before


def executed(name):
    """Commands that a drive has executed, by name."""
    window = admin_window(name)
    try:
        log = read_log(window, LogPage.LATENCY)
    finally:
        window.close()
    return Counter({kind: each["commands"] for kind, each in log.items() if kind != GetLog.__name__})
