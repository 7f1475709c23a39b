"""Both kinds of medium hold the same blocks of one file."""

import stat

import pytest

from csd_link.medium import FileMedium, MappedMedium, make_window_file
from csd_link.window import BLOCK_BYTES, MAGIC


def test_mapped_and_file_medium_see_each_others_writes(tmp_path):
    path = tmp_path / "file"
    MappedMedium.create(path, 10 * BLOCK_BYTES)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    mapped, file = MappedMedium(path, 2 * BLOCK_BYTES, 6), FileMedium(path, 2 * BLOCK_BYTES, max_bytes=2 * BLOCK_BYTES)
    assert (mapped.blocks, file.blocks) == (6, 8)
    data = bytes(range(256)) * 16 * 5
    file.write(1, data)
    assert mapped.read(1, 5) == data
    mapped.write(3, b"short")
    assert file.read(3)[:6] == b"short" + data[5:6]
    file.write(0, b"padded")
    assert mapped.read(0) == b"padded".ljust(BLOCK_BYTES, b"\0")
    assert path.read_bytes()[: 2 * BLOCK_BYTES] == bytes(2 * BLOCK_BYTES)
    file.close()


def test_read_returns_a_copy(tmp_path):
    MappedMedium.create(tmp_path / "file", BLOCK_BYTES)
    medium = MappedMedium(tmp_path / "file")
    before = medium.read(0)
    medium.write(0, b"changed after it was checked")
    assert before == bytes(BLOCK_BYTES)


@pytest.mark.parametrize("place", [(0, 5), (4 * BLOCK_BYTES, 1), (100, 1), (0, 0)])
def test_window_beyond_its_file_is_refused(tmp_path, place):
    MappedMedium.create(tmp_path / "file", 4 * BLOCK_BYTES)
    with pytest.raises(ValueError, match="no room"):
        MappedMedium(tmp_path / "file", *place)


def test_window_file_must_be_new_zero_or_windows(tmp_path):
    file = tmp_path / "windows"
    make_window_file(file, 3 * BLOCK_BYTES)
    file.write_bytes(MAGIC + bytes(BLOCK_BYTES))
    make_window_file(file, 5 * BLOCK_BYTES)
    make_window_file(file, BLOCK_BYTES)
    assert file.read_bytes() == MAGIC + bytes(5 * BLOCK_BYTES - len(MAGIC))
    file.write_bytes(b"letters to my mother")
    with pytest.raises(ValueError, match="holds something else than a window"):
        make_window_file(file, BLOCK_BYTES)
    assert file.read_bytes() == b"letters to my mother"


def test_space_is_reserved_where_the_window_is(tmp_path, monkeypatch):
    """Each part once, the last one up to the window's end."""
    reserved = []
    monkeypatch.setattr("csd_link.medium.allocate", lambda fd, offset, size, name: reserved.append((offset, size)))
    monkeypatch.setattr("csd_link.medium._PART", 4)
    MappedMedium.create(tmp_path / "file", 13 * BLOCK_BYTES)
    medium = MappedMedium(tmp_path / "file", 2 * BLOCK_BYTES, 10)
    medium.write(1, b"x" * (4 * BLOCK_BYTES))
    medium.read(9)
    medium.write(0, b"again")
    assert reserved == [(BLOCK_BYTES * (2 + at), BLOCK_BYTES * blocks) for at, blocks in ((0, 4), (4, 4), (8, 2))]
