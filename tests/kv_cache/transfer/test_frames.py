"""partner of: kv_cache/transfer/frames.py"""

from __future__ import annotations

import errno
import os

import pytest

from csd_io.direct import open_queue
from csd_io.queue import aligned
from kv_cache.block_table import BlockKey
from kv_cache.transfer.frames import CachedFiles, DirectBlocks, Memory, move

SIZE = 3 * 8192
X, Y = BlockKey("r", 0, "k"), BlockKey("r", 0, "v")


def stores(folder):
    return {
        "memory": Memory(),
        "cached": CachedFiles(folder),
        "direct": DirectBlocks(open_file=lambda nbytes: open_queue(folder, nbytes)),
    }


def filled(frame, seed):
    data = aligned(SIZE)
    data[:] = bytes((seed + 7 * at) % 251 for at in range(SIZE))
    frame.store(0, data)
    return bytes(data)


@pytest.mark.parametrize("source", ["memory", "cached", "direct"])
@pytest.mark.parametrize("target", ["memory", "cached", "direct"])
def test_any_part_moves_between_any_two_tiers(tmp_path, source, target):
    made = stores(tmp_path)
    one, other = made[source].frame(X, SIZE), made[target].frame(Y, SIZE)
    sent, there = filled(one, 1), filled(other, 2)
    move(one, other, 4096, 4096 + 8192, lambda: aligned(4096))
    out = aligned(SIZE)
    other.load(0, out)
    assert bytes(out) == there[:4096] + sent[4096:12288] + there[12288:]
    for frame in (one, other):
        frame.free()
    for store in made.values():
        store.close()


def test_closed_frames_leave_no_files(tmp_path):
    made = stores(tmp_path)
    frames = [made[kind].frame(X, SIZE) for kind in ("cached", "direct")]
    for frame in frames:
        filled(frame, 3)
    assert os.listdir(tmp_path) == []  # files have no names, so none remains after a crash
    before = len(os.listdir("/proc/self/fd"))
    for frame in frames:
        frame.free()
    for store in made.values():
        store.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_page_cache_hits_are_counted_by_the_kernel(tmp_path):
    files = CachedFiles(tmp_path)
    frame = files.frame(X, SIZE)
    filled(frame, 4)
    frame.load(0, aligned(SIZE))
    assert files.read_bytes == SIZE
    assert files.hit_bytes in (SIZE, None)
    frame.free()


def test_a_file_that_ends_early_is_an_error_with_its_name(tmp_path):
    files = CachedFiles(tmp_path)
    frame = files.frame(X, SIZE)
    with pytest.raises(OSError, match="ends before byte 24576") as raised:
        frame.load(0, aligned(SIZE))
    assert raised.value.errno == errno.EIO
    assert str(tmp_path) in raised.value.filename
    assert "k of request r, layer 0" in raised.value.filename
    frame.free()


def test_memory_is_allocated_on_first_write(tmp_path):
    frame = Memory().frame(X, 1 << 30)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    frame.store(0, memoryview(bytes(1 << 20)))
    assert resident() - before < 16 << 20
    frame.free()


def test_a_device_is_shared_by_all_requests(tmp_path):
    queue = open_queue(tmp_path, 4 * SIZE)
    blocks = DirectBlocks(queue)
    frames = [blocks.frame(BlockKey(request, 0, part), SIZE) for request in "ab" for part in "kv"]
    with pytest.raises(OSError) as raised:
        blocks.frame(BlockKey("c", 0, "k"), SIZE)
    assert raised.value.errno == errno.ENOSPC
    frames[0].free()
    blocks.frame(BlockKey("c", 0, "k"), SIZE)
    blocks.close()


def test_block_returns_while_old_copy_is_read(tmp_path):
    blocks = DirectBlocks(open_file=lambda nbytes: open_queue(tmp_path, nbytes))
    left = blocks.frame(X, SIZE)
    there = filled(left, 1)
    back = blocks.frame(X, SIZE)
    filled(back, 2)
    out = aligned(SIZE)
    left.load(0, out)
    assert bytes(out) == there
    left.free()
    back.free()
    blocks.close()


def test_disk_without_discard_support_works(tmp_path, monkeypatch):
    queue = open_queue(tmp_path, 2 * SIZE)

    def broken(offset, size):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(queue, "discard", broken)
    blocks = DirectBlocks(queue)
    for _ in range(4):  # its blocks are free all the same
        blocks.frame(X, 2 * SIZE).free()
    blocks.close()


def test_write_of_zero_bytes_is_an_error(tmp_path, monkeypatch):
    frame = CachedFiles(tmp_path).frame(X, SIZE)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="write accepted no bytes at offset 0"):
        frame.store(0, aligned(SIZE))
    frame.free()
    frame.free()  # its file descriptor may be reused by then


def test_unavailable_memory_is_clear_error():
    for size in (1 << 60, 1 << 70):
        with pytest.raises(OSError, match="bytes of the KV cache in this process") as raised:
            Memory().frame(X, size).store(0, aligned(1))
        assert raised.value.errno == errno.ENOMEM


def test_trim_frees_only_its_tail(tmp_path):
    frame = CachedFiles(tmp_path).frame(X, SIZE)
    there = filled(frame, 6)
    frame.trim(10_000)
    frame.trim(20_000)
    out = aligned(10_000)
    frame.load(0, out)
    assert bytes(out) == there[:10_000]
    with pytest.raises(OSError, match="ends before"):
        frame.load(0, aligned(10_001))
    frame.free()


def test_failed_write_back_is_not_read_as_old_data(tmp_path, monkeypatch):
    """It tells once, and the frame remembers."""
    frame, told, out = CachedFiles(tmp_path).frame(X, SIZE), [], aligned(SIZE)
    filled(frame, 8)

    def tells_once(fd, name):
        told.append(name)
        if len(told) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    monkeypatch.setattr("kv_cache.transfer.frames.check_written_back", tells_once)
    monkeypatch.setattr(frame, "_cached", lambda at, into: len(into))
    frame.load(0, out)  # the page cache has it all
    assert not told
    monkeypatch.setattr(frame, "_cached", lambda at, into: 0)
    for _ in range(2):
        with pytest.raises(OSError, match="k of request r, layer 0"):
            frame.load(0, out)
    frame.free()
