"""`vcsd guest load`: the reservation of its options."""

import pytest

from nvmevirt_config.module import Reservation
from tests.vcsd_cli.test_main import vcsd
from vcsd_cli import guest


@pytest.mark.parametrize(
    ("words", "reservation"),
    [
        ((), Reservation()),
        (
            ("--start", "2048", "--size", "512", "--cpus", "3,5,4"),
            Reservation(start_bytes=2048 << 20, size_bytes=512 << 20, cpus=(3, 5, 4)),
        ),
    ],
)
def test_module_is_loaded_on_the_reserved_memory(capsys, monkeypatch, tmp_path, words, reservation):
    loaded = list[object]()
    monkeypatch.setattr(guest, "load", lambda *what: loaded.append(what))
    module = tmp_path / "nvmev.ko"
    code, said, err = vcsd(capsys, monkeypatch, "guest", "load", "--module", str(module), *words)
    assert (code, said, loaded) == (0, "", [(module, reservation)])
    assert f"{reservation.storage_start_bytes:#x}" in err.replace("\n", "")


def test_cores_that_are_no_numbers_are_refused(capsys, monkeypatch):
    code, said, err = vcsd(capsys, monkeypatch, "guest", "load", "--dry-run", "--cpus", "1,x")
    assert (code, said) == (1, "") and "--cpus" in err
