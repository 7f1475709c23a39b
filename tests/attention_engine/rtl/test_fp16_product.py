"""fp16_product: exact products of a coefficient and an FP16 value."""

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from rtl_bench import SPECIAL, halves, parameters, signed, simulate

from attention_engine.rtl.golden import fp16_bad, fp16_units


@cocotb.test()
async def random_products(dut):
    """Every special value, and 1500 others; the pipeline stands still whenever `en` is low."""
    rng = await start_clock(dut)
    width = parameters()["SIG_W"]
    values = [*SPECIAL, 0x7C00, 0xFC00, 0x7E00, *halves(rng, 1500)]
    due, stage = [], []
    for took, b in enumerate(values, 1):
        sign, sig, shift = (
            rng.getrandbits(1),
            rng.choice((0, (1 << width) - 1, rng.getrandbits(width))),
            rng.randrange(30),
        )
        dut.a_sign.value, dut.a_sig.value, dut.a_shift.value, dut.b.value = sign, sig, shift, b
        while rng.random() < 0.3:
            dut.en.value = 0
            await RisingEdge(dut.clk)
        dut.en.value = 1
        await RisingEdge(dut.clk)
        due.append(((-sig if sign else sig) * fp16_units(b) << shift, fp16_bad(b)))
        dut.en.value = 0
        await RisingEdge(dut.clk)
        if took >= 4:
            stage.append((signed(int(dut.ones.value), 88) + int(dut.minus.value), bool(dut.bad.value)))
    assert stage == due[: len(stage)] and len(stage) == len(values) - 3


async def start_clock(dut):
    import random

    from cocotb.clock import Clock

    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    dut.en.value = 1
    return random.Random(cocotb.RANDOM_SEED)


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "width"), [("icarus", 11), ("verilator", 17)])
def test_fp16_product(simulator, width):
    simulate("fp16_product", {"SIG_W": width}, simulator)
