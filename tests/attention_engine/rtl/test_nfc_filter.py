"""nfc_filter: passes on only the requested runs of a page."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, pack, parameters, reset, simulate, start

from attention_engine.rtl.golden import nfc_filter

COVER = Coverage()
FIELDS = ("tdata", "tkeep", "tid", "tuser", "end", "tlast")


def page(rng, lanes, runs):
    """(values, wanted runs, length of a run): whole or torn pages, aligned runs or not, none or all wanted."""
    count = rng.choice((1, 2, 4, 8, runs, rng.randrange(1, runs + 1)))
    length = rng.choice((lanes, 2 * lanes, 4 * lanes, rng.randrange(lanes, 5 * lanes)))
    share = rng.choice((0, 0.1, 0.5, 1))
    wanted = [rng.random() < share for _ in range(count)]
    spare = rng.choice((0, 0, rng.randrange(3 * lanes)))
    values = [rng.getrandbits(16) for _ in range(count * length + spare)]
    COVER.hit(
        "aligned" if length % lanes == 0 else "not aligned", f"{sum(wanted) and 1 + (sum(wanted) == count)} wanted"
    )
    COVER.hit(f"{min(count, 9)} runs", "spare" if spare else "no spare")
    return values, wanted, length


def beats(values, lanes):
    parts = [values[at : at + lanes] for at in range(0, len(values), lanes)]
    return [
        {"tdata": pack(part, 16), "tkeep": (1 << len(part)) - 1, "tlast": i == len(parts) - 1}
        for i, part in enumerate(parts)
    ]


def due(values, wanted, length, lanes, tid):
    return [
        {
            "tdata": tuple(v for v, keep in zip(b.data, b.keep, strict=True) if keep),
            "tkeep": pack(b.keep, 1),
            "tid": tid,
            "tuser": b.run,
            "end": b.end,
            "tlast": b.last,
        }
        for b in nfc_filter(values, wanted, length, lanes)
    ]


def seen(beat, lanes):
    values = tuple(beat["tdata"] >> 16 * i & 0xFFFF for i in range(lanes) if beat["tkeep"] >> i & 1)
    return {**beat, "tdata": values}


async def check(dut, rng, pages, pressure):
    lanes = parameters()["LANES"]
    cfg, source = Source(dut, "cfg", rng, pressure[0]), Source(dut, "s", rng, pressure[0], COVER)
    sink = Sink(dut, "m", FIELDS, rng, pressure[1], COVER)
    ahead = cocotb.start_soon(
        cfg.send({"wanted": pack(w, 1), "length": n, "tid": i} for i, (_, w, n) in enumerate(pages))
    )
    await source.send(beat for values, _, _ in pages for beat in beats(values, lanes))
    await ahead
    want = [beat for i, one in enumerate(pages) for beat in due(*one, lanes, i)]
    assert [seen(beat, lanes) for beat in await sink.wait(len(want))] == want
    sink.task.cancel()


def still(dut):
    for name in ("cfg", "s"):
        getattr(dut, f"{name}_tvalid").value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_pages(dut, pressure):
    still(dut)
    rng = await start(dut)
    p = parameters()
    await check(dut, rng, [page(rng, p["LANES"], p["RUNS"]) for _ in range(25)], pressure)


@cocotb.test()
async def every_last_place(dut):
    """The last requested run at every position of a page, and a page that ends at any position."""
    still(dut)
    rng = await start(dut)
    lanes = parameters()["LANES"]
    pages = []
    for last in range(8):
        wanted = [False] * 8
        wanted[last] = True
        pages += [([rng.getrandbits(16) for _ in range(8 * n)], wanted, n) for n in (lanes, lanes + 3)]
    for size in range(1, 4 * lanes + 1):
        pages.append(([rng.getrandbits(16) for _ in range(size)], [True, False, True, True], lanes))
    pages.append(([1] * 2 * lanes, [False, False], lanes))
    await check(dut, rng, pages, (0, 0))


@cocotb.test()
async def one_beat_per_cycle(dut):
    still(dut)
    rng = await start(dut)
    lanes = parameters()["LANES"]
    cfg, source = Source(dut, "cfg", rng), Source(dut, "s", rng)
    sink = Sink(dut, "m", ("tlast",), rng)
    pages = [[rng.getrandbits(16) for _ in range(8 * lanes)] for _ in range(4)]
    ahead = cocotb.start_soon(cfg.send({"wanted": 0xFF, "length": lanes, "tid": 0} for _ in pages))
    await source.send(beat for values in pages for beat in beats(values, lanes))
    await ahead
    while len(sink.beats) < 32:
        await cocotb.triggers.RisingEdge(dut.clk)
    assert sink.cycles[-1] - sink.cycles[0] == 31


@cocotb.test()
async def reset_in_a_page(dut):
    still(dut)
    rng = await start(dut)
    p = parameters()
    values = [rng.getrandbits(16) for _ in range(5 * p["LANES"])]
    await Source(dut, "cfg", rng).send([{"wanted": 31, "length": p["LANES"], "tid": 1}])
    sink = Sink(dut, "m", FIELDS, rng)
    await Source(dut, "s", rng).send(beats(values, p["LANES"])[:3])
    await reset(dut)
    sink.task.cancel()
    await check(dut, rng, [page(rng, p["LANES"], p["RUNS"]) for _ in range(3)], (0, 0))


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("aligned", "not aligned", "0 wanted", "1 wanted", "2 wanted", "spare", "no spare")
    COVER.require(*(f"{n} runs" for n in (1, 2, 4, 8, 9)), "s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "lanes", "runs"), [("icarus", 8, 16), ("verilator", 4, 64), ("verilator", 32, 64)]
)
def test_nfc_filter(simulator, lanes, runs):
    simulate("nfc_filter", {"LANES": lanes, "RUNS": runs, "RUN_W": 13, "TID_W": 16}, simulator)
