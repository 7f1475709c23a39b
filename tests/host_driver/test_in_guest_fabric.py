"""nvme-cli in a guest: its words, and what it says."""

import pytest

from host_driver import in_guest_fabric


@pytest.mark.parametrize(("words", "said"), [(("list", "-o", "json"), {"a": 1}), (("list",), '{"a": 1}')])
def test_nvme_cli_is_parsed_if_it_is_asked_for_json(monkeypatch, words, said):
    commands = list[tuple[str, ...]]()
    monkeypatch.setattr(in_guest_fabric, "run", lambda *command: commands.append(command) or '{"a": 1}')
    assert in_guest_fabric.nvme(*words) == said
    assert commands == [("/usr/sbin/nvme", *words)]
