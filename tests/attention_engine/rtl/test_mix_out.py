"""mix_out: the output in FP16."""

import cocotb
import numpy as np
import pytest
from rtl_bench import PRESSURES, Coverage, Source, exchange, halves, reset, simulate, start

from attention_engine.rtl.golden import mix_out

COVER = Coverage()


def cases(rng, count):
    beats, due = [], []
    for number in range(count):
        size = rng.getrandbits(rng.randrange(1, 47))
        if number % 7 == 0:  # a tie between two FP16 values, or next to it
            size = (rng.getrandbits(12) | 1) << rng.randrange(5, 34)
            size += rng.choice((-1, 0, 0, 1))
        rest = rng.choice((0, 1 << 24, rng.randrange(1 << 24)))
        if number % 7 == 1:  # rounds up beyond what the exponent can say
            size, rest = (1 << 47) - 1 - rng.getrandbits(34), 0
        out = size * rng.choice((1, -1))
        mean = rng.choice((0, 0x8000, 0x7C00, *halves(rng, 4)))
        last = rng.getrandbits(1)
        bits = mix_out(out, rest, mean)
        beats.append({"out": out & (1 << 48) - 1, "rest": rest, "mean": mean, "tlast": last})
        due.append({"tdata": bits, "tlast": last})
        COVER.hit("zero" if bits & 0x7FFF == 0 else "subnormal" if bits & 0x7C00 == 0 else "normal")
        COVER.hit("largest" if bits & 0x7FFF == 0x7BFF else "below", "rest" if rest else "no rest")
    return beats, due


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_channels(dut, pressure):
    rng = await start(dut)
    await exchange(dut, rng, *cases(rng, 500), pressure, COVER)


@cocotb.test()
async def reset_while_busy(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send(cases(rng, 3)[0])
    await reset(dut)
    await exchange(dut, rng, *cases(rng, 3), (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("zero", "subnormal", "normal", "largest", "below", "rest", "no rest")
    COVER.require("s idle", "s held up", "m waits", "m held up")


def test_rounding_equals_numpy():
    rng = np.random.default_rng(1)
    for size in rng.integers(0, 1 << 46, 2000) >> rng.integers(0, 46, 2000):
        want = np.float64(int(size) * 2.0**-30).astype(np.float16).view(np.uint16)
        assert mix_out(int(size), 0, 0) == min(int(want), 0x7BFF)


@pytest.mark.rtl
@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_mix_out(simulator):
    simulate("mix_out", {}, simulator)
