"""gemv_qk: exact logits of a query group."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, halves, pack, parameters, reset, signed, simulate, start

from attention_engine.rtl.golden import fp16_dot

COVER = Coverage()


def queries(rng, d, heads):
    return [halves(rng, d) for _ in range(heads)]


def load(q):
    """Beats of s_q: channel by channel, the queries of each."""
    flat = [value for channel in zip(*q, strict=True) for value in channel]
    return [{"tdata": value, "tlast": i == len(flat) - 1} for i, value in enumerate(flat)]


def row_beats(row, lanes):
    return [
        {"tdata": pack(row[at : at + lanes], 16), "tlast": at + lanes == len(row)} for at in range(0, len(row), lanes)
    ]


def due(q, rows):
    return [(g, *fp16_dot(query, row)) for row in rows for g, query in enumerate(q)]


async def check(dut, rng, q, rows, pressure):
    p = parameters()
    sink = Sink(dut, "m", ("tdata", "tid", "tuser"), rng, pressure[1], COVER)
    await Source(dut, "s_q", rng, pressure[0]).send(load(q))
    await Source(dut, "s_k", rng, pressure[0], COVER).send(b for row in rows for b in row_beats(row, p["LANES"]))
    want = due(q, rows)
    got = [(b["tid"], signed(b["tdata"], 88), bool(b["tuser"])) for b in await sink.wait(len(want))]
    assert got == want
    sink.task.cancel()


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_rows(dut, pressure):
    dut.s_k_tvalid.value = 0
    rng = await start(dut)
    p = parameters()
    for _ in range(3):  # q is loaded again each time
        rows = [halves(rng, p["DIM"], rng.random()) for _ in range(12)]
        if rng.random() < 0.7:
            rows[3][rng.randrange(p["DIM"])] = 0x7C00
            COVER.hit("infinity")
        await check(dut, rng, queries(rng, p["DIM"], p["Q_HEADS"]), rows, pressure)


@cocotb.test()
async def reset_in_a_row(dut):
    dut.s_k_tvalid.value = 0
    rng = await start(dut)
    p = parameters()
    sink = Sink(dut, "m", ("tdata",), rng)
    await Source(dut, "s_q", rng).send(load(queries(rng, p["DIM"], p["Q_HEADS"])))
    await Source(dut, "s_k", rng).send(row_beats(halves(rng, p["DIM"]), p["LANES"])[:-1])
    await reset(dut)
    sink.task.cancel()
    await check(dut, rng, queries(rng, p["DIM"], p["Q_HEADS"]), [halves(rng, p["DIM"])], (0, 0))


@cocotb.test()
async def rows_at_full_rate(dut):
    """A row takes DIM / LANES cycles for each query."""
    dut.s_k_tvalid.value = 0
    rng = await start(dut)
    p = parameters()
    sink = Sink(dut, "m", ("tid",), rng)
    await Source(dut, "s_q", rng).send(load(queries(rng, p["DIM"], p["Q_HEADS"])))
    await Source(dut, "s_k", rng).send(b for _ in range(10) for b in row_beats(halves(rng, p["DIM"]), p["LANES"]))
    while len(sink.beats) < 10 * p["Q_HEADS"]:
        await cocotb.triggers.RisingEdge(dut.clk)
    firsts = sink.cycles[:: p["Q_HEADS"]]
    assert firsts[-1] - firsts[0] == 9 * p["DIM"] // p["LANES"] * p["Q_HEADS"]


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("infinity", "s_k idle", "s_k held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "dim", "heads", "lanes"), [("icarus", 24, 2, 8), ("verilator", 128, 1, 32), ("verilator", 96, 3, 32)]
)
def test_gemv_qk(simulator, dim, heads, lanes):
    simulate("gemv_qk", {"DIM": dim, "Q_HEADS": heads, "LANES": lanes}, simulator, covers=heads > 1)
