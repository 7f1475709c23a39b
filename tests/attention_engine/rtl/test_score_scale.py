"""score_scale: the scale of approximate scores."""

import math

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Source, exchange, parameters, reset, simulate, start

from attention_engine.rtl.golden import score_scale
from attention_engine.rtl.params import EngineShape

COVER = Coverage()


def cases(rng, count):
    scale = parameters()["SCALE_MANT"], parameters()["SCALE_EXP"]
    beats, due = [], []
    for number in range(count):
        chosen = rng.getrandbits(rng.randrange(1, 47)) if number % 5 else 0
        whole = min((1 << 48) - 1, chosen + rng.choice((0, rng.getrandbits(rng.randrange(1, 47)))))
        beats.append({"whole": whole, "kept": chosen})
        mant, exp = score_scale(whole, chosen, *scale)
        due.append({"mant": mant, "exp": exp})
        COVER.hit("nothing kept" if not chosen else "all kept" if whole == chosen else "part kept")
        COVER.hit("saturates" if chosen and whole >> 20 >= chosen else "in range")
    return beats, due


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_norms(dut, pressure):
    rng = await start(dut)
    await exchange(dut, rng, *cases(rng, 25), pressure, COVER)


@cocotb.test()
async def reset_while_busy(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send(cases(rng, 1)[0])
    await reset(dut)
    await exchange(dut, rng, *cases(rng, 2), (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("nothing kept", "all kept", "part kept", "saturates", "in range")
    COVER.require("s idle", "s held up", "m waits", "m held up")


def test_scale_equals_algorithm_1():
    mant, exp = EngineShape(head_dim=128).scale
    for whole, chosen in ((1000 << 24, 300 << 24), (7, 7), (12345678901, 987654321)):
        got = score_scale(whole, chosen, mant, exp)
        want = math.log2(math.e) / math.sqrt(128 * chosen / whole)
        assert got[0] * 2.0 ** -got[1] == pytest.approx(want, rel=2e-7)


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "head_dim"), [("icarus", 64), ("verilator", 128)])
def test_score_scale(simulator, head_dim):
    mant, exp = EngineShape(head_dim=head_dim).scale
    simulate("score_scale", {"SCALE_MANT": mant, "SCALE_EXP": exp}, simulator)
