"""serial_multiply: a x b."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Source, exchange, parameters, reset, simulate, start

COVER = Coverage()


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def random_numbers(dut, pressure):
    rng = await start(dut)
    a_bits, b_bits = parameters()["A_W"], parameters()["B_W"]
    pairs = [(0, 1), ((1 << a_bits) - 1, (1 << b_bits) - 1), ((1 << a_bits) - 1, 0), (1, (1 << b_bits) - 1)]
    for _ in range(30):
        pairs.append((rng.getrandbits(rng.randrange(1, a_bits + 1)), rng.getrandbits(rng.randrange(1, b_bits + 1))))
    await exchange(
        dut, rng, [{"a": a, "b": b} for a, b in pairs], [{"tdata": a * b} for a, b in pairs], pressure, COVER
    )


@cocotb.test()
async def reset_while_busy(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send([{"a": 77, "b": 3}])
    await reset(dut)
    await exchange(dut, rng, [{"a": 1000, "b": 7}], [{"tdata": 7000}], (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "a", "b"), [("icarus", 66, 33), ("verilator", 20, 9)])
def test_serial_multiply(simulator, a, b):
    simulate("serial_multiply", {"A_W": a, "B_W": b}, simulator)
