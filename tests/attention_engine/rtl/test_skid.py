"""skid: every beat once and in order, one per cycle if no side stalls."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, exchange, parameters, reset, simulate, start

COVER = Coverage()


def values(rng, count):
    return [{"tdata": rng.getrandbits(parameters()["W"])} for _ in range(count)]


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_beats(dut, pressure):
    dut.s_tvalid.value = 0
    rng = await start(dut)
    beats = values(rng, 300)
    await exchange(dut, rng, beats, beats, pressure, COVER)


@cocotb.test()
async def one_result_per_cycle(dut):
    dut.s_tvalid.value = 0
    rng = await start(dut)
    sink = Sink(dut, "m", ("tdata",), rng)
    await Source(dut, "s", rng).send(values(rng, 50))
    for _ in range(3):
        await cocotb.triggers.RisingEdge(dut.clk)
    assert sink.cycles[-1] - sink.cycles[0] == 49
    sink.task.cancel()


@cocotb.test()
async def reset_while_full(dut):
    """Buffered beats are gone after a reset."""
    dut.s_tvalid.value = 0
    rng = await start(dut)
    dut.m_tready.value = 0
    await Source(dut, "s", rng).send(values(rng, 2))
    await cocotb.triggers.RisingEdge(dut.clk)
    assert dut.s_tready.value == 0 and dut.m_tvalid.value == 1
    await reset(dut)
    beats = values(rng, 20)
    await exchange(dut, rng, beats, beats, (0.0, 0.0), COVER)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_skid(simulator):
    simulate("skid", {"W": 20}, simulator)
