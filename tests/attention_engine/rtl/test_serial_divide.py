"""serial_divide: floor(num / den)."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, exchange, parameters, simulate, start

COVER = Coverage()


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def random_numbers(dut, pressure):
    rng = await start(dut)
    num, den = parameters()["NUM_W"], parameters()["DEN_W"]
    pairs = [(0, 1), ((1 << num) - 1, 1), ((1 << num) - 1, (1 << den) - 1), (5, (1 << den) - 1)]
    for _ in range(30):
        pairs.append((rng.getrandbits(rng.randrange(1, num + 1)), rng.getrandbits(rng.randrange(1, den + 1)) or 1))
    beats = [{"num": a, "den": b} for a, b in pairs]
    await exchange(dut, rng, beats, [{"tdata": a // b} for a, b in pairs], pressure, COVER)


@cocotb.test()
async def reset_while_busy(dut):
    from rtl_bench import Source, reset

    rng = await start(dut)
    await Source(dut, "s", rng).send([{"num": 77, "den": 3}])
    await reset(dut)
    await exchange(dut, rng, [{"num": 1000, "den": 7}], [{"tdata": 142}], (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "num", "den"), [("icarus", 80, 48), ("verilator", 48, 24)])
def test_serial_divide(simulator, num, den):
    simulate("serial_divide", {"NUM_W": num, "DEN_W": den}, simulator)
