"""fx_scale: sums to fixed point, with saturation."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Source, exchange, parameters, reset, simulate, start

from attention_engine.rtl.golden import fx_scale

COVER = Coverage()


def cases(rng, count):
    """Sums of every size, scales of every exponent that leaves something of them."""
    bits, frac = parameters()["OUT_W"], parameters()["OUT_FRAC"]
    beats, due = [], []
    for number in range(count):
        total = rng.getrandbits(rng.randrange(1, 88)) * rng.choice((1, -1)) if number % 8 else 0
        mant = rng.choice((1 << 23, (1 << 24) - 1, rng.randrange(1 << 23, 1 << 24)))
        exp = min(127, max(0, abs(total).bit_length() - 48 + 24 - rng.randrange(-frac - 6, bits - frac + 3)))
        if number % 9 == 4:  # next to nothing is left
            exp = rng.randrange(90, 128)
        if number % 11 == 3:
            mant = 0
        user = rng.getrandbits(5)
        beats.append({"tdata": total & (1 << 88) - 1, "mant": mant, "exp": exp, "tuser": user})
        value, over = fx_scale(total, mant, exp, bits, frac)
        due.append({"tdata": value & (1 << bits) - 1, "over": int(over), "tuser": user})
        COVER.hit("saturates" if over else "zero" if value == 0 else "fits", "negative" if total < 0 else "positive")
    return beats, due


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_sums(dut, pressure):
    rng = await start(dut)
    await exchange(dut, rng, *cases(rng, 300), pressure, COVER)


@cocotb.test()
async def halves_round_away_from_zero(dut):
    rng = await start(dut)
    frac, bits = parameters()["OUT_FRAC"], parameters()["OUT_W"]
    # 1.5 units of the result: the sum is 3 x 2^(47 - frac)
    total = 3 << 47 - frac
    beats = [{"tdata": t & (1 << 88) - 1, "mant": 1 << 23, "exp": 23, "tuser": 0} for t in (total, -total)]
    due = [{"tdata": 2}, {"tdata": (1 << bits) - 2}]
    await exchange(dut, rng, beats, due, (0, 0), None)


@cocotb.test()
async def reset_while_busy(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send(cases(rng, 4)[0])
    await reset(dut)
    await exchange(dut, rng, *cases(rng, 4), (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("saturates", "zero", "fits", "negative", "positive", "s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "bits", "frac"), [("icarus", 32, 20), ("verilator", 48, 30)])
def test_fx_scale(simulator, bits, frac):
    simulate("fx_scale", {"OUT_W": bits, "OUT_FRAC": frac, "USER_W": 5}, simulator)
