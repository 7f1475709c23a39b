"""gemv_av: exact weighted sums of rows, in two banks."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, halves, pack, parameters, reset, signed, simulate, start

from attention_engine.rtl.golden import fp16_bad, fp16_units

COVER = Coverage()
FIELDS = ("tdata", "tid", "tuser", "tlast")


def weight(rng):
    """(bits of a weight, its value in units of 2^-24)."""
    width = parameters()["SIG_W"]
    sign, shift, sig = rng.getrandbits(1), rng.randrange(30), rng.choice((0, (1 << width) - 1, rng.getrandbits(width)))
    return sign << width + 5 | shift << width | sig, (-sig if sign else sig) << shift


def batch(rng, bank, length, rows):
    """Rows of one sum: beats of s_w, beats of s_row, and the sums that are due."""
    p = parameters()
    lanes, heads = p["LANES"], p["Q_HEADS"]
    weights, beats = [], []
    sums = [[0] * length for _ in range(heads)]
    bad = [False] * (length // lanes)
    for number in range(rows):
        row = halves(rng, length)
        if rng.random() < 0.1:
            row[rng.randrange(length)] = 0xFFFF
        for head in range(heads):
            bits, value = weight(rng)
            weights.append({"tdata": bits})
            sums[head] = [s + value * fp16_units(v) for s, v in zip(sums[head], row, strict=True)]
        for at in range(0, length, lanes):
            part = row[at : at + lanes]
            keep = rng.choice(((1 << lanes) - 1, rng.getrandbits(lanes)))
            bad[at // lanes] |= any(fp16_bad(value) and keep >> lane & 1 for lane, value in enumerate(part))
            last = at + lanes == length
            beats.append({"tdata": pack(part, 16), "tkeep": keep, "tuser": number == 0, "tdest": bank, "tlast": last})
    out = [
        {"tdata": value, "tid": head, "tuser": bad[i // lanes], "tlast": head == heads - 1 and i == length - 1}
        for head in range(heads)
        for i, value in enumerate(sums[head])
    ]
    COVER.hit(f"{length // lanes} beats", f"{rows} rows", *("bad" if any(bad) else "good" for _ in range(1)))
    return weights, beats, out


async def check(dut, rng, batches, pressure):
    """Batches in turn, each drained while the next one comes."""
    lanes = parameters()["LANES"]
    s_w, s_row = Source(dut, "s_w", rng, pressure[0]), Source(dut, "s_row", rng, pressure[0], COVER)
    drain, sink = Source(dut, "s_drain", rng), Sink(dut, "m", FIELDS, rng, pressure[1], COVER)
    pos_w = (parameters()["RUN_MAX"] // lanes - 1).bit_length()
    due, sending = [], None
    for number, (weights, beats, out) in enumerate(batches):
        task = cocotb.start_soon(s_w.send(weights))
        await s_row.send(beats)
        await task
        if sending:
            await sending
        while len(sink.beats) < len(due):  # the other bank is free again before it is used
            await cocotb.triggers.RisingEdge(dut.clk)
        due += out
        words = len(beats) // max(1, sum(b["tlast"] for b in beats))
        sending = cocotb.start_soon(drain.send([{"tdata": (number % 2) << pos_w | words - 1}]))
    await sending
    got = [{**b, "tdata": signed(b["tdata"], 88)} for b in await sink.wait(len(due))]
    assert got == due
    sink.task.cancel()


def still(dut):
    for name in ("s_w", "s_row", "s_drain"):
        getattr(dut, f"{name}_tvalid").value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_batches(dut, pressure):
    still(dut)
    rng = await start(dut)
    p = parameters()
    longest = p["RUN_MAX"] // p["LANES"]
    sizes = [(1, 1), (1, 9), (2, 6), (longest, 3), (longest, 1), (3, 12), (1, 2), (longest, 4)]
    batches = [batch(rng, i % 2, words * p["LANES"], rows) for i, (words, rows) in enumerate(sizes)]
    await check(dut, rng, batches, pressure)


@cocotb.test()
async def reset_while_busy(dut):
    still(dut)
    rng = await start(dut)
    p = parameters()
    weights, beats, _ = batch(rng, 0, 2 * p["LANES"], 3)
    task = cocotb.start_soon(Source(dut, "s_w", rng).send(weights))
    await Source(dut, "s_row", rng).send(beats[:-1])
    task.cancel()
    await reset(dut)
    await check(dut, rng, [batch(rng, 0, 2 * p["LANES"], 3)], (0, 0))


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("1 beats", "2 beats", "3 beats", "1 rows", "9 rows", "bad", "good")
    COVER.require("s_row idle", "s_row held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "heads", "lanes", "run"), [("icarus", 2, 8, 32), ("verilator", 1, 32, 128), ("verilator", 3, 8, 64)]
)
def test_gemv_av(simulator, heads, lanes, run):
    simulate("gemv_av", {"RUN_MAX": run, "Q_HEADS": heads, "LANES": lanes, "SIG_W": 17}, simulator, covers=heads > 1)
