"""Pages in a file read with direct I/O: the same bits as in memory for every read, and damage is
detected when it is read.

partner of: ftl/flash/content.py, ftl/flash/damage.py, csd_io/medium.py
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from attention_engine import METHODS
from csd_firmware import InProcessDrive
from csd_io.folder import DiskFolder
from csd_io.medium import BLOCK
from csd_spec import LAYOUTS, Attend, Flush, KvAppend, KvCrop, KvRead, SeqCreate, Status
from csd_spec.view import in_flash
from ftl import Ftl, Medium, Nand, UncorrectableReadError
from ftl.flash.content import DirectPageStore
from ftl.flash.files import CONTENT, NandFiles
from ftl.kv.values import is_value
from vcsd_eval.verify.random_host import DRIVE, RandomHost

HEADS, DIM = 2, 32
FILES = [Medium("direct", BLOCK), Medium("direct", 40 * BLOCK)]


def rows(generator, tokens):
    return generator.standard_normal((tokens, HEADS, DIM)).astype(np.float16)


def opened(drive, folder, medium):
    return InProcessDrive(drive, folder, medium=medium)


def run(device, command):
    done = device.submit(command, device.firmware.free_ns).result()
    assert done.status is Status.SUCCESS, done.reason
    return done


def asked(device, layout, seed=0):
    """Run random commands of all kinds; returns their results."""
    generator, answers = np.random.default_rng(seed), []
    create = SeqCreate(count=2, layers=2, kv_heads=HEADS, head_dim=DIM, max_tokens=400, layout=LAYOUTS[layout].code)
    handles = [int(handle) for handle in run(device, create).data[0]]
    k, v = rows(generator, 500), rows(generator, 500)
    for layer in range(2):
        run(device, KvAppend(seqs=tuple(handles), layer=layer, lengths=np.array([300, 200]), k=k, v=v))
    names = [name for name in ("dense", "sparf", "quest", "h2o", "oracle", "sparq", "twilight") if name in METHODS]
    for name in ["progressive"] if LAYOUTS[layout].coarse else names:
        for layer in range(2):
            q, k, v = (
                generator.standard_normal((2, HEADS, 2, DIM)).astype(np.float16),
                rows(generator, 2),
                rows(generator, 2),
            )
            params = {"r": 4, "top_k": np.array([40, 30]), "recent": np.array([8, 8])}
            done = run(device, Attend(seqs=tuple(handles), layer=layer, q=q, k=k, v=v, method=name, **params))
            answers += [*done.data, done.finish_ns, done.flash]
    run(device, KvCrop(seqs=(handles[0],), layer=1, lengths=np.array([133])))
    run(device, Flush())
    for layer in range(2):
        answers += [*run(device, KvRead(seqs=(handles[1],), layer=layer)).data]
        answers += [*run(device, KvRead(seqs=(handles[0],), layer=layer, first=100, tokens=30)).data]
    return answers


def assert_same(answers, others):
    for one, other in zip(answers, others, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
        else:
            assert one == other


@pytest.mark.parametrize(
    ("medium", "page_bytes", "layout"),
    [
        *((file, 512, "fp16") for file in FILES),
        (FILES[1], 4096, "int4"),
        (FILES[1], 512, "progressive"),
        (FILES[1], 4096, "progressive"),
    ],
)
def test_attention_bits_and_times_equal_on_all_media(small_drive, tmp_path, medium, page_bytes, layout):
    geometry = replace(small_drive.geometry, page_bytes=page_bytes, blocks_per_plane=128)
    drive = replace(small_drive, geometry=geometry, dram_bytes=8 << 20, cache_bytes=8 * page_bytes)
    expected = asked(memory := InProcessDrive(drive, tmp_path / "memory"), layout)
    memory.close()
    assert_same(asked(device := opened(drive, tmp_path / "files", medium), layout), expected)
    assert device.firmware.ftl.nand.page_store.counts.wanted > 0
    device.close()
    for name in ("memory", "files"):
        folder, answers = tmp_path / name, []
        for kind in (Medium(), medium):
            shutil.copytree(folder, tmp_path / f"{name}-{kind.kind}")
            device = opened(drive, tmp_path / f"{name}-{kind.kind}", kind)
            answers.append(asked(device, layout, seed=1))
            device.close()
        assert_same(*answers)


def test_step_keeps_read_pages_next_keeps_frequent(small_drive, tmp_path):
    drive = replace(small_drive, geometry=replace(small_drive.geometry, page_bytes=BLOCK))
    NandFiles.make(folder := DiskFolder(tmp_path), drive.geometry)
    nand = Nand(drive.geometry, folder=folder, medium=Medium("direct", 2 * BLOCK))
    lanes = drive.geometry.lanes
    ppns = np.arange(8, dtype=np.uint32)
    data = np.random.default_rng(0).integers(0, 255, (8, BLOCK), np.uint8)
    assert lanes == 4 and nand.program(ppns, data, np.arange(1, 9, dtype=np.uint64)) == 8
    counts = nand.page_store.counts
    for _ in range(3):
        nand.page_store.begin()
        np.testing.assert_array_equal(nand.read(ppns[:2]), data[:2])
    assert (counts.asked, counts.hits) == (2 * BLOCK, 4 * BLOCK)
    nand.page_store.begin()
    np.testing.assert_array_equal(nand.read(ppns), data)
    assert np.array_equal(nand.content, nand.content) and (nand.content[:8] == data).all()
    nand.page_store.begin()
    assert (nand.content[2:8] == 0).all() and (nand.content[:2] == data[:2]).all()
    assert counts.wasted == 0
    nand.page_store.close()


def copies(folder, count):
    return [shutil.copytree(folder, folder.parent / f"{folder.name}-{number}") for number in range(count)]


def state_of(folder, medium):
    """Content of a drive after power-on: rows of every sequence, None if it has failed; and logical pages."""
    nand = Nand(DRIVE.geometry, folder=DiskFolder(folder), medium=medium)
    ftl = Ftl(DRIVE, nand)
    state = {}
    for handle, seq in list(ftl.sequences.items()):
        try:
            state[handle] = [ftl.read_back(handle, layer)[:2] for layer in range(seq.layers)]
        except UncorrectableReadError:
            state[handle] = None
    pages = []
    for lpn in range(ftl.blocks.pages):
        try:
            pages.append(ftl.blocks.read(np.array([lpn]), 0)[0].tobytes())
        except UncorrectableReadError:
            pages.append(None)
    nand.page_store.close()
    return state, pages


def values_of(folder):
    """Values of a drive that can be read, by the handle of their sequence."""
    nand = Nand(DRIVE.geometry, folder=DiskFolder(folder))
    ftl, values = Ftl(DRIVE, nand), {}
    for handle, seq in ftl.sequences.items():
        if is_value(seq.label) and not seq.failed:
            values[handle] = ftl.read_value(handle, max(seq.names.values()), 0)[0]
    nand.page_store.close()
    return values


def assert_same_state(one, other):
    assert one[1] == other[1]
    assert set(one[0]) == set(other[0])
    for handle, layers in one[0].items():
        assert (layers is None) == (other[0][handle] is None)
        for layer, theirs in zip(layers or (), other[0][handle] or (), strict=True):
            for a, b in zip(layer, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("medium", FILES[:2])
@pytest.mark.parametrize("seed", range(4))
def test_power_cut_leaves_same_drive_on_all_media(tmp_path, medium, seed):
    """Power is lost in the middle of random verbs, and the pages that were written last are torn."""
    folder, generator = tmp_path / "drive", np.random.default_rng(seed)
    folder.mkdir()
    NandFiles.make(files := DiskFolder(folder), DRIVE.geometry)
    nand = Nand(DRIVE.geometry, folder=files, medium=medium)
    host = RandomHost(seed, nand)
    for turn in range(6):
        for _ in range(int(generator.integers(3, 12))):
            host.step()
        here = tmp_path / f"{turn}"
        shutil.copytree(folder, here)
        newest = np.argsort(nand.write_numbers[ppns := nand.programmed()])[-int(generator.integers(1, 4)) :]
        with (here / CONTENT).open("r+b") as file:
            for ppn in ppns[newest].tolist():
                file.seek(ppn * DRIVE.geometry.page_bytes + 100)
                file.write(generator.integers(0, 255, 300, np.uint8).tobytes())
        one, other = copies(here, 2)
        assert_same_state(state_of(one, Medium()), state_of(other, medium))
    nand.page_store.close()


@pytest.mark.parametrize("medium", FILES[:2])
def test_damage_found_at_read_and_not_moved_as_valid(tmp_path, medium):
    damaged = set()
    for seed in range(10):
        folder, generator = tmp_path / f"{medium.kind}{medium.cache_bytes}-{seed}", np.random.default_rng(seed)
        folder.mkdir()
        NandFiles.make(files := DiskFolder(folder), DRIVE.geometry)
        host = RandomHost(seed, Nand(DRIVE.geometry, folder=files))
        for _ in range(40):
            host.step()
        host.ftl.flush(0)
        used = [m.flash_slots() for seq in host.ftl.sequences.values() for m in seq.maps.values()]
        used.append(host.ftl.blocks.map[in_flash(host.ftl.blocks.map)])
        ppn = int(generator.choice(np.concatenate(used)))
        with (folder / CONTENT).open("r+b") as file:
            file.seek(ppn * DRIVE.geometry.page_bytes)
            file.write(generator.integers(0, 255, DRIVE.geometry.page_bytes, np.uint8).tobytes())
        held = Nand(DRIVE.geometry, folder=DiskFolder(folder), medium=medium)
        ftl = Ftl(DRIVE, held)
        ftl.collector._wear_level_block(int(held.block_of(np.array([ppn]))[0]), 0)  # its block's valid pages are moved
        ftl.flush(0)
        held.page_store.close()
        sequences, pages = state_of(folder, Medium())
        values = values_of(folder)
        for handle, stored in host.model.items():
            if sequences[handle] is None:
                damaged.add("failed")
                continue
            layers = stored.layers if stored.value is None else sequences[handle]
            for layer, theirs in zip(layers, sequences[handle], strict=True):
                for a, b in zip(layer, theirs, strict=True):
                    np.testing.assert_array_equal(a, b)
            assert stored.value is None or values[handle] == stored.value
        for lpn, page in enumerate(pages):
            assert page is None or page == host.blocks[lpn].tobytes()
    assert "failed" in damaged


def test_invalid_medium_is_refused(small_drive, tmp_path):
    with pytest.raises(ValueError, match="medium = 'tape': must be one of memory, direct"):
        Medium("tape")
    with pytest.raises(ValueError, match="cache_bytes = 7"):
        Medium("direct", 7)
    with pytest.raises(ValueError, match="medium = direct: needs a folder"):
        InProcessDrive(small_drive, medium=Medium("direct"))
    odd = replace(small_drive, geometry=replace(small_drive.geometry, page_bytes=6000 // 16 * 16))
    with pytest.raises(ValueError, match="do not fill blocks of 4096: take memory"):
        InProcessDrive(odd, tmp_path / "odd", medium=Medium("direct"))


def test_long_ranges_are_read_in_parts(tmp_path):
    """More than 256 KiB in a row, and short ranges among them."""
    path = tmp_path / "pages"
    geometry = replace(DRIVE.geometry, blocks_per_plane=1024)
    pages = np.random.default_rng(0).integers(0, 256, (geometry.pages, geometry.page_bytes), np.uint8)
    path.write_bytes(pages.tobytes())
    store, count = DirectPageStore(geometry, path, 0), (600 << 10) // geometry.page_bytes
    assert count + 202 < geometry.pages
    wanted = np.concatenate([np.arange(3, 3 + count), [count + 200, count + 201]]).astype(np.uint32)
    assert store.page_in(wanted).size == 0
    assert np.array_equal(store.pages[wanted], pages[wanted])
    store.close()
