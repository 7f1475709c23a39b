"""softmax_online: maximum, sum and reciprocal of interleaved rows of scores."""

from itertools import pairwise

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, simulate, start

from attention_engine.rtl.golden import LOGIT_FRAC, softmax_online

COVER = Coverage()
FIELDS = ("max", "sum", "zeros", "recip", "tid", "tlast")


def rows(rng, contexts, count):
    """Scores (row, x) in turn, each row's spread its own: calm, wild, rising, falling, all equal."""
    kinds = [rng.choice(("calm", "wild", "rising", "falling", "equal")) for _ in range(contexts)]
    stream = []
    for t in range(count):
        for row, kind in enumerate(kinds):
            x = {
                "calm": rng.gauss(0, 3),
                "wild": rng.uniform(-2047, 2047),
                "rising": t * 1.7 - 90,
                "falling": 90 - t * 1.7,
                "equal": -7.25,
            }[kind]
            stream.append((row, int(x * 2**LOGIT_FRAC)))
    COVER.hit(*kinds)
    return stream


def due(stream, contexts):
    beats = []
    for row in range(contexts):
        xs = [x for number, x in stream if number == row]
        got = softmax_online(xs)
        tops = [max(xs[: i + 1]) >> LOGIT_FRAC for i in range(len(xs))]
        steps = [b - a for a, b in pairwise(tops)]
        COVER.hit(
            *("rescale" if step else "no rescale" for step in steps), *("rescale to nothing" for s in steps if s > 48)
        )
        beats.append(
            {
                "max": got.top & 0x1FFF,
                "sum": got.total,
                "zeros": got.zeros,
                "recip": got.recip,
                "tid": row,
                "tlast": row == contexts - 1,
            }
        )
    return beats


def beats(stream):
    last = len(stream) - 1
    return [{"tdata": x & 0xFFFFFFFF, "tid": row, "tlast": i == last} for i, (row, x) in enumerate(stream)]


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_scores(dut, pressure):
    rng = await start(dut)
    contexts = parameters()["CONTEXTS"]
    sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)
    source = Source(dut, "s", rng, pressure[0], COVER)
    streams = [rows(rng, contexts, count) for count in (1, 2, 40, 40, 90, 90)]
    await source.send(beat for stream in streams for beat in beats(stream))
    want = [beat for stream in streams for beat in due(stream, contexts)]
    assert await sink.wait(len(want)) == want


@cocotb.test()
async def one_score_per_cycle(dut):
    rng = await start(dut)
    contexts = parameters()["CONTEXTS"]
    sink, source, local = Sink(dut, "m", FIELDS, rng), Source(dut, "s", rng), Coverage()
    source.cover = local
    stream = rows(rng, contexts, 64)
    await source.send(beats(stream))
    assert not local.bins["s held up"]
    assert await sink.wait(contexts) == due(stream, contexts)


@cocotb.test()
async def reset_in_a_row(dut):
    rng = await start(dut)
    contexts = parameters()["CONTEXTS"]
    source, sink = Source(dut, "s", rng), Sink(dut, "m", FIELDS, rng)
    await source.send(beats(rows(rng, contexts, 9))[:-1])
    await reset(dut)
    stream = rows(rng, contexts, 5)
    await source.send(beats(stream))
    assert await sink.wait(contexts) == due(stream, contexts)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("calm", "wild", "rising", "falling", "equal", "rescale", "no rescale", "rescale to nothing")
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "contexts"), [("icarus", 2), ("verilator", 1), ("verilator", 4)])
def test_softmax_online(simulator, contexts):
    simulate("softmax_online", {"CONTEXTS": contexts}, simulator)
