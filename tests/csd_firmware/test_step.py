"""One command in, one completion out: data, time, bytes, and refusals that change nothing."""

from dataclasses import replace

import numpy as np
import pytest

from attention_engine import METHODS, reference
from csd_firmware import Firmware, InProcessDrive, attend, check
from csd_spec import (
    Attend,
    FlashCounters,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvFree,
    KvGather,
    KvRead,
    SeqCreate,
    Status,
)
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH, PCIE3_X4_STAGED
from ftl import UncorrectableReadError

H, G, D, LAYERS = 2, 2, 16, 2


def half(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16)


def with_schedule(drive, schedule):
    return replace(drive, engine=replace(drive.engine, schedule=schedule))


class Bench:
    """A firmware with sequences of some tokens, and the same tokens as arrays."""

    def __init__(self, drive, lengths, seed=0, methods=METHODS):
        self.generator = np.random.default_rng(seed)
        self.firmware = Firmware(drive, methods=methods)
        self.seqs = tuple(self.do(SeqCreate(len(lengths), LAYERS, H, D, 2048)).data[0].tolist())
        self.K, self.V = ([half(self.generator, S, H, D) for S in lengths] for _ in "KV")
        if max(lengths):
            k, v = np.concatenate(self.K), np.concatenate(self.V)
            self.do(KvAppend(self.seqs, 1, np.array(lengths), k, v))

    def do(self, command, now_ns=0):
        done = self.firmware.step(command, now_ns)
        assert done.status is Status.SUCCESS, done.reason
        assert sum(done.breakdown_ns.values()) == done.latency_ns
        return done

    def attend(self, method="sparf", r=4, share=4, now_ns=0):
        """A decode step; returns its completion and the oracle's output."""
        B = len(self.seqs)
        q, k, v = half(self.generator, B, H, G, D), half(self.generator, B, H, D), half(self.generator, B, H, D)
        self.K = [np.concatenate([old, new[None]]) for old, new in zip(self.K, k, strict=True)]
        self.V = [np.concatenate([old, new[None]]) for old, new in zip(self.V, v, strict=True)]
        top_k = np.array([-(-len(rows) // share) for rows in self.K])
        done = self.do(Attend(self.seqs, 1, q, k, v, method, r, top_k, -(-top_k // 4)), now_ns)
        expected = np.empty(q.shape)
        for b in range(B):
            for h in range(H):
                args = [x.astype(np.float64) for x in (q[b, h], self.K[b][:, h], self.V[b][:, h])]
                if method == "dense":
                    expected[b, h] = reference.dense(*args)
                else:
                    expected[b, h] = reference.sparf(*args, r, int(top_k[b]), int(-(-top_k[b] // 4)))[0]
        return done, expected

    def state(self):
        """Everything a refused command must not change."""
        ftl = self.firmware.ftl
        lengths = {handle: seq.lengths.tolist() for handle, seq in ftl.sequences.items()}
        return lengths, ftl.nand.writes, ftl.buffers.left, self.firmware.free_ns, ftl.timing.idle_ns()


@pytest.mark.parametrize("method", ["dense", "sparf", "sparq"])
@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
@pytest.mark.parametrize("lengths", [[300], [1], [0], [150, 0, 37]])
def test_decode_steps_equal_oracle(small_drive, method, schedule, lengths):
    bench = Bench(with_schedule(small_drive, schedule), lengths)
    for _ in range(40):
        done, expected = bench.attend(method)
        np.testing.assert_allclose(done.data[0], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_values_of_a_step_are_checked_once(small_drive, monkeypatch, method):
    """In a step that makes a plan, and in one that runs on it."""
    bench, checked = Bench(small_drive, [40]), []
    for module in (check, attend):
        monkeypatch.setattr(module, "check_array", lambda array, *rest: checked.append(array.name))
    for before in (0, 1):  # dense attention checks in its compiled call
        checked.clear()
        bench.attend(method)
        arrays = {"q", "k", "v", "top_k", "recent"} if method == "sparf" or not before else set()
        assert sorted(name for name in checked if name != "terms") == sorted(arrays)


def test_sparf_and_sparq_differ_in_bytes_only(small_drive):
    runs = []
    for method in ("sparf", "sparq"):
        bench = Bench(small_drive, [400, 200])
        runs.append([bench.attend(method)[0] for _ in range(5)])
    for sparf, sparq in zip(*runs, strict=True):
        np.testing.assert_allclose(sparf.data[0], sparq.data[0], atol=1e-6)
        assert sparf.flash.pages_read == sparq.flash.pages_read
        assert sparf.flash.useful_bytes == sparq.flash.useful_bytes == sparq.flash.fetched_bytes
        assert sparf.flash.fetched_bytes > sparq.flash.fetched_bytes
        assert sparf.latency_ns > sparq.latency_ns


def test_pages_that_were_not_fetched_never_count(small_drive, monkeypatch):
    """The same steps with every page poisoned except those that the FTL was asked to read."""
    expected = [Bench(small_drive, [400, 200]).attend()[0].data[0]]
    bench = Bench(small_drive, [400, 200])
    ftl = bench.firmware.ftl
    whole = ftl.nand.content.copy()
    ftl.nand.content[:] = 0xFF

    def revealing(plan_of):
        def plan_and_reveal(*arguments):
            plan = plan_of(*arguments)
            ftl.nand.content[plan.ppns] = whole[plan.ppns]
            return plan

        return plan_and_reveal

    for name in ("token_pages", "embedding_pages"):
        monkeypatch.setattr(ftl, name, revealing(getattr(ftl, name)))
    done, _ = bench.attend()
    assert done.flash.pages_read > 0
    np.testing.assert_array_equal(done.data[0], expected[0])


@pytest.mark.parametrize("how", ["crop", "free"])
def test_method_memory_follows_crop_and_free(small_drive, how):
    bench = Bench(small_drive, [200])
    bench.attend("h2o")
    assert bench.firmware.state.memory[bench.seqs[0], 1]["h2o"].shape == (H, 201)
    if how == "crop":
        bench.do(KvCrop(bench.seqs, 1, np.array([150])))
    else:
        bench.do(KvFree(bench.seqs))
    assert not bench.firmware.state.memory


def test_failing_method_leaves_drive_unchanged(small_drive):
    def broken(step):
        raise ZeroDivisionError("by zero")

    bench, same = Bench(small_drive, [200], methods=METHODS | {"broken": broken}), Bench(small_drive, [200])
    q, k = half(bench.generator, 1, H, G, D), half(bench.generator, 1, H, D)
    one = np.array([1])
    done = bench.firmware.step(Attend(bench.seqs, 1, q, k, k, "broken", 4, one, one), 0)
    assert (done.status, done.reason) == (Status.INVALID_FIELD, "method broken: ZeroDivisionError: by zero")
    assert bench.firmware.ftl.sequence(bench.seqs[0]).lengths.tolist() == [0, 200]
    bench.generator = np.random.default_rng(9)
    same.generator = np.random.default_rng(9)
    for _ in range(20):
        np.testing.assert_array_equal(bench.attend()[0].data[0], same.attend()[0].data[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_non_finite_output_is_an_error(small_drive, bad):
    def spoiled(step):
        out = METHODS["dense"](step)
        out[-1, -1, -1] = bad
        return out

    bench = Bench(small_drive, [200], methods=METHODS | {"spoiled": spoiled})
    q, k = half(bench.generator, 1, H, G, D), half(bench.generator, 1, H, D)
    one = np.array([1])
    done = bench.firmware.step(Attend(bench.seqs, 1, q, k, k, "spoiled", 4, one, one), 0)
    assert done.status is Status.INVALID_FIELD
    assert done.reason.startswith("method spoiled: FloatingPointError: its output holds NaN")
    assert bench.firmware.ftl.sequence(bench.seqs[0]).lengths.tolist() == [0, 200]


@pytest.mark.parametrize(
    ("method", "bits"),
    [(name, bits) for name in METHODS for bits in ((37, 53) if name.startswith("progressive") else (16, 4))],
)
def test_query_zero_in_chosen_channels_is_attended(small_drive, method, bits):
    """The first query of a group chooses all channels; the second has others, the last none at all."""
    firmware = Firmware(small_drive)
    generator = np.random.default_rng(0)
    seqs = tuple(firmware.step(SeqCreate(1, 1, H, D, 2048, bits), 0).data[0].tolist())
    k, v = half(generator, 300, H, D), half(generator, 300, H, D)
    assert firmware.step(KvAppend(seqs, 0, np.array([300]), k, v), 0).status is Status.SUCCESS
    q = np.zeros((1, H, 3, D), np.float16)
    q[:, :, 0, :4], q[:, :, 1, 4:] = 4, half(generator, 1, H, D - 4) / 16
    new = half(generator, 2, 1, H, D)
    done = firmware.step(Attend(seqs, 0, q, *new, method, 4, np.array([40]), np.array([10])), 0)
    assert done.status is Status.SUCCESS, done.reason
    assert np.isfinite(done.data[0]).all()
    if method in ("sparf", "sparq") and bits == 16:
        for head in range(H):
            K, V = (np.concatenate([a[:, head], b[:, head]]) for a, b in ((k, new[0]), (v, new[1])))
            args = [x.astype(np.float64) for x in (q[0, head], K, V)]
            np.testing.assert_allclose(done.data[0][0, head], reference.sparf(*args, 4, 40, 10)[0], atol=2e-3)


def test_step_with_lost_sequence_undoes_other_tokens(small_drive, monkeypatch):
    bench = Bench(small_drive, [200, 100])
    ftl = bench.firmware.ftl

    def lose(plan, start_ns):
        ftl.sequences[bench.seqs[0]].failed = True
        raise UncorrectableReadError([bench.seqs[0]])

    q, k = half(bench.generator, 2, H, G, D), half(bench.generator, 2, H, D)
    counts = np.array([10, 10])
    with monkeypatch.context() as patch:
        patch.setattr(ftl, "read", lose)
        done = bench.firmware.step(Attend(bench.seqs, 1, q, k, k, "sparf", 4, counts, counts), 0)
    assert done.status is Status.UNRECOVERED_READ_ERROR
    assert ftl.sequence(bench.seqs[1]).lengths.tolist() == [0, 100]


def test_cropped_sequences_attend_to_remaining_rows(small_drive):
    bench = Bench(small_drive, [300, 90])
    bench.do(KvCrop(bench.seqs, 1, np.array([130, 90])))
    bench.K[0], bench.V[0] = bench.K[0][:130], bench.V[0][:130]
    done, expected = bench.attend()
    np.testing.assert_allclose(done.data[0], expected, rtol=2e-3, atol=2e-3)
    k, v = bench.do(KvRead(bench.seqs, 1)).data
    np.testing.assert_array_equal(k, np.concatenate(bench.K))
    np.testing.assert_array_equal(v, np.concatenate(bench.V))


@pytest.mark.parametrize(
    ("first", "tokens"), [(0, 0), (0, 5), (16, 16), (100, 0), (89, 120), (299, 7), (310, 5), (500, 0)]
)
def test_range_read_fetches_only_its_pages(small_drive, first, tokens):
    bench = Bench(small_drive, [310, 90])
    done = bench.do(KvRead(bench.seqs, 1, first, tokens))
    cut = slice(first, first + tokens if tokens else None)
    for array, rows in zip(done.data, (bench.K, bench.V), strict=True):
        np.testing.assert_array_equal(array, np.concatenate([row[cut] for row in rows]))
    per_page = small_drive.geometry.page_bytes // (2 * D)
    pages = 0
    for length in (310, 90):
        end = min(first + tokens, length) if tokens else length
        full = min(end, length // per_page * per_page)  # the rest of the last group is in drive DRAM
        pages += max(0, -(-full // per_page) - first // per_page)
    assert done.flash.pages_read == 2 * H * pages
    assert done.link_bytes == 64 + sum(data.nbytes for data in done.data)


def test_reads_of_same_time_share_flash_serialize_link(small_drive):
    bench, start_ns = Bench(small_drive, [320]), 10**9
    spec, chunks = bench.firmware.spec, [(first, 32) for first in range(0, 320, 32)]
    alone = bench.do(KvRead(bench.seqs, 1, *chunks[0]), start_ns)
    busy = bench.firmware.ftl.counters.busy_ns
    done = [bench.do(KvRead(bench.seqs, 1, *chunk), 2 * start_ns) for chunk in chunks]
    last_ns = max(completion.finish_ns for completion in done) - 2 * start_ns
    assert last_ns < 0.7 * len(done) * alone.latency_ns
    pages = sum(completion.flash.pages_read for completion in done)
    lanes = small_drive.geometry.lanes
    assert last_ns > pages / lanes * spec.timing.read_ns, "a lane senses one page at a time"
    assert last_ns > sum(spec.link.transfer_ns(completion.link_bytes - 64) for completion in done)
    assert bench.firmware.ftl.counters.busy_ns - busy <= last_ns
    ends = sorted(completion.finish_ns for completion in done)
    gaps = np.diff(ends)
    assert (gaps >= spec.link.transfer_ns(done[0].link_bytes - 64)).all()


def test_reads_and_attention_do_not_wait_for_each_other(small_drive):
    bench = Bench(small_drive, [320])
    attend, _ = bench.attend("dense", now_ns=10**9)
    read = bench.do(KvRead(bench.seqs, 1, 320), 10**9)  # the new token, which is still in drive DRAM
    assert "queue" not in read.breakdown_ns and read.finish_ns < attend.finish_ns
    bench.do(KvRead(bench.seqs, 1), 2 * 10**9)
    after, _ = bench.attend("dense", now_ns=2 * 10**9)
    assert after.breakdown_ns["queue"] == 0


def test_a_dense_step_reads_every_full_page_of_k_and_v(small_drive):
    bench = Bench(small_drive, [320])
    done, _ = bench.attend("dense")
    per_page = small_drive.geometry.page_bytes // (2 * D)
    pages = 2 * H * (320 // per_page)
    assert done.flash == FlashCounters(
        pages_read=pages, fetched_bytes=pages * 512, useful_bytes=pages * per_page * 2 * D
    )


def test_link_bytes_count_q_k_v_output_and_rows(small_drive):
    done, _ = Bench(small_drive, [50, 60]).attend("dense")
    q, k, out, counts = 2 * H * G * D * 2, 2 * H * D * 2, 2 * H * G * D * 2, 2 * 8
    assert done.link_bytes == 64 + q + 2 * k + 2 * counts + out + 2 * H * G * 8


def test_engine_executes_one_command_at_a_time(small_drive):
    bench = Bench(small_drive, [300])
    now = bench.firmware.free_ns + 10_000_000
    first, _ = bench.attend(now_ns=now)
    second, _ = bench.attend(now_ns=now)
    assert first.breakdown_ns["queue"] == 0
    assert second.breakdown_ns["queue"] > 0
    assert second.finish_ns > first.finish_ns


def test_a_staged_link_is_slower(small_drive):
    staged = replace(small_drive, link=PCIE3_X4_STAGED)
    direct, slow = (Bench(drive, [10]).attend()[0].breakdown_ns["link"] for drive in (small_drive, staged))
    assert slow > direct


def test_only_needed_codewords_cross_channel(small_drive):
    whole = Bench(small_drive, [400])
    timing = replace(small_drive.timing, codeword_bytes=128)
    part = Bench(replace(small_drive, timing=timing), [400])
    (wide, _), (narrow, _) = whole.attend(), part.attend()
    np.testing.assert_array_equal(wide.data[0], narrow.data[0])
    assert wide.flash.pages_read == narrow.flash.pages_read
    assert wide.flash.useful_bytes == narrow.flash.useful_bytes
    assert narrow.flash.useful_bytes <= narrow.flash.fetched_bytes < wide.flash.fetched_bytes
    assert narrow.flash.fetched_bytes % 128 == 0


def test_flush_waits_for_programs(small_drive):
    bench = Bench(small_drive, [300])
    assert bench.do(Flush()).finish_ns >= bench.firmware.ftl.timing.idle_ns()


def bad_commands(bench):
    """Commands that must be refused, each with the status and a word of the reason."""
    s, generator = bench.seqs, np.random.default_rng(1)
    q, k = half(generator, 1, H, G, D), half(generator, 1, H, D)
    one = np.array([1])
    good = Attend(s[:1], 1, q, k, k, "sparf", 4, 10 * one, one)
    rows = half(generator, 3, H, D)
    append = KvAppend(s[:1], 1, 3 * one, rows, rows)
    invalid, unknown = Status.INVALID_FIELD, Status.UNKNOWN_SEQUENCE
    nan, inf = k.copy(), rows.copy()
    nan[0, 0, 0], inf[1, 1, 1] = np.nan, np.inf
    return [
        (SeqCreate(0, 1, 1, 16, 100), invalid, "count = 0"),
        (SeqCreate(1, 1, 1, 10**6, 100), invalid, "head_dim"),
        (SeqCreate(1, 10**6, 1, 16, 100), invalid, "layers"),
        (SeqCreate(1, 1, 1024, 256, 10**6), invalid, "streams"),
        (replace(append, seqs=(77,)), unknown, "77"),
        (replace(append, seqs=()), invalid, "no sequence"),
        (replace(append, seqs=s[:1] * 2, lengths=np.array([1, 2])), invalid, "twice"),
        (replace(append, layer=LAYERS), invalid, "layer = 2"),
        (replace(append, layer=-1), invalid, "layer = -1"),
        (replace(append, lengths=-one), invalid, "lengths: from -1 to -1"),
        (replace(append, lengths=one << 62), invalid, "lengths: from 4611686018427387904"),
        (replace(append, layer="0"), invalid, "layer = '0'"),
        (replace(append, layer=0.0), invalid, "layer = 0.0"),
        (replace(append, seqs=list(s[:1])), invalid, "seqs: must be a tuple"),
        (replace(append, seqs=([],)), invalid, "seqs: must be a tuple"),
        (replace(append, lengths=2 * one), invalid, "k: must have shape"),
        (replace(append, v=rows.astype(np.float32)), invalid, "v: must be float16"),
        (replace(append, k=inf), invalid, "k: holds infinity"),
        (replace(append, k=np.asfortranarray(rows)), invalid, "contiguous"),
        (replace(good, seqs=(s[0], 99)), unknown, "99"),
        (replace(good, r=0), invalid, "r = 0"),
        (replace(good, r=D + 1), invalid, f"r = {D + 1}"),
        (replace(good, top_k=0 * one), invalid, "top_k = 0"),
        (replace(good, top_k=1000 * one), invalid, "top_k = 1000"),
        (replace(good, recent=11 * one), invalid, "recent = 11"),
        (replace(good, v=nan), invalid, "v: holds infinity or NaN"),
        (replace(good, q=q[:, :, :0]), invalid, "no query head"),
        (replace(good, q=q[0]), invalid, "q: must have shape"),
        (replace(good, method=9), invalid, "method = 9"),
        (replace(good, method=[]), invalid, "method = []"),
        (replace(good, layer=[]), invalid, "layer = []"),
        (replace(good, seqs=7), invalid, "seqs: must be a tuple"),
        (KvGather(s[:1], np.array([(1 << 63) - 1]), one, 0, 1), invalid, "first: from 9223372036854775807"),
        (GetLog("smart"), invalid, "page = 'smart'"),
        (KvCrop(s[:1], 1, -one), invalid, "lengths: from -1"),
        (KvRead((99,), 1), unknown, "99"),
        (KvFree((s[0], 99)), unknown, "99"),
        ("reboot", invalid, "str is not a command"),
    ]


def test_refused_command_gives_reason_changes_nothing(small_drive):
    bench = Bench(small_drive, [300, 40])
    before = bench.state()
    for command, status, reason in bad_commands(bench):
        done = bench.firmware.step(command, 5)
        assert (done.status, done.latency_ns) == (status, 0), command
        assert reason in done.reason
        assert bench.state() == before
    done, expected = bench.attend()
    np.testing.assert_allclose(done.data[0], expected, rtol=2e-3, atol=2e-3)


def test_sequences_of_different_shape_do_not_share_a_command(small_drive):
    bench = Bench(small_drive, [10])
    other = bench.do(SeqCreate(1, LAYERS, H + 1, D, 2048)).data[0].tolist()
    done = bench.firmware.step(KvRead((*bench.seqs, *other), 1), 0)
    assert done.status is Status.INVALID_FIELD
    assert "same shape" in done.reason


def test_full_drive_refuses_append_and_continues(small_drive):
    bench = Bench(small_drive, [300, 40])
    before = bench.state()
    rows = half(bench.generator, 8000, H, D)
    done = bench.firmware.step(KvAppend(bench.seqs[:1], 0, np.array([8000]), rows, rows), 0)
    assert done.status is Status.CAPACITY_EXCEEDED
    assert bench.state() == before
    bench.do(KvFree(bench.seqs[:1]))


def test_a_device_completes_in_order(small_drive):
    device = InProcessDrive(small_drive)
    futures = [device.submit(SeqCreate(1, 1, 1, 8, 64), 0) for _ in range(5)]
    assert [int(f.result().data[0][0]) for f in futures] == [1, 2, 3, 4, 5]
    device.close()


def test_default_drive_of_2_tib_can_be_created():
    assert Firmware(INSTCSD_ZYNQ7045_8CH).ftl.nand.content.nbytes == 2 << 40
