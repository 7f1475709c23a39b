"""int8_unpack: pages of 8-bit keys and values, unpacked to FP16."""

import cocotb
import numpy as np
import pytest
from progressive_pages import refined_page
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, simulate, start

from attention_engine.rtl.golden_progressive import MAX_EXPONENT, MIN_EXPONENT, int8_unpack
from attention_engine.rtl.params import ProgressiveShape

COVER = Coverage()
FIELDS = ("tdata", "tuser", "end", "tlast")


def shape():
    return ProgressiveShape(head_dim=parameters()["DIM"], m=parameters()["DIM"], page_bytes=parameters()["PAGE_BYTES"])


def beats(page):
    size = 2 * parameters()["LANES"]
    parts = [page[at : at + size] for at in range(0, len(page), size)]
    return [{"tdata": int.from_bytes(p, "little"), "tlast": i == len(parts) - 1} for i, p in enumerate(parts)]


def due(page):
    lanes, d = parameters()["LANES"], parameters()["DIM"]
    out = []
    for half, rows in enumerate(int8_unpack(page, shape())):
        words = rows.reshape(-1, lanes)
        for number, word in enumerate(words, 1):
            data = int.from_bytes(word.tobytes(), "little")
            out.append((data, half, int(number % (d // lanes) == 0), int(number == len(words))))
    return [dict(zip(FIELDS, beat, strict=True)) for beat in out]


def any_page(numbers, low=MIN_EXPONENT, high=MAX_EXPONENT):
    d, n = shape().head_dim, shape().refined
    codes = numbers.integers(-128, 128, (2, n, d))
    codes[numbers.random(codes.shape) < 0.1] = 0
    exponents = [numbers.integers(low, high + 1, size) for size in (d, n)]
    for exponent in exponents:
        exponent[:2] = max(low, MIN_EXPONENT - 1), min(high, MAX_EXPONENT + 1)
    return refined_page(shape(), *exponents, codes)


async def check(dut, rng, pages, pressure=(0, 0), cover=None):
    sink = Sink(dut, "m", FIELDS, rng, pressure[1], cover)
    await Source(dut, "s", rng, pressure[0], cover).send(beat for page in pages for beat in beats(page))
    want = [beat for page in pages for beat in due(page)]
    cycles = sink.cycles
    assert await sink.wait(len(want)) == want
    sink.task.cancel()
    return cycles


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_pages(dut, pressure):
    """Exponents that FP16 has, and some that it has not."""
    rng = await start(dut)
    numbers = np.random.default_rng(rng.getrandbits(32))
    await check(dut, rng, [any_page(numbers), any_page(numbers, -128, 127), any_page(numbers)], pressure, COVER)


@cocotb.test()
async def every_value_equals_float64(dut):
    """All codes with all exponents of K and some exponents of V: the output is code x 2^exponent."""
    rng = await start(dut)
    d, n = shape().head_dim, shape().refined
    codes = np.resize(np.arange(-128, 128), (-(-256 // n) * n, 1))
    span = np.arange(MIN_EXPONENT, MAX_EXPONENT + 1)
    for at in range(0, len(span), d):
        of_k = np.resize(span[at : at + d], d)
        for number, part in enumerate(codes.reshape(-1, n, 1)):
            of_v = np.resize(np.roll(span, -number), n)
            page = refined_page(shape(), of_k, of_v, np.broadcast_to(part, (2, n, d)))
            got = int8_unpack(page, shape()).view(np.float16).astype(float)
            exact = np.ldexp(part.astype(float), np.stack(np.broadcast_arrays(of_k, of_v[:, None])))
            fits = abs(exact) < 65536
            assert np.array_equal(got[fits], exact[fits]) and np.isinf(got[~fits]).all()
            await check(dut, rng, [page])


@cocotb.test()
async def one_beat_per_cycle_is_output(dut):
    """From the first page's first value to the third one's last: two pages' half beats, and one's values."""
    rng = await start(dut)
    numbers = np.random.default_rng(5)
    p = parameters()
    cycles = await check(dut, rng, [any_page(numbers) for _ in range(3)])
    assert cycles[-1] - cycles[0] + 1 == 2 * p["PAGE_BYTES"] // p["LANES"] + len(cycles) // 3


@cocotb.test()
async def reset_in_a_page(dut):
    rng = await start(dut)
    numbers = np.random.default_rng(6)
    await Source(dut, "s", rng).send(beats(any_page(numbers))[:5])
    await reset(dut)
    await check(dut, rng, [any_page(numbers)])


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "d", "lanes", "page"),
    [("icarus", 48, 16, 1024), ("verilator", 64, 32, 4096), ("verilator", 64, 16, 4096), ("verilator", 32, 8, 576)],
)
def test_int8_unpack(simulator, d, lanes, page):
    simulate("int8_unpack", {"DIM": d, "LANES": lanes, "PAGE_BYTES": page}, simulator)
