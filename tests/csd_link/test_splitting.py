"""Commands cut to the largest size that a drive takes: their parts, and the drives' results."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from csd_firmware import InProcessDrive
from csd_link.splitting import SplitRead, check_device, join_completions, parts_of, read_parts, submit_reads
from csd_link.wire import encode
from csd_spec import (
    Attend,
    Completion,
    KvAppend,
    KvCrop,
    KvDrop,
    KvFree,
    KvGather,
    KvName,
    KvRead,
    SeqCreate,
    SeqFork,
    Status,
)
from csd_spec.arrays import key_list, keys_of
from csd_spec.verbs import VERBS
from tests.properties import examples

HEADS, DIM, GROUP, LAYERS = 2, 8, 2, 3
TOKEN = 4 * HEADS * DIM  # bytes of keys and values
lengths_of = st.lists(st.integers(0, 40), min_size=1, max_size=6)
slots = st.integers(TOKEN + 16, 20 * TOKEN)


def rows(*shape, first=0):
    return (np.arange(first, first + np.prod(shape)) % 2000).astype(np.float16).reshape(shape)


def append(lengths, layer=0):
    k = rows(sum(lengths), HEADS, DIM)
    return KvAppend(tuple(range(1, len(lengths) + 1)), layer, np.array(lengths), k, -k)


def attend(count):
    few, q = np.full(count, 2), rows(count, HEADS, GROUP, DIM)
    return Attend(tuple(range(1, count + 1)), 1, q, q[:, :, 0].copy(), -q[:, :, 0], "dense", 4, few, few - 1)


@given(lengths_of, slots)
@example([0] * 50, TOKEN + 16)
@settings(max_examples=examples(200))
def test_parts_of_append_fit_and_keep_order(lengths, slot):
    whole = append(lengths)
    parts = parts_of(whole, slot)
    fits = len(encode(whole).payload) <= slot
    assert all(len(encode(part).payload) <= slot for part in parts)
    assert (parts == [whole]) if fits else (len(parts) > 1)
    stored = {seq: [] for seq in whole.seqs}
    for part in parts:
        assert np.array_equal(part.k, -part.v)
        for seq, k in zip(part.seqs, np.split(part.k, np.cumsum(part.lengths)[:-1]), strict=True):
            stored[seq].append(k)
    assert set().union(*(part.seqs for part in parts)) == set(whole.seqs), "a sequence without tokens is named too"
    for seq, k in zip(whole.seqs, np.split(whole.k, np.cumsum(lengths)[:-1]), strict=True):
        np.testing.assert_array_equal(np.concatenate(stored[seq]), k)


SEQS, KEYS = tuple(range(1, 300)), keys_of([number.to_bytes(16, "big") for number in range(299)])
BY_ROWS = {
    "attend": attend(299),
    "attend with terms": replace(attend(299), terms=np.ones((HEADS, GROUP, 4), np.float32)),
    "crop": KvCrop(SEQS, 0, np.arange(299)),
    "free": KvFree(SEQS),
    "drop": KvDrop(KEYS),
    "name": KvName((7,), np.arange(299), KEYS),
}


@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("slot", [400, 1000, 4096])
def test_other_commands_are_split_by_rows(name, slot):
    whole = BY_ROWS[name]
    verb, parts = VERBS[type(whole)], parts_of(whole, slot)
    assert all(len(encode(part).payload) <= slot for part in parts)
    assert all(verb.reply_bytes(verb.sizes(part)) <= slot for part in parts)
    assert len(parts) == 1 or len(encode(parts[0]).payload) > slot // 2 or verb.reply_bytes(verb.sizes(parts[0]))
    if isinstance(whole, Attend):
        np.testing.assert_array_equal(np.concatenate([part.q for part in parts]), whole.q)
        assert all(part.terms is whole.terms and part.method == "dense" for part in parts)
    if not isinstance(whole, KvDrop | KvName):
        assert [seq for part in parts for seq in part.seqs] == [*whole.seqs]
    else:
        assert [key for part in parts for key in key_list(part.keys)] == key_list(whole.keys)


@pytest.mark.parametrize(
    "command",
    [
        SeqFork(SEQS, np.zeros(299, np.int64)),  # half of the forks would have no owner if the others were refused
        SeqCreate(299, 1, 1, 8, 64),
        replace(append([40]), lengths=np.array([39])),
        replace(append([20, 20]), seqs=(1, 1)),
        replace(append([40]), k=None),
        replace(attend(2), q=None),
        "no command",
    ],
)
def test_indivisible_or_invalid_command_is_not_split(command):
    (left,) = parts_of(command, 100)
    assert left is command


def test_oversized_token_is_refused():
    (left,) = parts_of(append([3]), TOKEN + 15)
    assert len(left.k) == 3
    device = type("Small", (), {"name": "csd0", "max_bytes": TOKEN + 15})()
    with pytest.raises(ValueError, match=r"^drive csd0 takes 79 bytes .* 80: .*slot_blocks: 1 or more\)$"):
        check_device(device, append([1]))
    device.max_bytes += 1
    check_device(device, append([1]))


@given(lengths_of, st.integers(0, 45), st.integers(0, 45), st.integers(1, 50))
@settings(max_examples=examples(200))
def test_parts_of_read_keep_token_order(lengths, first, tokens, most):
    whole = KvRead(tuple(range(1, len(lengths) + 1)), 0, first, tokens)
    device = type("Device", (), {"max_bytes": most * TOKEN})()
    parts = read_parts(SplitRead(device, whole, TOKEN, lengths))

    def read(command):
        return [
            (seq, token) for seq in command.seqs for token in KvRead.of(lengths[seq - 1], command.first, command.tokens)
        ]

    assert [token for part in parts for token in read(part)] == read(whole)
    assert all(len(read(part)) <= most for part in parts)
    assert len(parts) == 1 or len(read(whole)) > most


def test_parts_of_read_limit_number_of_sequences():
    device = type("Device", (), {"max_bytes": 10 * TOKEN})()
    parts = read_parts(SplitRead(device, KvRead(SEQS, 0), TOKEN, [0] * len(SEQS)))
    assert [seq for part in parts for seq in part.seqs] == [*SEQS]
    assert {len(part.seqs) for part in parts[:-1]} == {10 * TOKEN // 8}


def refused(status, reason):
    return Completion(status=status, reason=reason)


def test_joined_error_names_part_and_prefers_lost_drive():
    good, full = Completion(status=Status.SUCCESS), refused(Status.CAPACITY_EXCEEDED, "full")
    done = join_completions(append([1]), [good, full, good])
    assert (done.status, done.reason) == (Status.CAPACITY_EXCEEDED, "full (part 2 of 3 of this command)")
    lost = refused(Status.PATH_LOST, "gone")
    assert join_completions(append([1]), [good, full, lost]) == lost


@pytest.fixture
def drives(small_drive):
    """A drive that takes all, and one that takes 3 tokens."""
    made = [InProcessDrive(small_drive) for _ in range(2)]
    made[0].max_bytes, made[1].max_bytes = 1 << 30, 3 * TOKEN + 16
    yield made
    for device in made:
        device.close()


def test_drive_with_small_slots_gives_equal_results(drives):
    lengths, data = [40, 0, 17, 5], []
    for device in drives:

        def ask(command, device=device, submit_ns=0):
            done = device.submit(command, submit_ns).result()
            assert done.status is Status.SUCCESS, done.reason
            assert sum(done.breakdown_ns.values()) == done.latency_ns, "times by unit add up to the whole"
            return done

        seqs = tuple(ask(SeqCreate(4, LAYERS, HEADS, DIM, 64)).data[0].tolist())
        for layer in range(LAYERS):
            ask(replace(append(lengths, layer), seqs=seqs))
        step = replace(attend(4), seqs=seqs, top_k=np.ones(4, np.int64), recent=np.ones(4, np.int64))
        outputs = [*ask(step).data]
        stored = [length + 1 for length in lengths]
        for first, tokens in ((0, 0), (3, 0), (5, 20)):
            read = SplitRead(device, KvRead(seqs, 1, first, tokens), TOKEN, stored)
            outputs += submit_reads([read], 0)[0].result().data
        for layers in (1, 2, 3):
            gather = KvGather(seqs[::2], np.array([2, 1]), np.array([20, 15]), LAYERS - layers, layers)
            outputs += submit_reads([SplitRead(device, gather, TOKEN)], 0)[0].result().data
        ask(KvCrop(seqs, 1, np.array([4, 0, 3, 1])))
        outputs += ask(KvRead(seqs, 1)).data if device is drives[0] else device.firmware.step(KvRead(seqs, 1), 0).data
        data.append(outputs)
        ask(KvFree(seqs))
    for whole, cut in zip(*data, strict=True):
        np.testing.assert_array_equal(whole, cut)


def test_all_parts_are_submitted_before_waiting(drives):
    device, under_way = drives[1], []
    (seq,) = device.submit(SeqCreate(1, LAYERS, HEADS, DIM, 64), 0).result().data[0].tolist()
    one_by_one = device._submit
    device._submit = lambda *arguments: under_way.append(arguments) or one_by_one(*arguments)
    with device._works:  # the drive stands still
        future = device.submit(replace(append([40]), seqs=(seq,)), 0)
        assert len(under_way) == 14 and not future.done()
    assert future.exception() is None and future.done()
