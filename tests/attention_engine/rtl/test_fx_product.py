"""fx_product: a coefficient times FP16, rounded to fixed point, halves to even."""

import random

import cocotb
import pytest
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge
from rtl_bench import SPECIAL, Coverage, halves, parameters, simulate

from attention_engine.rtl.golden import fp16_bad
from attention_engine.rtl.golden_progressive import fx_product

COVER = Coverage()
LATENCY = 5


def due(sign, sig, shift, b):
    p = parameters()
    size, over = fx_product(sig, shift, b, p["RIGHT"], p["SIZE_W"])
    units = sig * (0 if fp16_bad(b) else 1)
    COVER.hit("saturates" if over else "vanishes" if units and not size else "fits", "bad" if fp16_bad(b) else "good")
    return size, sign ^ b >> 15, int(over), int(fp16_bad(b))


@cocotb.test()
async def random_products(dut):
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    rng = random.Random(cocotb.RANDOM_SEED)
    most = (1 << parameters()["SIG_W"]) - 1
    cases = [
        (rng.getrandbits(1), rng.choice((0, 1, most, rng.randrange(most))), rng.randrange(31), b)
        for b in (*SPECIAL, 0x7C00, 0xFFFF, *halves(rng, 1500))
    ]
    want = [due(*case) for case in cases]
    got = []
    for cycle in range(len(cases) + LATENCY):
        sign, sig, shift, b = cases[min(cycle, len(cases) - 1)]
        dut.a_sign.value, dut.a_sig.value, dut.a_shift.value, dut.b.value = sign, sig, shift, b
        await RisingEdge(dut.clk)
        if cycle >= LATENCY:
            got.append(tuple(int(getattr(dut, name).value) for name in ("size", "sign", "over", "bad")))
    assert got == want
    COVER.require("saturates", "vanishes", "fits", "bad", "good")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "right", "bits"), [("icarus", 37, 38), ("verilator", 37, 38), ("verilator", 2, 20)]
)
def test_fx_product(simulator, right, bits):
    simulate("fx_product", {"SIG_W": 24, "SIZE_W": bits, "RIGHT": right}, simulator)
