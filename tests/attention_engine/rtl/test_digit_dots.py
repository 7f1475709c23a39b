"""digit_dots: sums of coefficient x digit for four rows of 16 digits."""

import random

import cocotb
import numpy as np
import pytest
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge
from rtl_bench import pack, parameters, signed, simulate

from attention_engine.rtl.golden_progressive import digit_dots

LATENCY = 3


@cocotb.test()
async def random_digits(dut):
    """Random digits and coefficients, and the extremes of both."""
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    rng, width = random.Random(cocotb.RANDOM_SEED), parameters()["COEF_W"]
    least, most = -(1 << width - 1), (1 << width - 1) - 1
    cases = [(rng.getrandbits(128), [rng.randint(least, most) for _ in range(16)]) for _ in range(400)]
    cases += [((1 << 128) - 1, [value] * 16) for value in (least, most)]
    got = []
    await RisingEdge(dut.clk)
    for cycle in range(len(cases) + LATENCY):
        digits, coefs = cases[min(cycle, len(cases) - 1)]
        dut.digits.value, dut.coefs.value = digits, pack(coefs, width)
        await RisingEdge(dut.clk)
        if cycle >= LATENCY:
            word = int(dut.sums.value)
            got.append([signed(word >> (width + 6) * i & (1 << width + 6) - 1, width + 6) for i in range(4)])
    assert got == [digit_dots(np.frombuffer(d.to_bytes(16, "little"), np.uint8), c) for d, c in cases]


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "width"), [("icarus", 8), ("verilator", 8), ("verilator", 10)])
def test_digit_dots(simulator, width):
    simulate("digit_dots", {"COEF_W": width}, simulator)
