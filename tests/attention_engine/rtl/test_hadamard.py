"""hadamard: vectors times a Hadamard matrix."""

import cocotb
import numpy as np
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, exchange, parameters, reset, simulate, start

from attention_engine.rtl.golden_progressive import hadamard

COVER = Coverage()


def cases(rng, count):
    """Vectors one after the other, some of them of extremes, and their expected results."""
    size, width = parameters()["SIZE"], parameters()["IN_W"]
    out = width + size.bit_length() - 1
    most = (1 << width - 1) - 1
    vectors = [[rng.randint(-most - 1, most) for _ in range(size)] for _ in range(count)]
    vectors += [[most] * size, [-most - 1] * size]
    users = [rng.getrandbits(3) for _ in range(size * len(vectors))]
    values = [value for vector in vectors for value in vector]
    beats = [{"tdata": v & (1 << width) - 1, "tuser": u} for v, u in zip(values, users, strict=True)]
    due = [{"tdata": v & (1 << out) - 1, "tuser": u} for v, u in zip(hadamard(values, size), users, strict=True)]
    return beats, due


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_vectors(dut, pressure):
    rng = await start(dut)
    await exchange(dut, rng, *cases(rng, 5), pressure, COVER)


@cocotb.test()
async def one_value_per_cycle(dut):
    rng = await start(dut)
    beats, due = cases(rng, 4)
    sink = Sink(dut, "m", ("tdata", "tuser"), rng)
    await Source(dut, "s", rng).send(beats)
    cycles = sink.cycles
    assert await sink.wait(len(due)) == due
    assert np.array_equal(np.diff(cycles), np.ones(len(due) - 1))


@cocotb.test()
async def reset_in_a_vector(dut):
    rng = await start(dut)
    await Source(dut, "s", rng).send(cases(rng, 1)[0][: parameters()["SIZE"] * 3 // 2 + 1])
    await reset(dut)
    await exchange(dut, rng, *cases(rng, 1), (0, 0), None)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "size", "width"), [("icarus", 16, 20), ("verilator", 64, 64), ("verilator", 128, 64)]
)
def test_hadamard(simulator, size, width):
    simulate("hadamard", {"SIZE": size, "IN_W": width, "USER_W": 3}, simulator)
