"""normalize: shifts the leading one to the top bit."""

import random

import cocotb
import pytest
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge
from rtl_bench import parameters, simulate


@cocotb.test()
async def random_numbers(dut):
    """Every position of the leading one, and zero; the pipeline stalls while `en` is low."""
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    dut.en.value = 0
    await RisingEdge(dut.clk)
    rng, width = random.Random(cocotb.RANDOM_SEED), parameters()["W"]
    count = (width - 1).bit_length()
    values = [0, *(1 << i | rng.getrandbits(i) if i else 1 for i in range(width) for _ in range(4))]
    due, got, latency = [], [], (count + 1) // 2
    for value in [*values, *[0] * (latency - 1)]:
        zeros = width - value.bit_length()
        due.append((value << zeros, zeros) if value else (0, (1 << count) - 1))
        dut.value.value, dut.en.value = value, 1
        await RisingEdge(dut.clk)
        dut.en.value = 0
        await RisingEdge(dut.clk)
        got.append((dut.normal.value, dut.zeros.value))
    assert [(int(a), int(b)) for a, b in got[latency - 1 :]] == due[: len(values)]


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "width"), [("icarus", 48), ("icarus", 88), ("verilator", 58), ("verilator", 50)])
def test_normalize(simulator, width):
    simulate("normalize", {"W": width}, simulator)
