"""serial_root: floor(sqrt(x))."""

import math

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Source, exchange, parameters, reset, simulate, start

COVER = Coverage()


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def random_numbers(dut, pressure):
    rng = await start(dut)
    width = parameters()["W"]
    numbers = [0, 1, 2, 3, 4, (1 << width) - 1, 1 << width - 2, (1 << width - 2) - 1]
    numbers += [rng.getrandbits(rng.randrange(1, width + 1)) for _ in range(20)]
    numbers += [root * root - rng.getrandbits(1) for root in (rng.getrandbits(width // 2) or 1 for _ in range(10))]
    beats = [{"tdata": x} for x in numbers]
    await exchange(dut, rng, beats, [{"tdata": math.isqrt(x)} for x in numbers], pressure, COVER)


@cocotb.test()
async def reset_while_busy(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send([{"tdata": 81}])
    await reset(dut)
    await exchange(dut, rng, [{"tdata": 144}], [{"tdata": 12}], (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "width"), [("icarus", 20), ("verilator", 68)])
def test_serial_root(simulator, width):
    simulate("serial_root", {"W": width}, simulator)
