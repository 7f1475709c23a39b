"""progressive_engine: the method as a whole, equal to its golden model bit by bit.

partner of: attention_engine/rtl/golden_engine.py
"""

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster
from progressive_pages import head_pages
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, signed, simulate, start

from attention_engine.rtl.golden_engine import GoldenPages, progressive_engine
from attention_engine.rtl.params import ProgressiveRun, ProgressiveShape

COVER = Coverage()


def shape():
    p = parameters()
    return ProgressiveShape(
        head_dim=p["DIM"] * p["PARTS"],
        m=p["DIM"],
        q_heads=p["Q_HEADS"],
        page_bytes=p["PAGE_BYTES"],
        k_bits=2 * p["DIGITS"] / p["DIM"],
        v_bits=p["V_BITS"],
    )


def case(numbers, tokens, peak=3.0):
    """q (G, d), K and V (S, d), FP16; some tokens' K are like q, so that they weigh much."""
    size = shape()
    q = numbers.normal(0, 1.5, (size.q_heads, size.head_dim)).astype(np.float16)
    K, V = (numbers.normal(0, 1, (tokens, size.head_dim)) for _ in range(2))
    for token in numbers.integers(0, tokens, max(1, tokens // 50)):
        K[token] += peak * q[numbers.integers(0, size.q_heads)] / 4
    return q, K.astype(np.float16), V.astype(np.float16)


class Flash:
    """Answers requests for a head's pages."""

    def __init__(self, dut, rng, idle):
        self.dut, self.requests, self.pages = dut, [], None
        self.sink = Sink(dut, "m_req", ("tdata",), rng, idle)
        self.source = Source(dut, "s_page", rng, idle)
        self.task = cocotb.start_soon(self._serve())

    async def _serve(self):
        served = 0
        while True:
            while served == len(self.sink.beats):
                await RisingEdge(self.dut.clk)
            request = self.sink.beats[served]["tdata"]
            kind, index, part = request >> 32, request >> 16 & 0xFFFF, request & 0xFFFF
            self.requests.append((kind, index, part))
            served += 1
            pages = self.pages
            page = pages.refined[index] if kind == 1 else (pages.scores if kind == 0 else pages.values)[index][part]
            beats = [int.from_bytes(page[at : at + 16], "little") for at in range(0, len(page), 16)]
            await self.source.send({"tdata": b, "tlast": int(i == len(beats) - 1)} for i, b in enumerate(beats))


class Bench:
    """The engine with its host and its flash."""

    def __init__(self, dut, rng, idle=0.0, busy=0.0, axil=None):
        self.dut = dut
        self.axil = axil or AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil"), dut.clk, dut.rst)
        self.flash = Flash(dut, rng, idle)
        self.source = Source(dut, "s_query", rng, idle, COVER)
        self.sink = Sink(dut, "m_out", ("tdata", "tlast"), rng, busy, COVER)

    def stop(self):
        for task in (self.sink.task, self.flash.task, self.flash.sink.task):
            task.cancel()
        self.dut.s_query_tvalid.value = self.dut.s_page_tvalid.value = 0

    async def begin(self, run):
        for address, value in {**run.registers(), 0: 1}.items():
            await self.axil.write_dword(address, value)

    async def attend(self, run, q, pages):
        """The output (G, d) and status."""
        self.flash.pages, self.flash.requests = pages, []
        await self.begin(run)
        stream = q.T.ravel().tolist()
        await self.source.send({"tdata": v, "tlast": int(i == len(stream) - 1)} for i, v in enumerate(stream))
        beats = await self.sink.wait(q.size, 60_000)
        assert [beat["tlast"] for beat in beats] == [0] * (q.size - 1) + [1]
        out = np.array([beat["tdata"] for beat in beats], np.uint16).reshape(q.shape)
        return out, await self.axil.read_dword(4)

    async def rows(self, count):
        """m and l of each query."""
        words = [await self.axil.read_dword(0x40 + 4 * i) for i in range(4 * count)]
        return [(signed(words[i], 32), words[i + 1] | words[i + 2] << 32) for i in range(0, len(words), 4)]

    async def check(self, run, q, pages):
        """Output, status, m and l, and the requested pages must equal the golden model's."""
        bits = np.ascontiguousarray(q).view(np.uint16)
        want, size = progressive_engine(bits, pages, run), run.shape
        got, status = await self.attend(run, bits, pages)
        parts, groups = range(size.parts), range(-(-run.seq_len // size.form.T))
        due = [(0, group, part) for group in groups for part in parts]
        due += [(1, page, 0) for page in np.flatnonzero(want.chosen).tolist()]
        due += [(2, page, part) for page in np.flatnonzero(want.read).tolist() for part in parts]
        assert self.flash.requests == due, "pages that are chosen"
        assert await self.rows(len(q)) == want.rows
        assert np.array_equal(got, want.out)
        assert status == 2 | want.bad << 8 | want.over << 9
        assert await self.axil.read_dword(0x28) == want.chosen.sum()
        assert await self.axil.read_dword(0x2C) == want.read.sum()
        assert await self.axil.read_dword(0x20) > 0
        for part, name in ((want.chosen, "refined"), (want.read, "values")):
            COVER.hit(f"no {name}" if not part.any() else f"all {name}" if part.all() else f"some {name}")
        return want


def run_of(tokens, gain, mass):
    gain, mass = (min(round(value * 2**32), 2**32 - 1) for value in (gain, mass))
    return ProgressiveRun(shape=shape(), seq_len=tokens, gain_threshold=gain, mass_threshold=mass)


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_rows(dut, pressure):
    """Sequences and thresholds of all kinds; idle cycles in q, requests and pages, back-pressure on the output."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng, *pressure)
    most = parameters()["N_MAX"]
    for tokens, gain, mass in (
        (most, 1e-3, 0.1),
        (most - 3, 0.02, 0.3),
        (17, 0, 0),
        (1, 1, 1),
        (most // 2, 1, 0),
        (most, 1, 1),
    ):
        q, K, V = case(numbers, tokens)
        await bench.check(run_of(tokens, gain, mass), q, head_pages(shape(), K, V))


@cocotb.test()
async def special_values(dut):
    """NaN in q, q of zeros, V of zeros, scores beyond their range, exact scores far above the approximate ones."""
    rng = await start(dut)
    numbers, bench = np.random.default_rng(rng.getrandbits(32)), Bench(dut, rng)
    tokens = 40
    for kind in ("nan in q", "zero q", "zero V", "large", "plain"):
        q, K, V = case(numbers, tokens)
        if kind == "nan in q":
            q[0, 3] = np.nan
        elif kind == "zero q":
            q[:] = 0
        elif kind == "zero V":
            V[:] = 0
        elif kind == "large":
            q *= np.float16(200)
            K *= np.float16(200)
        want = await bench.check(run_of(tokens, 1e-3, 0.05), q, head_pages(shape(), K, V))
        COVER.hit(kind, *["over"] * want.over, *["bad"] * want.bad)
    q, K, V = case(numbers, tokens)
    pages, other = head_pages(shape(), K, V), head_pages(shape(), 40 * K, V)
    want = await bench.check(run_of(tokens, 0, 0), q, GoldenPages(pages.scores, other.refined, pages.values))
    COVER.hit(*["beyond"] * want.over)


@cocotb.test()
async def registers_and_refusals(dut):
    rng = await start(dut)
    bench, p = Bench(dut, rng), parameters()
    for tokens in (0, p["N_MAX"] + 1, 1 << 31):
        await bench.axil.write_dword(0x08, tokens)
        await bench.axil.write_dword(0, 1)
        assert await bench.axil.read_dword(4) == 4
    await bench.begin(run_of(5, 0.5, 0.25))
    assert await bench.axil.read_dword(4) == 1
    registers = {0x08: 5, 0x0C: 1 << 31, 0x10: 1 << 30, 0x14: p["VALUES"] << 16 | p["REFINED"]}
    registers |= {0x24: p["Q_HEADS"] << 16 | p["DIM"] * p["PARTS"], 0x28: 0, 0xFC: 0}
    for address, value in registers.items():
        assert await bench.axil.read_dword(address) == value


@cocotb.test()
async def reset_at_any_time(dut):
    """A run is broken off in each phase; the next one is right."""
    rng = await start(dut)
    numbers = np.random.default_rng(rng.getrandbits(32))
    q, K, V = case(numbers, 60)
    pages, run = head_pages(shape(), K, V), run_of(60, 1e-3, 0.05)
    axil = None
    for wait in (40, 300, 700, 1000, 1400, 2000):
        bench = Bench(dut, rng, axil=axil)
        axil = bench.axil
        task = cocotb.start_soon(bench.attend(run, q.view(np.uint16), pages))
        for _ in range(wait):
            await RisingEdge(dut.clk)
        task.cancel()
        bench.stop()
        await reset(dut)
    await Bench(dut, rng, axil=axil).check(run, q, pages)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("no refined", "some refined", "all refined", "no values", "all values", "bad", "over", "beyond")
    COVER.require("s_query idle", "m_out waits", "m_out held up", "nan in q", "zero q", "zero V", "large")


SMALL = ProgressiveShape(head_dim=32, m=16, q_heads=2, page_bytes=512)
GROUP = ProgressiveShape(head_dim=64, m=64, q_heads=3, page_bytes=2048, v_bits=4)


@pytest.mark.slow
@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "shape", "n_max"),
    [pytest.param("icarus", SMALL, 200, marks=pytest.mark.long), ("verilator", SMALL, 300), ("verilator", GROUP, 500)],
    ids=["icarus", "2 x 16", "64 x 3"],
)
def test_progressive_engine(simulator, shape, n_max):
    simulate("progressive_engine", shape.engine(n_max), simulator)
