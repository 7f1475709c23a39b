"""fp16_dot: exact sums of any length, contexts and values."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, halves, pack, parameters, reset, signed, simulate, start

from attention_engine.rtl.golden import fp16_dot, fp16_units

COVER = Coverage()


def vectors(rng, lanes, contexts, count):
    """Vectors of 1 to 4 beats whose beats are interleaved, and the expected results in the order of the last beats."""
    beats, due = [], []
    for _ in range(count):
        group = [rng.randrange(1, 5) * lanes for _ in range(contexts)]
        data = [(halves(rng, size), halves(rng, size, rng.random())) for size in group]
        if rng.random() < 0.2:  # all of one size
            data[0] = ([0x3C00 | v & 0x83FF for v in data[0][0]], [0x3C00 | v & 0x83FF for v in data[0][1]])
        if rng.random() < 0.2:
            data[0][0][0] = rng.choice((0x7C00, 0xFC00, 0x7E01))
        for at in range(0, max(group), lanes):
            for context, (a, b) in enumerate(data):
                if at < len(a):
                    part = slice(at, at + lanes)
                    last = at + lanes == len(a)
                    beats.append(
                        {"tdata": pack(a[part] + b[part], 16), "tid": context, "tuser": at == 0, "tlast": last}
                    )
                    if last:
                        due.append((context, *fp16_dot(a, b)))
        cover(data)
    return beats, due


def cover(data):
    for a, b in data:
        sizes = [abs(fp16_units(x) * fp16_units(y)).bit_length() for x, y in zip(a, b, strict=True)]
        spread = max(sizes) - min(size for size in sizes if size) if any(sizes) else 0
        COVER.hit("exponents 40 bits apart" if spread > 40 else "exponents close")
        COVER.hit(f"{len(a) // parameters()['LANES']} beats")


async def check(dut, idle, busy, count):
    rng = await start(dut)
    size = parameters()
    beats, due = vectors(rng, size["LANES"], size["CONTEXTS"], count)
    source = Source(dut, "s", rng, idle, COVER)
    sink = Sink(dut, "m", ("tdata", "tid", "tuser"), rng, busy, COVER)
    await source.send(beats)
    got = [(beat["tid"], signed(beat["tdata"], 88), bool(beat["tuser"])) for beat in await sink.wait(len(due))]
    assert got == due


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_vectors(dut, pressure):
    await check(dut, *pressure, 40)


@cocotb.test()
async def directed(dut):
    """Subnormals, signed zeros, cancellation, the largest sum."""
    rng = await start(dut)
    lanes = parameters()["LANES"]
    ones, minus = [0x3C00] * lanes, [0xBC00] * (lanes // 2) + [0x3C00] * (lanes // 2)
    cases = [
        ([0x0001] * lanes, [0x0001] * lanes),
        ([0x8000] * lanes, ones),
        (ones, minus),
        ([0x7BFF] * lanes, [0xFBFF] * lanes),
        ([0x7BFF, 0xFBFF, *[0] * (lanes - 3), 0x0001], [0x7BFF, 0x7BFF, *[0] * (lanes - 3), 0x0001]),
    ]
    source, sink = Source(dut, "s", rng), Sink(dut, "m", ("tdata",), rng)
    await source.send({"tdata": pack(a + b, 16), "tid": 0, "tuser": 1, "tlast": 1} for a, b in cases)
    got = [signed(beat["tdata"], 88) for beat in await sink.wait(len(cases))]
    assert got == [fp16_dot(a, b)[0] for a, b in cases]
    assert got[2] == 0 and got[4] == 1


@cocotb.test()
async def one_beat_per_cycle(dut):
    rng = await start(dut)
    lanes = parameters()["LANES"]
    source, sink = Source(dut, "s", rng), Sink(dut, "m", ("tdata",), rng)
    await source.send({"tdata": pack(halves(rng, 2 * lanes), 16), "tid": 0, "tuser": 1, "tlast": 1} for _ in range(50))
    while len(sink.beats) < 50:
        await cocotb.triggers.RisingEdge(dut.clk)
    assert sink.cycles[-1] - sink.cycles[0] == 49


@cocotb.test()
async def reset_in_a_vector(dut):
    rng = await start(dut)
    lanes = parameters()["LANES"]
    source, sink = Source(dut, "s", rng), Sink(dut, "m", ("tdata",), rng)
    await source.send({"tdata": pack(halves(rng, 2 * lanes), 16), "tid": 0, "tuser": 1, "tlast": 0} for _ in range(7))
    await reset(dut)
    a, b = halves(rng, lanes), halves(rng, lanes)
    await source.send([{"tdata": pack(a + b, 16), "tid": 0, "tuser": 1, "tlast": 1}])
    assert signed((await sink.wait(1))[0]["tdata"], 88) == fp16_dot(a, b)[0]


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("exponents 40 bits apart", "exponents close", *(f"{n} beats" for n in range(1, 5)))
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "lanes", "contexts"), [("verilator", 16, 2), ("icarus", 8, 1), ("verilator", 128, 1)]
)
def test_fp16_dot(simulator, lanes, contexts):
    simulate("fp16_dot", {"LANES": lanes, "CONTEXTS": contexts}, simulator)
