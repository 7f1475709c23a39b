"""The public interface of the FTL against a dictionary of arrays.

partner of: ftl/kv/append.py, ftl/kv/fork_crop.py, ftl/kv/map.py, ftl/kv/pages.py, ftl/kv/reader.py, ftl/kv/relayout.py,
ftl/kv/sequence.py, ftl/counters.py, ftl/errors.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from csd_spec import LAYOUTS, DriveSpec, PageFormat
from csd_spec.view import in_flash
from ftl import FaultPlan, Ftl, Nand, OutOfSpaceError, ReadOnlyError, UnknownSequenceError
from ftl.flash import tag
from ftl.flash.tag import MAX_GROUPS, PageKind
from tests.properties import examples
from vcsd_eval.verify.crash import embedding_rows

HEADS, LAYERS, DIM = 2, 2, 8


def make(drive: DriveSpec, m: int = 4, layout: str = "fp16") -> tuple[Ftl, PageFormat]:
    return Ftl(drive), LAYOUTS[layout].paged(drive.geometry.page_bytes, DIM, m)


def rows(generator, tokens, dim=DIM):
    return generator.standard_normal((tokens, HEADS, dim)).astype(np.float16)


def append(ftl, handle, layer, k, v):
    return ftl.append([handle], layer, np.array([len(k)]), k, v, 0)


@pytest.mark.parametrize(("m", "name"), [(2, "fp16"), (4, "fp16"), (8, "fp16"), (2, "int8"), (8, "int4")])
@pytest.mark.parametrize("pieces", [[1] * 130, [70], [31, 1, 33, 200], [64, 64]])
def test_appended_rows_read_back_from_both_maps(small_drive, m, name, pieces):
    ftl, layout = make(small_drive, m, name)
    (handle,) = ftl.create(1, LAYERS, HEADS, layout)
    generator = np.random.default_rng(0)
    k, v = rows(generator, sum(pieces)), rows(generator, sum(pieces))
    start = 0
    for piece in pieces:
        append(ftl, handle, 1, k[start : start + piece], v[start : start + piece])
        start += piece
    stored_k, stored_v, plan = ftl.read_back(handle, 1)
    np.testing.assert_array_equal(stored_k, k)
    np.testing.assert_array_equal(stored_v, v)
    np.testing.assert_array_equal(embedding_rows(ftl, handle, 1), k)
    assert ftl.nand.intact(plan.ppns).all()
    assert ftl.sequence(handle).lengths.tolist() == [0, sum(pieces)]


def test_a_last_embedding_page_may_be_short(small_drive):
    ftl, layout = Ftl(small_drive), LAYOUTS["fp16"].paged(512, 10, 8)
    (handle,) = ftl.create(1, 1, HEADS, layout)
    k = rows(np.random.default_rng(0), 100, 10)
    append(ftl, handle, 0, k, k)
    np.testing.assert_array_equal(embedding_rows(ftl, handle, 0), k)


def test_later_tokens_never_change_earlier_pages(small_drive):
    ftl, layout = make(small_drive)
    (handle,) = ftl.create(1, 1, HEADS, layout)
    generator = np.random.default_rng(0)
    append(ftl, handle, 0, rows(generator, 100), rows(generator, 100))
    pages = np.concatenate([m.flash_slots() for m in ftl.sequence(handle).maps.values()])
    before = ftl.nand.content[pages].copy()
    for _ in range(100):
        append(ftl, handle, 0, rows(generator, 1), rows(generator, 1))
    assert pages.size > 0
    np.testing.assert_array_equal(ftl.nand.content[pages], before)


def test_tags_name_the_group(small_drive):
    ftl, layout = make(small_drive)
    (handle,) = ftl.create(1, LAYERS, HEADS, layout)
    k = rows(np.random.default_rng(0), 100)
    append(ftl, handle, 1, k, k)
    v_map = ftl.sequence(handle).maps["v"]
    page_tag = int(ftl.nand.tags[v_map.slots[1, 1, 2]])
    fields = (
        page_tag >> 59,
        page_tag >> 42 & 0x1FFFF,
        page_tag >> 34 & 0xFF,
        page_tag >> 20 & 0x3FFF,
        page_tag & 0xFFFFF,
    )
    assert fields == (PageKind.V, ftl.sequence(handle).newest, 1, 1, 2)


def test_cropped_group_returns_to_dram(small_drive):
    ftl, layout = make(small_drive)
    (handle,) = ftl.create(1, 1, HEADS, layout)
    k = rows(np.random.default_rng(0), 150)
    append(ftl, handle, 0, k, k)
    assert ftl.crop(handle, 0, 70, 0) > 0  # pages had to be read
    assert not in_flash(ftl.sequence(handle).maps["k"].slots[0, :, 70 // layout.n]).any()
    np.testing.assert_array_equal(ftl.read_back(handle, 0)[0], k[:70])
    append(ftl, handle, 0, k[70:], k[70:])
    np.testing.assert_array_equal(embedding_rows(ftl, handle, 0), k)


def test_groups_smaller_than_a_page_of_tokens_keep_their_owners(small_drive):
    """With few bits and wide heads an embedding group has fewer tokens than a token page."""
    ftl, layout = Ftl(small_drive), LAYOUTS["int8"].paged(512, 80, 80)
    assert layout.n > layout.T
    (handle,) = ftl.create(1, 1, HEADS, layout)
    generator, k = np.random.default_rng(0), rows(np.random.default_rng(0), 0, 80)
    for more, length in ((12, 3), (6, 5), (10, 99)):
        new = rows(generator, more, 80)
        append(ftl, handle, 0, new, new)
        ftl.crop(handle, 0, length, 0)
        k = np.concatenate([k, new])[:length]
    ftl.flush(0)
    ftl.nand.power_on()
    again = Ftl(small_drive, ftl.nand)
    assert not again.sequences[handle].failed
    np.testing.assert_array_equal(embedding_rows(again, handle, 0), k)


def test_unknown_sequences_are_refused(small_drive):
    ftl, layout = make(small_drive)
    with pytest.raises(UnknownSequenceError):
        ftl.free([99], 0)
    (handle,) = ftl.create(1, 1, 1, layout)
    ftl.free([handle], 0)
    with pytest.raises(UnknownSequenceError):
        ftl.view([handle], 0)


def test_full_drive_refuses_append_and_keeps_data(small_drive):
    ftl, layout = make(small_drive)
    first, second = ftl.create(2, 1, HEADS, layout)
    k = rows(np.random.default_rng(0), 1000)
    append(ftl, first, 0, k, k)
    big = np.repeat(k, 4, axis=0)
    written, left = ftl.nand.writes, ftl.buffers.left
    with pytest.raises(OutOfSpaceError, match="blocks left"):
        append(ftl, second, 0, big, big)
    assert (ftl.nand.writes, ftl.buffers.left, int(ftl.sequence(second).lengths[0])) == (written, left, 0)
    np.testing.assert_array_equal(ftl.read_back(first, 0)[0], k)


def test_full_dram_refuses_and_changes_nothing(small_drive):
    ftl, layout = make(small_drive)
    handles = ftl.create(1000, 1, HEADS, layout)
    k = rows(np.random.default_rng(0), 1)
    fits = ftl.buffers.left // (2 * HEADS)
    for handle in handles[:fits]:
        append(ftl, handle, 0, k, k)
    with pytest.raises(OutOfSpaceError, match="DRAM"):
        append(ftl, handles[fits], 0, k, k)
    assert ftl.nand.writes == 0


def test_embedding_groups_beyond_drive_dram_are_built_from_k(small_drive):
    """Drive DRAM for one layer's embedding buffers and all of K and V, then for K and V alone."""
    ftl, layout = make(replace(small_drive, dram_bytes=(4 * HEADS + HEADS * 4) * small_drive.geometry.page_bytes), m=2)
    (first,) = ftl.create(1, LAYERS, HEADS, layout)
    assert layout.embedding_pages == 4
    k = rows(np.random.default_rng(0), 200)
    for layer in range(LAYERS):
        for start in range(0, 200, 20):
            append(ftl, first, layer, k[start : start + 20], k[start : start + 20])
    assert [ftl.sequence(first).maps["embedding_k"].buffered(layer) for layer in range(LAYERS)] == [True, False]
    (second,) = ftl.create(1, LAYERS, HEADS, layout)
    append(ftl, second, 0, k[:30], k[:30])
    assert not ftl.sequence(first).maps["embedding_k"].buffered(0)  # made room
    append(ftl, second, 1, k[:30], k[:30])
    with pytest.raises(OutOfSpaceError, match="DRAM"):
        ftl.fork(second)
    for layer in range(LAYERS):
        pages = ftl.embedding_pages(ftl.view([first], layer), np.zeros((HEADS, 1), np.int32))
        unfinished = (200 % layout.T) // layout.n
        assert pages.ppns.size == HEADS * (200 // layout.T + unfinished)
        assert (pages.useful[-unfinished:] == 2 * layout.n).all()  # one channel of each token
        append(ftl, first, layer, k[:100], k[:100])
        np.testing.assert_array_equal(embedding_rows(ftl, first, layer), np.concatenate([k, k[:100]]))


def test_freed_sequences_free_space(small_drive):
    """Ten times the drive's capacity goes through it."""
    ftl, layout = make(small_drive)
    k = rows(np.random.default_rng(0), 1000)
    pages = 0
    while pages < 10 * small_drive.geometry.pages:
        handles = ftl.create(2, 1, HEADS, layout)
        for handle in handles:
            pages += append(ftl, handle, 0, k, k)[0]
        np.testing.assert_array_equal(ftl.read_back(handles[1], 0)[1], k)
        ftl.free(handles, 0)
    assert ftl.nand.erase_count.min() >= 5
    assert ftl.buffers.left == ftl.buffers.capacity


def test_freed_sequences_are_recorded_when_they_are_many(small_drive, monkeypatch):
    """Also if they free no block, since the record of them would grow without limit."""
    monkeypatch.setattr("ftl.facade.UNRECORDED", 3)
    ftl, layout = make(small_drive)
    handles = ftl.create(5, 1, HEADS, layout)
    ftl.flush(0)
    for handle, waiting in zip(handles, (1, 2, 3, 0, 1), strict=True):
        ftl.free([handle], 0)
        assert len(ftl.kv.changes.freed) == waiting


def test_page_cache_and_page_buffers_share_the_drives_memory(small_drive):
    whole, shared = (Ftl(replace(small_drive, cache_bytes=cached)) for cached in (0, 64 * 512))
    assert whole.buffers.capacity - shared.buffers.capacity == 64


@pytest.mark.parametrize(("layout", "expected"), [(None, "fp16"), ("int8", "int8")])
def test_copy_gets_the_layout_that_is_asked_for_or_stays_in_its_own(small_drive, layout, expected):
    ftl, form = make(small_drive)
    (handle,) = ftl.create(1, 1, HEADS, form)
    k = rows(np.random.default_rng(0), 400)
    append(ftl, handle, 0, k, k)
    ftl.relayout(handle, 2, 0, layout and LAYOUTS[layout])
    now = ftl.sequence(handle).layout
    assert (now.layout.name, now.m) == (expected, 2)
    copy = ftl.sequence(handle).maps["embedding_k"]
    assert copy.flash_slots().size == copy.streams * (400 // now.T) > 0, "all of its full groups"
    np.testing.assert_array_equal(ftl.read_back(handle, 0)[0], k)


def test_relayout_ends_when_the_copy_of_the_last_layer_is_programmed(small_drive):
    ftl, form = make(small_drive)
    (handle,) = ftl.create(1, 2, HEADS, form)
    for layer, tokens in ((0, 800), (1, 100)):  # the second layer's programs end first
        k = rows(np.random.default_rng(0), tokens)
        append(ftl, handle, layer, k, k)
    ftl.flush(0)
    assert ftl.relayout(handle, 2, 0, None) == ftl.timing.idle_ns()


@pytest.mark.parametrize("for_good", [True, False])
def test_lost_sequences_are_recorded_if_they_are_lost_for_good(small_drive, for_good):
    ftl, form = make(small_drive)
    lost, other = ftl.create(2, 1, HEADS, form)
    k = rows(np.random.default_rng(0), 100)
    for handle in (lost, other):
        append(ftl, handle, 0, k, k)
    ftl.flush(0)
    tags = ftl.nand.tags[ftl.sequence(lost).maps["k"].flash_slots()]
    assert ftl.kv.lose(tags, for_good) == [lost]
    assert [ftl.sequences[handle].failed for handle in (lost, other)] == [True, False]
    recorded = {lost} if for_good else set()
    assert (set(ftl.kv.changes.dirty), set(ftl.kv.changes.trimmed)) == (recorded, recorded)


class FtlMachine(RuleBasedStateMachine):
    """Random verbs on a small drive, against arrays in a dictionary."""

    drive: DriveSpec

    @initialize(
        m=st.sampled_from([2, 4, 8]),
        layout=st.sampled_from(["fp16", "fp16", "int8", "int4"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(self, m, layout, seed):
        self.ftl, self.layout = make(self.drive, m, layout)
        self.generator = np.random.default_rng(seed)
        self.model, self.recorded = {}, {}
        self.watch()

    def watch(self):
        """Note what every commit records, also one in the middle of a verb."""

        def note(recorded, freed):
            for handle in freed:
                self.recorded.pop(handle, None)
            for handle in recorded & set(self.model):
                self.recorded[handle] = [list(parts) for parts in self.model[handle]]

        self.ftl.journal.log = note

    @precondition(lambda self: len(self.model) < 4)
    @rule()
    def create(self):
        (handle,) = self.ftl.create(1, LAYERS, HEADS, self.layout)
        empty = np.zeros((0, HEADS, DIM), np.float16)
        self.model[handle] = [[empty, empty] for _ in range(LAYERS)]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), tokens=st.sampled_from([0, 1, 1, 1, 5, 32, 67, 200]))
    def append(self, data, layer, tokens):
        handles = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        k = rows(self.generator, tokens * len(handles))
        v = rows(self.generator, tokens * len(handles))
        try:
            self.ftl.append(handles, layer, np.full(len(handles), tokens), k, v, 0)
        except OutOfSpaceError:
            return
        for number, handle in enumerate(handles):
            part = slice(number * tokens, (number + 1) * tokens)
            stored = self.model[handle][layer]
            stored[0] = np.concatenate([stored[0], k[part]])
            stored[1] = np.concatenate([stored[1], v[part]])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1))
    def crop(self, data, layer):
        handle = data.draw(st.sampled_from(sorted(self.model)))
        stored = self.model[handle][layer]
        length = data.draw(st.integers(0, len(stored[0]) + 3))
        self.ftl.crop(handle, layer, length, 0)
        self.model[handle][layer] = [part[:length] for part in stored]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        handle = data.draw(st.sampled_from(sorted(self.model)))
        self.ftl.free([handle], 0)
        del self.model[handle]

    @precondition(lambda self: self.model and len(self.model) < 4)
    @rule(data=st.data())
    def fork(self, data):
        handle = data.draw(st.sampled_from(sorted(self.model)))
        try:
            child = self.ftl.fork(handle)
        except OutOfSpaceError:
            return
        self.model[child] = [list(parts) for parts in self.model[handle]]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), m=st.sampled_from([2, 4, 8]), layout=st.sampled_from(["fp16", "int8", "int4"]))
    def relayout(self, data, m, layout):
        handle = data.draw(st.sampled_from(sorted(self.model)))
        try:
            self.ftl.relayout(handle, m, 0, LAYOUTS[layout])
        except OutOfSpaceError:
            return

    @rule()
    def flush(self):
        self.ftl.flush(0)
        assert set(self.recorded) == set(self.model)

    @rule()
    def lose_power(self):
        self.ftl.nand.power_on()
        self.ftl = Ftl(self.drive, self.ftl.nand)
        self.model = {handle: [list(parts) for parts in layers] for handle, layers in self.recorded.items()}
        assert set(self.ftl.sequences) == set(self.model)
        self.watch()

    @invariant()
    def everything_is_there(self):
        for handle, layers in getattr(self, "model", {}).items():
            for layer, (k, v) in enumerate(layers):
                assert self.ftl.sequence(handle).lengths[layer] == len(k)
                if len(k):
                    stored_k, stored_v, plan = self.ftl.read_back(handle, layer)
                    self.ftl.nand.check_readable(plan.ppns)
                    np.testing.assert_array_equal(stored_k, k)
                    np.testing.assert_array_equal(stored_v, v)
                    np.testing.assert_array_equal(embedding_rows(self.ftl, handle, layer), k)

    @invariant()
    def counts_are_true(self):
        if hasattr(self, "ftl"):
            used = [m.flash_slots() for seq in self.ftl.sequences.values() for m in seq.maps.values()]
            pages = np.unique(np.concatenate([*used, self.ftl.journal.pages]))
            counts = np.bincount(self.ftl.nand.block_of(pages), minlength=self.ftl.placement.valid.size)
            np.testing.assert_array_equal(self.ftl.placement.valid, counts)


@pytest.mark.hypothesis  # for `./dev test --random`: Hypothesis marks only tests that it runs itself
@pytest.mark.parametrize("buffers", [2048, 60])
def test_random_commands_equal_reference(small_drive, buffers):
    """60 group buffers suffice for few unfinished embedding groups, and only sometimes for all of K and V."""
    FtlMachine.drive = replace(small_drive, dram_bytes=buffers * small_drive.geometry.page_bytes)
    machine = FtlMachine.TestCase()
    machine.settings = settings(max_examples=examples(60), stateful_step_count=50)
    machine.runTest()


def test_a_sequence_longer_than_tags_can_number_is_refused(small_drive):
    ftl, layout = Ftl(small_drive, Nand(small_drive.geometry, payload=False)), make(small_drive)[1]
    (handle,) = ftl.create(1, 1, HEADS, layout)
    with pytest.raises(OutOfSpaceError, match="at most"):
        ftl.append([handle], 0, np.array([MAX_GROUPS * layout.n]), None, None, 0)


@pytest.mark.parametrize("seed", range(8))
def test_failed_programs_on_full_drive_change_nothing(small_drive, seed):
    """The reserve is used up, then a block goes bad in the middle of an append."""
    nand = Nand(small_drive.geometry, FaultPlan(program_fail=0.03, seed=seed))
    ftl, layout = Ftl(small_drive, nand), make(small_drive)[1]
    generator, refused = np.random.default_rng(seed), 0
    stored = {handle: rows(generator, 0) for handle in ftl.create(4, 1, HEADS, layout)}
    while refused < 20:
        handle = int(generator.choice(list(stored)))
        new = rows(generator, int(generator.integers(1, 150)))
        try:
            append(ftl, handle, 0, new, new)
            stored[handle] = np.concatenate([stored[handle], new])
        except (OutOfSpaceError, ReadOnlyError):
            refused += 1
    for handle, k in stored.items():
        np.testing.assert_array_equal(ftl.read_back(handle, 0)[1], k)
        np.testing.assert_array_equal(embedding_rows(ftl, handle, 0), k)
    used = [m.flash_slots() for seq in ftl.sequences.values() for m in seq.maps.values()]
    pages = np.concatenate([*used, ftl.journal.pages])
    counts = np.bincount(nand.block_of(pages), minlength=ftl.placement.valid.size)
    np.testing.assert_array_equal(ftl.placement.valid, counts)
    by_tag: dict[int, bytes] = {}
    for ppn in nand.programmed()[tag.is_group(nand.tags[nand.programmed()])].tolist():
        # A tag is written once, by refused commands too
        assert by_tag.setdefault(int(nand.tags[ppn]), nand.content[ppn].tobytes()) == nand.content[ppn].tobytes()


def test_failed_commit_not_mistaken_for_later_one(small_drive, monkeypatch):
    ftl, layout = make(small_drive)
    (handle,) = ftl.create(1, LAYERS, HEADS, layout)
    k = rows(np.random.default_rng(0), 120)
    append(ftl, handle, 0, k[:31], k[:31])
    ftl.flush(0)

    def fail(writer, ppns, data, tags, start_ns):
        """All pages of the record get there but the last."""
        ftl.nand.program(ppns[:-1], data[:-1], tags[:-1])
        ftl.placement.undo_allocation(ppns)
        raise OutOfSpaceError("no block left")

    append(ftl, handle, 1, k[:31], k[:31])
    with monkeypatch.context() as patch, pytest.raises(OutOfSpaceError):
        patch.setattr(ftl.store, "program", fail)
        ftl.flush(0)
    append(ftl, handle, 1, k[31:], k[31:])
    append(ftl, handle, 0, k[31:62], k[31:62])
    ftl.flush(0)
    ftl.nand.power_on()
    again = Ftl(small_drive, ftl.nand)
    np.testing.assert_array_equal(again.read_back(handle, 0)[0], k[:62])
    np.testing.assert_array_equal(again.read_back(handle, 1)[0], k)
