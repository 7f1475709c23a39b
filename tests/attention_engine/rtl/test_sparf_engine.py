"""sparf_engine: Algorithm 1 as a whole, equal to its golden model bit by bit."""

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster
from rtl_bench import PRESSURES, Coverage, Sink, Source, parameters, reset, signed, simulate, start

from attention_engine.clock import sparf_cycles
from attention_engine.rtl.golden import sparf_engine
from attention_engine.rtl.params import EngineRun, EngineShape
from csd_spec import SparFParams

COVER = Coverage()


def shape():
    p = parameters()
    return EngineShape(
        head_dim=p["DIM"],
        q_heads=p["Q_HEADS"],
        lanes=p["LANES"],
        n_max=p["N_MAX"],
        page_bytes=2 * p["PAGE_VALUES"],
        topk_ways=p["WAYS"],
    )


class Flash:
    """Answers page requests from K and V of one head; missing pages read as ones, like erased flash."""

    def __init__(self, dut, rng, idle):
        self.dut, self.rng, self.idle, self.requests = dut, rng, idle, []
        self.task = cocotb.start_soon(self._serve())

    def page(self, request):
        kind, group, page = request >> 32, request >> 16 & 0xFFFF, request & 0xFFFF
        out = np.full(self.run.shape.page_values, 0xFFFF, np.uint16)
        if kind == 0:
            T, m = self.run.group_tokens, self.run.m
            part = self.keys[group * T : (group + 1) * T, page * m : (page + 1) * m]
            out.reshape(m, T)[:, : len(part)] = part.T
        else:
            rows = (self.keys if kind == 1 else self.values)[group * self.run.n : (group + 1) * self.run.n]
            out[: rows.size] = rows.ravel()
        return out

    async def _serve(self):
        self.sink = sink = Sink(self.dut, "m_req", ("tdata",), self.rng, self.idle)
        source = Source(self.dut, "s_page", self.rng, self.idle)
        served = 0
        while True:
            while served == len(sink.beats):
                await RisingEdge(self.dut.clk)
            request = sink.beats[served]["tdata"]
            self.requests.append(request)
            data, lanes = self.page(request), self.run.shape.lanes
            served += 1
            beats = data.reshape(-1, lanes)
            await source.send(
                {"tdata": int.from_bytes(beat.tobytes(), "little"), "tlast": number == len(beats) - 1}
                for number, beat in enumerate(beats)
            )


class Bench:
    """The engine with its host and its flash."""

    def __init__(self, dut, rng, idle=0.0, busy=0.0):
        self.dut, self.rng, self.idle = dut, rng, idle
        self.axil = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil"), dut.clk, dut.rst)
        self.source = Source(dut, "s_query", rng, idle, COVER)
        self.sink = Sink(dut, "m_out", ("tdata", "tlast"), rng, busy, COVER)
        self.flash = Flash(dut, rng, idle)

    def stop(self):
        self.flash.task.cancel()
        self.flash.sink.task.cancel()
        self.sink.task.cancel()
        for name in ("s_query", "s_page"):
            getattr(self.dut, f"{name}_tvalid").value = 0

    async def ready(self):
        """Until argtopk has wiped its bins after a reset."""
        for _ in range(1100):
            await RisingEdge(self.dut.clk)

    async def attend(self, run, q, keys, values, mean):
        """Run the engine once; returns its output (G, d), status and cycles, and the pages it asked for."""
        self.flash.run, self.flash.keys, self.flash.values, self.flash.requests = run, keys, values, []
        for address, value in {**run.registers(), 0: 1}.items():
            await self.axil.write_dword(address, value)
        stream = np.concatenate([q, mean[None]]).T.ravel().tolist()
        await self.source.send({"tdata": v, "tlast": i == len(stream) - 1} for i, v in enumerate(stream))
        beats = await self.sink.wait(q.size, 40_000)
        assert [beat["tlast"] for beat in beats] == [0] * (q.size - 1) + [1]
        status, cycles = await self.axil.read_dword(4), await self.axil.read_dword(0x20)
        out = np.array([beat["tdata"] for beat in beats], np.uint16).reshape(q.shape)
        return out, status, cycles, self.flash.requests

    async def rows(self):
        """m and l of each query."""
        words = [await self.axil.read_dword(0x40 + 4 * i) for i in range(4 * self.flash.run.shape.q_heads)]
        return [(signed(words[i], 32), words[i + 1] | words[i + 2] << 32) for i in range(0, len(words), 4)]

    async def check(self, run, data):
        """Output, status, m and l, and pages must be the golden model's; returns cycles, channels and tokens."""
        want = sparf_engine(*data, run)
        got, status, cycles, requests = await self.attend(run, *data)
        assert np.array_equal(got, want.out)
        assert status == 2 | want.bad << 8
        assert await self.rows() == want.rows
        T, m, n = run.group_tokens, run.m, run.n
        channels, tokens = (sorted({i // size for i in part}) for part, size in ((want.channels, m), (want.tokens, n)))
        due = [g << 16 | p for g in range(-(-run.seq_len // T)) for p in channels]
        assert requests == due + [kind << 32 | g << 16 for kind in (1, 2) for g in tokens]
        return cycles, want.channels, want.tokens


def case(rng, run, spread=1.0):
    numbers = np.random.default_rng(rng.getrandbits(32))
    S, d, G = run.seq_len, run.shape.head_dim, run.shape.q_heads
    q, keys, values = (numbers.normal(0, spread, size) for size in ((G, d), (S, d), (S, d)))
    mean = values.astype(np.float16).astype(np.float32).mean(0)
    return [part.astype(np.float16).view(np.uint16) for part in (q, keys, values, mean)]


@cocotb.test()
async def cycles_equal_clock_model(dut):
    """Several parameter sets one after the other; flash answers at once."""
    rng = await start(dut)
    bench, off = Bench(dut, rng), []
    longest = shape().n_max
    for r, k, recent, m, n, S in [
        (8, 20, 5, 4, 8, 100),
        (8, 37, 10, 2, 4, longest // 2 + 44),
        (shape().head_dim, longest, 0, 8, 8, longest),
        (16, 64, 16, 1, 3, longest - 3),
        (1, 1, 0, 8, 8, 17),
        (5, 5, 5, 4, 7, longest - 1),
        (1, 1, 1, 2, 1, 1),
    ]:
        run = EngineRun(shape=shape(), sparf=SparFParams(r, k, recent), m=m, n=n, seq_len=S)
        await bench.ready()
        measured, *touched = await bench.check(run, case(rng, run))
        formula = sparf_cycles(run, *touched)
        dut._log.info(f"NOTE r {r}, k {k}, m {m}, n {n}, S {S}: {measured} cycles, the clock says {formula}")
        off.append(abs(formula / measured - 1))
    assert max(off) <= 0.02


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES[1:])
async def under_pressure(dut, pressure):
    """Idle cycles in q, requests and pages; back-pressure on the output."""
    rng = await start(dut)
    bench = Bench(dut, rng, *pressure)
    await bench.ready()
    for spread, S in ((1.0, 90), (4.0, 150)):
        run = EngineRun(shape=shape(), sparf=SparFParams(8, S // 4, S // 16), m=4, n=8, seq_len=S)
        await bench.check(run, case(rng, run, spread))


@cocotb.test()
async def special_values(dut):
    """NaN and infinity are told and count as zero; q of zeros; equal tokens; a score beyond its range."""
    rng = await start(dut)
    bench = Bench(dut, rng)
    await bench.ready()
    run = EngineRun(shape=shape(), sparf=SparFParams(8, 10, 2), m=4, n=8, seq_len=60)
    for kind in ("early tokens", "nan in q", "infinity in V", "zero q", "equal tokens", "plain"):
        q, keys, values, mean = case(rng, run)
        if kind == "early tokens":  # pages end long before the bitmap does
            early = EngineRun(shape=shape(), sparf=SparFParams(8, 10, 0), m=4, n=8, seq_len=300)
            data = case(rng, early)
            data[1][20:] = 0x8000
            await bench.check(early, data)
        elif kind == "nan in q":
            q[0, 3] = 0x7E00
        elif kind == "infinity in V":
            values[:] = 0xFC00
        elif kind == "zero q":
            q[:] = 0x8000
        elif kind == "equal tokens":
            keys[:] = keys[0]
        await bench.check(run, (q, keys, values, mean))
        COVER.hit(kind)
    q, keys, values, mean = case(rng, run)
    q[:], keys[:] = 0x7BFF, 0x7BFF
    want = sparf_engine(q, keys, values, mean, run)
    out, status, *_ = await bench.attend(run, q, keys, values, mean)
    assert np.array_equal(out, want.out) and status == 2 | 1 << 9


@cocotb.test()
async def reset_at_any_time(dut):
    """A run is broken off in each phase; the next one is right."""
    rng = await start(dut)
    run = EngineRun(shape=shape(), sparf=SparFParams(8, 20, 5), m=4, n=8, seq_len=100)
    for wait in (20, 700, 1300, 1900, 2600):
        bench = Bench(dut, rng)
        await bench.ready()
        task = cocotb.start_soon(bench.attend(run, *case(rng, run)))
        for _ in range(wait):
            await RisingEdge(dut.clk)
        task.cancel()
        bench.stop()
        await reset(dut)
    bench = Bench(dut, rng)
    await bench.ready()
    await bench.check(run, case(rng, run))


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("s_query idle", "s_query held up", "m_out waits", "m_out held up", "nan in q", "zero q")


SMALL = EngineShape(head_dim=64, q_heads=2, lanes=16, n_max=512, page_bytes=1024)
ONE_QUERY = EngineShape(head_dim=128, q_heads=1, lanes=32, n_max=512, page_bytes=4096, topk_ways=16)


@pytest.mark.slow
@pytest.mark.rtl
@pytest.mark.parametrize("shape", [SMALL, ONE_QUERY], ids=["two queries", "one query"])
def test_sparf_engine(shape):
    simulate("sparf_engine", shape.verilog())
