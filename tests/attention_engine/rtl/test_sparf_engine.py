"""sparf_engine: Algorithm 1 as a whole, equal to its golden model bit by bit."""

import cocotb
import numpy as np
import pytest
from cocotb.triggers import RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster
from rtl_bench import Coverage, Sink, Source, parameters, reset, simulate, start

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
    """Answers page requests from K and V of one head; what is not there reads as ones, like erased flash."""

    def __init__(self, dut, run, keys, values, rng, idle):
        self.dut, self.run, self.keys, self.values, self.rng, self.idle = dut, run, keys, values, rng, idle
        self.requests = []
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
        sink = Sink(self.dut, "m_req", ("tdata",), self.rng, self.idle)
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


async def attend(dut, rng, run, q, keys, values, mean, idle=0.0, busy=0.0):
    """Run the engine once; returns its output (G, d), status and cycles, and the pages it asked for."""
    axil = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil"), dut.clk, dut.rst)
    source = Source(dut, "s_query", rng, idle)
    sink = Sink(dut, "m_out", ("tdata", "tlast"), rng, busy)
    flash = Flash(dut, run, keys, values, rng, idle)
    await reset(dut)
    for address, value in {**run.registers(), 0: 1}.items():
        await axil.write_dword(address, value)
    stream = np.concatenate([q, mean[None]]).T.ravel().tolist()
    await source.send({"tdata": v, "tlast": i == len(stream) - 1} for i, v in enumerate(stream))
    beats = await sink.wait(q.size)
    assert [beat["tlast"] for beat in beats] == [0] * (q.size - 1) + [1]
    status, cycles = await axil.read_dword(4), await axil.read_dword(0x20)
    flash.task.cancel()
    return np.array([beat["tdata"] for beat in beats], np.uint16).reshape(q.shape), status, cycles, flash.requests


def case(rng, run, spread=1.0):
    numbers = np.random.default_rng(rng.getrandbits(32))
    S, d, G = run.seq_len, run.shape.head_dim, run.shape.q_heads
    q, keys, values = (numbers.normal(0, spread, size) for size in ((G, d), (S, d), (S, d)))
    mean = values.astype(np.float16).astype(np.float32).mean(0)
    return [part.astype(np.float16).view(np.uint16) for part in (q, keys, values, mean)]


@cocotb.test()
async def small(dut):
    rng = await start(dut)
    run = EngineRun(shape=shape(), sparf=SparFParams(8, 20, 5), m=4, n=8, seq_len=100)
    data = case(rng, run)
    want = sparf_engine(*data, run)
    got, status, cycles, requests = await attend(dut, rng, run, *data)
    print("NOTE", status, cycles, len(requests), want.channels, want.tokens, want.alpha)
    assert np.array_equal(got, want.out)
    assert status == 2


@pytest.mark.rtl
def test_sparf_engine():
    simulate("sparf_engine", EngineShape(head_dim=64, q_heads=2, lanes=16, n_max=512, page_bytes=1024).verilog())
