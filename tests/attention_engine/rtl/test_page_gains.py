"""page_gains: selects pages from the weights of their tokens."""

import cocotb
import numpy as np
import pytest
from cocotb.triggers import ClockCycles
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, simulate, start

from attention_engine.rtl.golden_progressive import page_gains, page_limits

COVER = Coverage()
FIELDS = ("tdata", "tkeep", "tlast")
MOST = (1 << 17) - 1


def any_shares(numbers, tokens):
    """Weights (G, tokens): few that are large, many that are small."""
    size = parameters()["Q_HEADS"], tokens
    shares = (np.exp2(-numbers.exponential(6, size)) * MOST).astype(np.int64)
    shares[numbers.random(size) < 0.1] = 0
    return shares


def due(shares, limits):
    p, S = parameters(), shares.shape[1]
    chosen, read = page_gains(shares, limits, p["REFINED"], p["VALUES"])
    beats = []
    for token in range(S):
        ends = [token == S - 1 or token % p[kind] == p[kind] - 1 for kind in ("REFINED", "VALUES")]
        if any(ends):
            bits = [int(part[token // p[kind]]) for part, kind in ((chosen, "REFINED"), (read, "VALUES"))]
            beats.append((bits, ends, int(token == S - 1)))
            COVER.hit(
                *(f"{kind} {bit}" for kind, bit, end in zip(("refined", "value"), bits, ends, strict=True) if end)
            )
    return beats


class Bench:
    """The unit between l, weights and choices."""

    def __init__(self, dut, rng, pressure=(0.0, 0.0)):
        self.dut = dut
        self.s_l, self.s_w = (Source(dut, name, rng, pressure[0], COVER) for name in ("s_l", "s_w"))
        self.sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)

    async def give(self, shares, totals, thresholds):
        self.dut.gain_threshold.value, self.dut.mass_threshold.value = thresholds
        await self.s_l.send({"tdata": total} for total in totals)
        flat = shares.T.ravel().tolist()
        await self.s_w.send({"tdata": w, "tlast": i == len(flat) - 1} for i, w in enumerate(flat))

    async def check(self, shares, totals, thresholds):
        await self.give(shares, totals, thresholds)
        want = due(shares, [page_limits(total, thresholds) for total in totals])
        got = await self.sink.wait(len(want))
        for beat, (bits, ends, last) in zip(got, want, strict=True):
            assert [beat["tkeep"] >> i & 1 for i in range(2)] == ends and beat["tlast"] == last
            for i in range(2):
                assert not ends[i] or beat["tdata"] >> i & 1 == bits[i], f"{beat} came, {bits} was due"


def sums(shares):
    """l of each query, as the softmax gives it: near the sum of weights."""
    return [int(row.sum()) * (1 << 15) + 12345 for row in shares]


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_weights(dut, pressure):
    """Thresholds from none on, sequences of one token and of many."""
    rng = await start(dut)
    numbers, bench, p = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng, pressure), parameters()
    for tokens in (1, p["REFINED"], p["VALUES"] + 1, 3 * p["VALUES"] - 2, rng.randrange(1, 4 * p["VALUES"])):
        for thresholds in ((0, 0), (1 << 20, 1 << 29), (rng.getrandbits(28), rng.getrandbits(31))):
            shares = any_shares(numbers, tokens)
            await bench.check(shares, sums(shares), thresholds)


@cocotb.test()
async def values_at_the_limit(dut):
    """Gains and masses around the threshold that they have to exceed; largest weights; limits beyond any page."""
    rng = await start(dut)
    bench, p = Bench(dut, rng), parameters()
    for w in (3, 1000, MOST):
        shares = np.zeros((p["Q_HEADS"], p["VALUES"]), np.int64)
        shares[-1, : p["REFINED"]] = w
        gain, mass = p["REFINED"] * w * w, p["REFINED"] * w
        for off in (-1, 0, 1):
            totals = [(1 << 48) - 1] * p["Q_HEADS"]
            cut = totals[0] >> 15
            thresholds = (-(-(gain + off << 32) // (cut * cut)), -(-(mass + off << 32) // cut))
            await bench.check(shares, totals, thresholds)
            totals[-1] = 1 << 32
            await bench.check(shares, totals, (max(0, (gain + off >> 2) & 0xFFFFFFFF), (mass + off << 15) & 0xFFFFFFFF))
    full = np.full((p["Q_HEADS"], p["VALUES"]), MOST)
    await bench.check(full, [(1 << 48) - 1] * p["Q_HEADS"], (0xFFFFFFFF, 0xFFFFFFFF))
    await bench.check(full, [0] * p["Q_HEADS"], (0xFFFFFFFF, 0xFFFFFFFF))


@cocotb.test()
async def reset_in_a_sequence(dut):
    rng = await start(dut)
    numbers = np.random.default_rng(rng.getrandbits(32))
    bench = Bench(dut, rng)
    shares = any_shares(numbers, parameters()["REFINED"] - 1)
    await bench.s_l.send({"tdata": total} for total in sums(shares)[:1])
    await reset(dut)
    task = cocotb.start_soon(bench.give(shares, sums(shares), (0, 0)))
    await ClockCycles(dut.clk, 110 * parameters()["Q_HEADS"] + 5)
    task.cancel()
    dut.s_w_tvalid.value = 0
    await reset(dut)
    bench.sink.task.cancel()
    bench = Bench(dut, rng)
    await bench.check(shares, sums(shares), (1 << 20, 1 << 29))


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("refined 0", "refined 1", "value 0", "value 1")
    COVER.require("s_l idle", "s_w idle", "s_w held up", "m waits", "m held up")
    if parameters()["Q_HEADS"] > 1:
        COVER.require("s_l held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "queries", "refined", "values"),
    [("icarus", 2, 5, 16), ("verilator", 8, 31, 224), ("verilator", 1, 127, 112), ("verilator", 3, 16, 16)],
)
def test_page_gains(simulator, queries, refined, values):
    sizes = {"Q_HEADS": queries, "REFINED": refined, "VALUES": values}
    simulate("page_gains", sizes, simulator, covers=queries > 1)
