"""`vcsd serve-model`: errors of its options, and a process that serves until a signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from importlib.resources import files

import openai
import pytest

from tests.vcsd_cli.test_main import vcsd

MAIN = [sys.executable, "-c", "from vcsd_cli.main import main; main()"]
SHIPPED = str(files("vcsd") / "shipped" / "checkpoint")

REFUSED = [
    (["nowhere"], "no model at nowhere"),
    (["--policy", "best"], "must be one of reactive"),
    (["--policy", "orbitflow", "--drives", "2"], "--drives 2: the policy orbitflow uses none"),
    (
        ["--policy", "orbitflow", "--method", "sparf"],
        "--method 'sparf': an option of drives, and the policy orbitflow uses none",
    ),
    (
        ["--policy", "orbitflow", "--no-restart-drives"],
        "--no-restart-drives: an option of drives, and the policy orbitflow uses none",
    ),
    (["--device-kv-mib", "64"], "--device-kv-mib: all KV data is in drives"),
    (["--policy", "ours", "--drives", "2", "--method", "magic"], "magic"),
    (["--host", "0.0.0.0"], "set VCSD_API_KEY, or add --api-key KEY"),
    (["--api-key", ""], "--api-key: must be printable ASCII"),
    (["--api-key", "k\n"], "--api-key: must be printable ASCII"),
    (["--host", "192.0.2.1", "--api-key", "k"], "Cannot assign requested address: choose another address or port"),
    (
        ["--policy", "orbitflow", "--files", "/nowhere/at/all"],
        "--files /nowhere/at/all: no such folder, file or device",
    ),
    (["--port", "0", "--max-model-len", "99999"], "the model's context is 4096"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_invalid_option_is_one_line_error(capsys, monkeypatch, words, reason) -> None:
    monkeypatch.delenv("VCSD_API_KEY", raising=False)
    port = [] if "--port" in words else ["--port", "0"]
    code, out, err = vcsd(capsys, monkeypatch, "serve-model", *words, *port)
    lines = [line for line in err.splitlines() if line.startswith("vcsd: ")]
    assert code and not out and len(lines) == 1 and reason in lines[0], err


def test_port_in_use_is_one_line_error(capsys, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = vcsd(capsys, monkeypatch, "serve-model", "--port", port)
    assert code == 1
    assert err == f"vcsd: --host 127.0.0.1 --port {port}: Address already in use: choose another address or port\n"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_missing_package_is_one_line_error(capsys, monkeypatch, missing) -> None:
    monkeypatch.setattr("csd_spec.optional.is_installed", lambda name: name != missing)
    code, _, err = vcsd(capsys, monkeypatch, "serve-model")
    assert (code, err) == (1, f"vcsd: the endpoint needs the package {missing}: pip install 'vcsd[endpoint]'\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_signal(number) -> None:
    """A second signal ends the answer that is being sent, with an error for its client."""
    words = [*MAIN, "serve-model", SHIPPED, "--port", "0"]
    environment = os.environ | {"VCSD_API_KEY": "secret"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr
        before, url = [], None
        while url is None:
            before.append(server.stderr.readline())
            assert before[-1], "".join(before)
            url = next(iter(re.findall(r"serving checkpoint at (\S+):", before[-1])), None)
        assert "KV data: in 2 drives, which attend; only windows stay on the device\n" in before
        with openai.OpenAI(base_url=url, api_key="secret") as client:
            asked = {"model": "checkpoint", "prompt": "The drive ", "max_tokens": 6, "temperature": 0}
            assert client.completions.create(**asked).choices[0].text == "drive "
            key = {"Authorization": "Bearer secret"}
            asking = urllib.request.Request(url.replace("/v1", "/metrics"), headers=key)
            with urllib.request.urlopen(asking) as answer:
                metrics = answer.read().decode()
            for name in ('vcsd_peak_bytes{place="csd"}', 'vcsd_simulated_seconds{work="decode"}', "vcsd_drive_steps"):
                assert float(metrics.partition(f"\n{name} ")[2].split()[0]) > 0
            with pytest.raises(openai.APIError, match="the server is stopping"):
                for at, _ in enumerate(client.completions.create(**asked | {"max_tokens": 4000}, stream=True)):
                    if at in (2, 12):
                        server.send_signal(number)
        said = server.stderr.read()
        assert server.wait() == 0 and said.splitlines()[-1:] == ["stopped"]


def test_drives_that_hold_nothing_are_warned_about() -> None:
    words = [*MAIN, "serve-model", SHIPPED, "--port", "0", "--policy", "ours", "--drives", "2"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        said = next(line for line in server.stderr if "KV data" in line or "warning" in line)
        server.send_signal(signal.SIGINT)
        server.stderr.read()
    assert "may leave its 2 drives empty, as the device has no limit: add --device-kv-mib MIB" in said
