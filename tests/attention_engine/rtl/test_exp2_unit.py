"""exp2_unit: 2^x from its table; the table itself against 2^x."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Source, exchange, reset, simulate, start

from attention_engine.rtl.golden import LOGIT_FRAC, exp2_unit
from attention_engine.rtl.tables import FILE, verilog

COVER = Coverage()


def cases(rng, count):
    beats, due = [], []
    for number in range(count):
        x = rng.choice((rng.randrange(-(1 << 32), 1 << 32), rng.randrange(-(1 << 24), 0), number << 12, -1, 0))
        whole, mant = exp2_unit(x)
        user = rng.getrandbits(3)
        beats.append({"tdata": x & (1 << 33) - 1, "tuser": user})
        due.append({"tdata": (whole & 0x1FFF) << 24 | mant, "tuser": user})
        COVER.hit("below one" if x < 0 else "one and above", f"segment {(x >> 12) % 256 // 64}")
    return beats, due


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_exponents(dut, pressure):
    rng = await start(dut)
    await exchange(dut, rng, *cases(rng, 600), pressure, COVER)


@cocotb.test()
async def every_segment(dut):
    """Both ends of all 256 segments."""
    rng = await start(dut)
    xs = [i << 12 | low for i in range(256) for low in (0, 4095)]
    due = [{"tdata": exp2_unit(x)[1]} for x in xs]
    await exchange(dut, rng, [{"tdata": x, "tuser": 0} for x in xs], due, (0, 0), None)


@cocotb.test()
async def reset_while_busy(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send(cases(rng, 3)[0])
    await reset(dut)
    await exchange(dut, rng, *cases(rng, 3), (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("below one", "one and above", *(f"segment {i}" for i in range(4)))
    COVER.require("s idle", "s held up", "m waits", "m held up")


def test_table_is_close_to_exp2_and_monotonic():
    worst, last = 0.0, 0
    for x in range(0, 1 << LOGIT_FRAC, 5):
        whole, mant = exp2_unit(x)
        worst = max(worst, abs(mant / 2**23 / 2 ** (x / 2**LOGIT_FRAC) - 1))
        assert whole == 0 and mant >= last
        last = mant
    assert worst < 1e-6


def test_included_table_equals_golden_table():
    assert FILE.read_text() == verilog(), "run python -m attention_engine.rtl.tables"


@pytest.mark.rtl
@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_exp2_unit(simulator):
    simulate("exp2_unit", {"INT_W": 13, "USER_W": 3}, simulator)
