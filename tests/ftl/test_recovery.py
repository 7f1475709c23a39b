"""Power loss at every moment; and the judge detects the data that a careless drive would lose.

partner of: ftl/journal.py, eval/verify/crash.py, eval/verify/tested_storage.py
"""

import zlib

import numpy as np
import pytest

from csd_io.folder import DiskFolder
from csd_spec import LAYOUTS
from csd_spec.view import UNMAPPED
from ftl import Ftl, Nand, OutOfSpaceError, UncorrectableReadError
from ftl.flash import tag
from ftl.flash.collect import GarbageCollector
from ftl.flash.content import DirectPageStore
from ftl.flash.files import NandFiles
from ftl.flash.placement import Placement
from ftl.journal import Journal
from ftl.kv.map import KvMap
from ftl.kv.prefix_index import PrefixIndex
from ftl.recovery import TagIndex
from vcsd_eval.verify import random_host
from vcsd_eval.verify.crash import DRIVE, bench_crash, embedding_rows

LAYOUT = LAYOUTS["fp16"].paged(512, 16, 4)


def rows(generator, tokens):
    return generator.standard_normal((tokens, 2, 16)).astype(np.float16)


def restarted(ftl):
    """The same array under a controller that knows nothing."""
    ftl.nand.power_on()
    return Ftl(DRIVE, ftl.nand)


@pytest.mark.parametrize("seed", range(3))
def test_power_cuts_lose_nothing_flushed(seed):
    result = bench_crash(800, seed)
    assert result["cuts"] >= 800
    assert (result["lost"], result["wrong"], result["recovered"]) == (0, 0, result["cuts"])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("flushes", [1, 3])
def test_a_record_without_room_for_a_copy_is_followed_by_a_checkpoint(monkeypatch, place, flushes):
    """A record after a gap could not be replayed, so later flushes would be lost though they succeeded."""
    ftl, generator = Ftl(DRIVE), np.random.default_rng(0)
    handles, stored = ftl.create(4, 1, 2, LAYOUT), {}
    ftl.flush(0)

    def append(some):
        for handle in some:
            k = rows(generator, 5)
            ftl.append([handle], 0, np.array([5]), k, k, 0)
            stored[handle] = np.concatenate([stored[handle], k]) if handle in stored else k

    append(handles)
    real, places = Journal._write_place, []

    def full(journal, number, record, start_ns):
        places.append(number)
        if number == place:
            raise OutOfSpaceError("full")
        return real(journal, number, record, start_ns)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_write_place", full)
        with pytest.raises(OutOfSpaceError):
            ftl.flush(0)
    assert places == list(range(place + 1))
    for _ in range(flushes):
        append(handles[:2])
        ftl.flush(0)
    again = restarted(ftl)
    assert not again.findings
    for handle in handles:
        np.testing.assert_array_equal(again.read_back(handle, 0)[0], stored[handle])


@pytest.mark.parametrize("medium", ["direct"])
def test_power_cuts_lose_nothing_of_drives_in_files(medium):
    result = bench_crash(100, 0, medium=medium)
    assert result["medium"] == medium
    assert (result["cuts_of_the_host"], result["kills"]) == (25, 25)
    assert result["cuts"] >= 150 and result["writes_lost"] > 0
    assert (result["lost"], result["wrong"], result["recovered"]) == (0, 0, result["cuts"])


def test_judge_detects_stale_page_of_direct_medium(monkeypatch):
    monkeypatch.setattr(DirectPageStore, "write", lambda self, ppns, data: None)
    monkeypatch.setattr(DirectPageStore, "discard", lambda self, first, count: None)
    monkeypatch.setattr(random_host, "FORMS", random_host.FORMS[:3])  # the other forms trust the form stated in a page
    results = (bench_crash(100, seed, medium="direct") for seed in range(9, 20))  # it shows where a drive reads its own
    assert any(result["lost"] + result["wrong"] for result in results)


def test_judge_detects_key_of_two_sequences(monkeypatch):
    original = PrefixIndex.bind
    monkeypatch.setattr(PrefixIndex, "bind", lambda self, *named: original(self, *named) and set())
    assert any(bench_crash(500, seed)["wrong"] for seed in range(1, 9))


def test_judge_detects_overwritten_value_without_copy(monkeypatch):
    original = KvMap.forget

    def forget_alone(self, seq):
        original(self, seq)
        self.changes.named.discard(seq.handle)

    monkeypatch.setattr(KvMap, "forget", forget_alone)
    assert any(bench_crash(500, seed)["lost"] for seed in range(4))


def test_judge_detects_unsynced_writes(monkeypatch):
    monkeypatch.setattr(Nand, "sync", lambda self: None)
    results = (bench_crash(100, seed, medium="direct") for seed in range(10))
    assert any(result["lost"] + result["wrong"] for result in results)


def test_judge_detects_blocks_erased_too_early(monkeypatch):
    original = GarbageCollector.reclaim

    def erase_first(self, start_ns, everything):
        for block in self.store.placement.erasable_blocks():
            self.store.erase(block, start_ns)
        return original(self, start_ns, everything)

    monkeypatch.setattr(GarbageCollector, "reclaim", erase_first)
    result = bench_crash(1000, 3)
    assert result["lost"] + result["wrong"] > 0


def test_judge_detects_accepted_torn_pages(monkeypatch):
    monkeypatch.setattr(Nand, "intact", lambda self, ppns: self.write_numbers[ppns] > 0)
    try:
        result = bench_crash(1500, 0)
        findings = result["lost"] + result["wrong"]
    except (ValueError, KeyError, zlib.error):  # recovery took garbage for a record
        findings = 1
    assert findings


def test_power_loss_keeps_exactly_flushed_rows():
    ftl, generator = Ftl(DRIVE), np.random.default_rng(0)
    flushed, later = ftl.create(2, 2, 2, LAYOUT)
    k = rows(generator, 75)
    for layer in range(2):
        ftl.append([flushed], layer, np.array([75]), k, k, 0)
    ftl.flush(0)
    ftl.append([flushed], 0, np.array([75]), k, k, 0)
    ftl.append([later], 0, np.array([75]), k, k, 0)
    again = restarted(ftl)
    assert again.sequence(flushed).lengths.tolist() == [75, 75]
    assert again.sequence(later).lengths.tolist() == [0, 0]
    np.testing.assert_array_equal(again.read_back(flushed, 1)[0], k)


def test_pages_of_earlier_owner_not_found():
    """A damaged page is lost, even if an older page has the same tag, as one in a block that is not erased yet."""
    ftl, generator, handles = Ftl(DRIVE), np.random.default_rng(0), []
    for _ in range(2):
        ftl.kv.owners.next = 7  # numbers come again after tag.MAX_OWNERS sequences
        (handle,) = ftl.create(1, 1, 2, LAYOUT)
        k = rows(generator, 75)
        ftl.append([handle], 0, np.array([75]), k, k, 0)
        ftl.flush(0)
        page = ftl.sequence(handle).maps["k"].slots[0, 0, 0]
        number = int(ftl.nand.block_of(page))
        block = ftl.nand.pages_of(number)
        handles.append((handle, page, number, ftl.nand.content[block], ftl.nand.spare[block]))
        if len(handles) == 1:
            ftl.free([handle], 0)
    (_, old, number, content, spare), (handle, page, *_) = handles
    block = ftl.nand.pages_of(number)
    assert not ftl.nand.tags[block].any()
    ftl.nand.content[block], ftl.nand.spare[block] = content, spare
    ftl.nand.erase_count[number] -= 1
    assert ftl.nand.tags[old] == ftl.nand.tags[page]
    ftl.nand.content[page, :9] ^= 3  # beyond correction
    again = restarted(ftl)
    assert again.sequences[handle].failed and len(again.findings) == 1


def test_partial_copy_group_keeps_owner():
    form = LAYOUTS["int4"].paged(512, 16, 16)
    assert (form.n, form.T) == (16, 56)  # neither divides the other
    ftl, k = Ftl(DRIVE), rows(np.random.default_rng(0), 58)
    (handle,) = ftl.create(1, 1, 2, form)
    for first, end in ((0, 53), (53, 57), (57, 58)):  # another owner each time; the second one fills the group
        ftl.append([handle], 0, np.array([end - first]), k[first:end], k[first:end], 0)
        ftl.flush(0)
        ftl = restarted(ftl)
    assert (ftl.findings, ftl.sequences[handle].failed) == ((), False)
    np.testing.assert_array_equal(embedding_rows(ftl, handle, 0), k)


def test_recovered_drive_accepts_commands():
    ftl, generator = Ftl(DRIVE), np.random.default_rng(0)
    (handle,) = ftl.create(1, 1, 2, LAYOUT)
    k = rows(generator, 400)
    for start in range(0, 400, 50):
        ftl.append([handle], 0, np.array([50]), k[start : start + 50], k[start : start + 50], 0)
        ftl.flush(0)
        ftl = restarted(ftl)
    np.testing.assert_array_equal(ftl.read_back(handle, 0)[1], k)
    assert ftl.create(1, 1, 2, LAYOUT)[0] > handle


def test_unflushed_tokens_never_reappear():
    """The same groups are written again with other tokens; the pages of the lost ones are still in flash."""
    ftl, generator = Ftl(DRIVE), np.random.default_rng(0)
    (handle,) = ftl.create(1, 1, 2, LAYOUT)
    first, lost, again = rows(generator, 40), rows(generator, 60), rows(generator, 60)
    ftl.append([handle], 0, np.array([40]), first, first, 0)
    ftl.flush(0)
    ftl.append([handle], 0, np.array([60]), lost, lost, 0)
    ftl = restarted(ftl)
    ftl.append([handle], 0, np.array([60]), again, again, 0)
    ftl.flush(0)
    programmed = ftl.nand.programmed()
    tags = ftl.nand.tags[programmed].tolist()
    assert len(set(tags)) == len(tags)  # a tag is written once
    ftl = restarted(ftl)
    np.testing.assert_array_equal(ftl.read_back(handle, 0)[0], np.concatenate([first, again]))


def test_a_drive_on_files_survives_its_process(tmp_path):
    generator = np.random.default_rng(0)
    folder = DiskFolder(tmp_path)
    NandFiles.make(folder, DRIVE.geometry)
    ftl = Ftl(DRIVE, Nand(DRIVE.geometry, folder=folder))
    (handle,) = ftl.create(1, 1, 2, LAYOUT)
    k = rows(generator, 75)
    ftl.append([handle], 0, np.array([75]), k, k, 0)
    ftl.flush(0)
    del ftl
    again = Ftl(DRIVE, Nand(DRIVE.geometry, folder=DiskFolder(tmp_path)))
    np.testing.assert_array_equal(again.read_back(handle, 0)[0], k)


def test_shared_pages_are_freed_with_last_fork():
    ftl, generator = Ftl(DRIVE), np.random.default_rng(0)
    (parent,) = ftl.create(1, 1, 2, LAYOUT)
    k = rows(generator, 100)
    ftl.append([parent], 0, np.array([100]), k, k, 0)
    written = ftl.counters.groups
    child = ftl.fork(parent)
    assert ftl.counters.groups == written
    more = [rows(generator, 40), rows(generator, 60)]
    for handle, new in zip((parent, child), more, strict=True):
        ftl.append([handle], 0, np.array([len(new)]), new, new, 0)
    ftl.crop(parent, 0, 90, 0)
    ftl.flush(0)
    ftl = restarted(ftl)
    ftl.free([parent], 0)
    ftl.flush(0)
    np.testing.assert_array_equal(ftl.read_back(child, 0)[0], np.concatenate([k, more[1]]))
    ftl.free([child], 0)
    ftl.flush(0)
    ftl.flush(0)
    assert int(ftl.placement.valid.sum()) == ftl.journal.pages.size


def test_newest_intact_page_of_same_tag_found():
    nand, lanes = Nand(DRIVE.geometry), DRIVE.geometry.lanes
    ppns = np.arange(2 * lanes, dtype=np.uint32)
    tags = np.sort(tag.block_tags(ppns % 5)) + np.uint64(10)
    data = np.zeros((ppns.size, DRIVE.geometry.page_bytes), np.uint8)
    numbers = np.where(ppns % 3 == 0, 50, ppns + 1).astype(np.uint64)  # copies of a write have its number
    nand.program(ppns, data, tags, numbers)
    nand.damage.pages = {int(ppns[-1])}
    pages = nand.programmed()
    index = TagIndex(nand, pages, nand.tags[pages])
    wanted = np.concatenate([tags[:1] - np.uint64(1), np.unique(tags), tags[-1:] + np.uint64(1)])
    for after in (0, 5, 49, 50):
        expected = []
        for page_tag in wanted:
            fit = [
                i for i, p in enumerate(pages.tolist()) if tags[p] == page_tag and numbers[p] > after and p != ppns[-1]
            ]
            best = max(fit, key=lambda i: (numbers[pages[i]], i), default=None)
            expected.append(UNMAPPED if best is None else pages[best])
        for order in (slice(None), slice(None, None, -1)):
            assert index.find(wanted[None, order], after)[0].tolist() == expected[order]
    assert index.damaged(tag.PageKind.BLOCK)[1].tolist() == [numbers[-1]]


def test_each_page_in_use_counts_once():
    placement, seen = Placement(Nand(DRIVE.geometry)), np.zeros(DRIVE.geometry.pages, np.uint8)
    g = DRIVE.geometry
    for pages in ([0, g.lanes, 1], [1, 2 * g.lanes, g.superblock_pages + 1]):
        placement.count(np.array(pages, np.uint32), seen)
    assert placement.valid[: g.lanes + 2].tolist() == [3, 1, *[0] * (g.lanes - 1), 1]


@pytest.mark.parametrize("m", [2, 8])
def test_fork_in_another_layout_survives_restart(m):
    ftl, generator = Ftl(DRIVE), np.random.default_rng(0)
    (handle,) = ftl.create(1, 2, 2, LAYOUT)
    k = rows(generator, 200)
    ftl.append([handle], 1, np.array([200]), k, k, 0)
    child = ftl.fork(handle)
    ftl.relayout(child, m, 0)
    assert (ftl.sequence(handle).layout.m, ftl.sequence(child).layout.m) == (4, m)
    ftl.flush(0)
    ftl = restarted(ftl)
    for sequence in (handle, child):
        np.testing.assert_array_equal(ftl.read_back(sequence, 1)[0], k)
    assert ftl.sequence(child).layout.m == m


def test_recovered_sums_of_v_equal_recorded():
    ftl = Ftl(DRIVE)
    (handle,) = ftl.create(1, 2, 2, LAYOUT)
    rows = np.ones((7, 2, 16), np.float16)
    for layer in range(2):
        ftl.append([handle], layer, np.array([7]), rows, rows, 0)
    ftl.sequence(handle).v_sums = np.arange(64, dtype=np.float32).reshape(2, 2, 16)
    ftl.flush(0)
    ftl.nand.power_on()
    np.testing.assert_array_equal(Ftl(DRIVE, ftl.nand).sequence(handle).v_sums, ftl.sequence(handle).v_sums)


def test_missing_file_is_the_only_finding():
    nand = Nand(DRIVE.geometry)
    nand.damage.files.append("spare.bin: is missing")
    assert "spare.bin: is missing" in Ftl(DRIVE, nand).findings


def test_empty_blocks_are_garbage_unless_data_lost():
    """What shows a loss stays until it was reported."""
    ftl = Ftl(DRIVE)
    (handle,) = ftl.create(1, 1, 2, LAYOUT)
    ftl.flush(0)
    rows = np.ones((400, 2, 16), np.float16)
    ftl.append([handle], 0, np.array([400]), rows, rows, 0)
    ftl.nand.power_on()
    again = Ftl(DRIVE, ftl.nand)
    assert again.store.garbage and again.store.garbage == again.placement.erasable_blocks()
    ftl.nand.power_on()
    ftl.nand.damage.files.append("blocks.bin: is cut")
    assert Ftl(DRIVE, ftl.nand).store.garbage == []


def test_without_a_journal_an_unreadable_page_is_lost_and_not_what_it_held_before():
    ftl, page = Ftl(DRIVE), DRIVE.geometry.page_bytes
    ftl.blocks.resize(8)
    for content in (1, 2):
        ftl.blocks.write(np.arange(8), np.full((8, page), content, np.uint8), 0)
        ftl.flush(0)
    for ppn in (*ftl.journal.pages, ftl.blocks.map[3]):
        ftl.nand.content[ppn] += 1
    again = restarted(ftl)
    assert "block namespace: logical page 3 cannot be read" in again.findings
    assert again.blocks.read(np.array([2]), 0)[0].tolist() == [[2] * page]
    with pytest.raises(UncorrectableReadError):
        again.blocks.read(np.array([3]), 0)
