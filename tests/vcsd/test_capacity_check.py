"""The space of planned sequences is checked before anything is allocated; if they do not fit, the error is one line."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_spec import LAYOUTS, AttentionConfig, KvAppend, ModelShape, SeqCreate, Status
from tests.vcsd_cli.test_main import PROMPT, vcsd
from vcsd import capacity_check
from vcsd.config import AttachConfig

SHAPE = ModelShape(name="model", layers=2, q_heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(capacity_check, "available_bytes", lambda group: 3 << 20)


@pytest.mark.parametrize("name", LAYOUTS)
def test_estimated_pages_equal_programmed_pages(small_drive, name):
    """But for the last group of each stream, which waits."""
    rows, tokens = 2, 1000
    drive = replace(small_drive, geometry=replace(small_drive.geometry, page_bytes=4096, blocks_per_plane=128))
    drive = replace(drive, dram_bytes=8 << 20)
    device = InProcessDrive(drive)
    create = SeqCreate(rows, SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim, tokens, LAYOUTS[name].code)
    handles = device.submit(create, 0).result().data[0].tolist()
    values = np.random.default_rng(0).standard_normal((rows * tokens, SHAPE.kv_heads, SHAPE.head_dim)).astype("f2")
    for layer in range(SHAPE.layers):
        of_v = values[..., : 0 if LAYOUTS[name].latent else None]
        append = KvAppend(tuple(handles), layer, np.full(rows, tokens), values, of_v)
        assert device.submit(append, 0).result().status is Status.SUCCESS
    ftl = device.firmware.ftl
    streams = sum(m.streams for seq in ftl.sequences.values() for m in seq.maps.values() if m.programmed)
    foreseen = capacity_check.flash_bytes(drive, AttentionConfig(layout=name), SHAPE, rows, tokens)
    assert 0 <= foreseen // (4096 + 32) - ftl.counters.groups <= streams * SHAPE.layers
    device.close()


def test_every_drive_needs_room_for_a_latent_stream(monkeypatch):
    what = AttentionConfig(layout="latent"), replace(SHAPE, kv_heads=1, latent=True), 1, 4096
    needed = capacity_check.flash_bytes(DriveSetConfig().spec, *what)
    monkeypatch.setattr(capacity_check, "available_bytes", lambda group: 2 * needed)
    capacity_check.check_drives(DriveSetConfig(count=2), *what)
    with pytest.raises(ValueError, match="in drives in memory"):
        capacity_check.check_drives(DriveSetConfig(count=3), *what)


def test_mirror_needs_room_for_both_copies(monkeypatch):
    shape = replace(SHAPE, layers=1)
    tokens = 4096
    needed = capacity_check.flash_bytes(DriveSetConfig().spec, AttentionConfig(), shape, 1, tokens)
    monkeypatch.setattr(capacity_check, "available_bytes", lambda group: needed)
    capacity_check.check_attached(AttachConfig(drives=2), AttentionConfig(), shape, 1, tokens)
    with pytest.raises(ValueError, match="in drives in memory"):
        mirrored = AttachConfig(drives=2, redundancy="mirror")
        capacity_check.check_attached(mirrored, AttentionConfig(), shape, 1, tokens)


def test_remote_and_file_drives_need_no_memory_check(little_memory, tmp_path):
    what = AttentionConfig(), SHAPE, 64, 4096
    for drives in (
        DriveSetConfig(transport="window:/dev/shm/somebody"),
        DriveSetConfig(data_dir=tmp_path / "new" / "drives", medium="direct"),
    ):
        capacity_check.check_drives(drives, *what)
    with pytest.raises(
        ValueError, match=r"keys and values of 64 x 4,096 tokens take .* in drives in memory, and there are 3 MiB"
    ):
        capacity_check.check_drives(DriveSetConfig(), *what)


def test_too_small_disk_is_named(monkeypatch, tmp_path):
    free = shutil_usage(1 << 20)
    monkeypatch.setattr(capacity_check.shutil, "disk_usage", free)
    drives = DriveSetConfig(data_dir=tmp_path / "drives", medium="direct")
    with pytest.raises(ValueError, match=r"on the disk of .*drives, and there are 1 MiB: free some, or name a folder"):
        capacity_check.check_drives(drives, AttentionConfig(), SHAPE, 64, 4096)


def shutil_usage(free):
    return lambda path: type("Usage", (), {"free": free})


def test_run_beyond_memory_error_has_remedy(capsys, monkeypatch, little_memory):
    with tempfile.TemporaryDirectory() as folder:
        keep = Path(folder) / "drives"
        run = "run", "--prompt", PROMPT[:40], "--max-new-tokens", "2", "--batch", "16", "-o", "json"
        for more, reason in (
            ((), "in drives in memory, and there are 3 MiB: --data-dir FOLDER --medium direct leaves them in files"),
            (
                ("--data-dir", str(keep), "--medium", "direct"),
                "to compare with, and there are 3 MiB: --no-compare leaves",
            ),
        ):
            code, out, err = vcsd(capsys, monkeypatch, *run, *more)
            assert (code != 0, out, len(err.strip().splitlines())) == (True, "", 1)
            assert reason in err
            assert not keep.exists()
        code, out, _ = vcsd(capsys, monkeypatch, *run, *more, "--no-compare")
        result = json.loads(out)
        assert (code, result["agreement"], len(result["tokens"])) == (0, None, 2)


def test_agreement_is_measured_on_drives_in_files_too(capsys, monkeypatch, tmp_path):
    """The tokens differ at this compression, equally with both media."""
    args = "--compression", "64", "--max-new-tokens", "24", "-o", "json"
    result = []
    for where in ((), ("--data-dir", str(tmp_path / "drives"), "--medium", "direct", "--page-buffer-mib", "1")):
        code, out, _ = vcsd(capsys, monkeypatch, "run", *where, *args)
        assert code == 0
        result.append(json.loads(out)["agreement"])
    assert result[0] == result[1] and not result[0]["tokens_equal"]
    assert [path.name for path in tmp_path.iterdir()] == ["drives"]
