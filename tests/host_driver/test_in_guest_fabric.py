"""nvme-cli in a guest: its words, and what it says."""

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from host_driver import in_guest_fabric


@pytest.mark.parametrize(("words", "said"), [(("list", "-o", "json"), {"a": 1}), (("list",), '{"a": 1}')])
def test_nvme_cli_is_parsed_if_it_is_asked_for_json(monkeypatch, words, said):
    commands = list[tuple[str, ...]]()
    monkeypatch.setattr(in_guest_fabric, "run", lambda *command: commands.append(command) or '{"a": 1}')
    assert in_guest_fabric.nvme(*words) == said
    assert commands == [("/usr/sbin/nvme", *words)]


def test_interfaces_get_addresses_and_are_brought_up(monkeypatch):
    sent = list[tuple[int, bytes]]()
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([path / "lo", path / "eth7"]))
    monkeypatch.setattr(in_guest_fabric, "fcntl", SimpleNamespace(ioctl=lambda line, *words: sent.append(words)))
    in_guest_fabric._network()
    assert [request for request, _ in sent] == [0x8916, 0x891C, 0x8914] * 2
    assert [words[:16].rstrip(b"\0") for _, words in sent] == [b"lo"] * 3 + [b"eth7"] * 3
    assert [words[20:24] for _, words in sent[3:5]] == [bytes([10, 0, 2, 15]), bytes([255, 255, 255, 0])]
    assert {struct.unpack_from("<h", words, 16)[0] for _, words in sent[2::3]} == {0x41}
