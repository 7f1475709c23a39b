"""sparf_ctrl: registers, refusals, phases, and the order of page requests."""

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster
from rtl_bench import Coverage, Sink, pack, parameters, reset, simulate, start

COVER = Coverage()
CHANNELS, SCORE, WEIGH, KEYS, VALUES = range(1, 6)


class Bench:
    """The registers, and sinks for the controller's requests."""

    def __init__(self, dut, rng, busy=0.0):
        self.dut, self.rng = dut, rng
        for name in ("s_mask_tvalid", "stage_done", "bad", "over", "row_valid"):
            getattr(dut, name).value = 0
        self.axil = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil"), dut.clk, dut.rst)
        self.topk = Sink(dut, "topk", ("n", "k", "recent", "abs"), rng, busy)
        self.requests = Sink(dut, "m_req", ("tdata",), rng, busy, COVER)
        self.pages = Sink(dut, "m_page", ("wanted", "length", "tid"), rng, busy, COVER)

    async def begin(self, r, k, recent, m, n, S):
        for address, value in zip((0x08, 0x0C, 0x10, 0x14, 0x18, 0x1C, 0), (r, k, recent, m, n, S, 1), strict=True):
            await self.axil.write_dword(address, value)

    async def mask(self, bits):
        ways = parameters()["WAYS"]
        for at in range(0, len(bits), ways):
            while self.rng.random() < 0.2:
                await RisingEdge(self.dut.clk)
            self.dut.s_mask_tdata.value = pack(bits[at : at + ways], 1)
            self.dut.s_mask_tlast.value = at + ways >= len(bits)
            self.dut.s_mask_tvalid.value = 1
            await RisingEdge(self.dut.clk)
            self.dut.s_mask_tvalid.value = 0

    async def finish(self, bad=0, over=0):
        self.dut.bad.value, self.dut.over.value = bad, over
        self.dut.stage_done.value = 1
        await RisingEdge(self.dut.clk)
        self.dut.stage_done.value = self.dut.bad.value = self.dut.over.value = 0
        await RisingEdge(self.dut.clk)

    async def give_row(self, number, top, total):
        """m and l of a query come."""
        self.dut.row_id.value, self.dut.row_max.value, self.dut.row_sum.value = number, top & 0x1FFF, total
        self.dut.row_valid.value = 1
        await RisingEdge(self.dut.clk)
        self.dut.row_valid.value = 0

    def phase(self):
        return int(self.dut.phase.value)


def walk(bits, size):
    """Number, first unit and bits of the pages with something wanted."""
    parts = [bits[at : at + size] for at in range(0, len(bits), size)]
    return [(page, page * size, part) for page, part in enumerate(parts) if any(part)]


@cocotb.test()
@cocotb.parametrize(busy=[0.0, 0.6])
async def any_run(dut, busy):
    """All phases of several runs: inputs of argtopk, requested pages and announced pages."""
    rng = await start(dut)
    bench, p = Bench(dut, rng, busy), parameters()
    for _ in range(8):
        S, m, n = rng.randrange(1, p["N_MAX"] + 1), rng.choice((1, 2, 4, 8)), rng.randrange(1, 9)
        r, k = rng.randrange(1, p["DIM"] + 1), rng.randrange(1, S + 1)
        recent, share = rng.randrange(k + 1), rng.choice((0.02, 0.3, 1))
        await bench.begin(r, k, recent, m, n, S)
        assert await bench.topk.wait(1) == [{"n": p["DIM"], "k": r, "recent": 0, "abs": 1}]
        channels, tokens = ([rng.random() < share for _ in range(size)] for size in (p["DIM"], S))
        channels[-1] = True
        tokens[rng.randrange(S)] = True
        await bench.mask(channels)
        pages = walk(channels, m)
        groups = -(-S // (p["PAGE_VALUES"] // m))
        due = [{"tdata": g << 16 | page} for g in range(groups) for page, _, _ in pages]
        assert await bench.requests.wait(len(due)) == due
        length = p["PAGE_VALUES"] // m
        due = [{"wanted": pack(bits, 1), "length": length, "tid": first} for _, first, bits in pages] * groups
        assert await bench.pages.wait(len(due)) == due
        assert bench.phase() == SCORE
        await bench.finish(bad=1)
        assert bench.phase() == WEIGH
        assert await bench.topk.wait(1) == [{"n": S, "k": k, "recent": recent, "abs": 0}]
        await bench.mask(tokens)
        pages = walk(tokens, n)
        for kind, phase in ((1, KEYS), (2, VALUES)):
            due = [{"tdata": kind << 32 | page << 16} for page, _, _ in pages]
            assert await bench.requests.wait(len(due)) == due
            due = [{"wanted": pack(bits, 1), "length": p["DIM"], "tid": first} for _, first, bits in pages]
            assert await bench.pages.wait(len(due)) == due
            assert bench.phase() == phase
            await bench.finish(over=kind == 2)
        assert bench.phase() == 0
        assert await bench.axil.read_dword(4) == 2 | 1 << 8 | 1 << 9
        COVER.hit(f"m {m}", "one group" if groups == 1 else "groups", "few" if share < 0.1 else "many")


@cocotb.test()
async def phase_may_end_within_scan(dut):
    """The walk of the next phase begins at the first unit again."""
    rng = await start(dut)
    bench, p = Bench(dut, rng), parameters()
    S = p["N_MAX"]
    await bench.begin(1, 1, 0, 8, 8, S)
    await bench.mask([True] + [False] * (p["DIM"] - 1))
    await bench.requests.wait(-(-S // (p["PAGE_VALUES"] // 8)))
    await bench.finish()
    await bench.mask([True] + [False] * (S - 1))
    for kind in (1, 2):
        while not bench.requests.beats:
            await RisingEdge(dut.clk)
        assert bench.requests.beats == [{"tdata": kind << 32}]
        bench.requests.beats.clear()
        await bench.finish()
    assert bench.phase() == 0


@cocotb.test()
async def sums_of_rows_are_read(dut):
    """Latest m and l of each query; zero for a query that does not exist."""
    rng = await start(dut)
    bench, heads = Bench(dut, rng), parameters()["Q_HEADS"]
    assert [await bench.axil.read_dword(address) for address in range(0x40, 0xC0, 4)] == [0] * 32
    for _ in range(3):
        rows = [(rng.randrange(-4096, 4096), rng.getrandbits(48)) for _ in range(heads)]
        for number, row in enumerate(rows):
            await bench.give_row(number, *row)
        want = [word for top, total in rows for word in (top & 0xFFFFFFFF, total & 0xFFFFFFFF, total >> 32, 0)]
        want += [0] * (32 - len(want))
        assert [await bench.axil.read_dword(address) for address in range(0x40, 0xC0, 4)] == want
        COVER.hit("m below zero" if rows[0][0] < 0 else "m above zero")
    await reset(dut)
    assert await bench.axil.read_dword(0x44) == 0


@cocotb.test()
async def invalid_parameters_are_refused(dut):
    """Each of them is refused, and nothing begins; registers read back."""
    rng = await start(dut)
    bench, p = Bench(dut, rng), parameters()
    good = {"r": 4, "k": 9, "recent": 2, "m": 4, "n": 8, "S": 30}
    most = p["PAGE_VALUES"] // p["DIM"]
    wrong = [("r", 0), ("r", p["DIM"] + 1), ("k", 0), ("k", 31), ("recent", 10), ("m", 0), ("m", 3), ("m", 16)]
    wrong += [("n", 0), ("n", most + 1), ("n", 65), ("S", 0), ("S", p["N_MAX"] + 1), ("S", 1 << 31)]
    for name, value in wrong:
        await bench.begin(**{**good, name: value})
        assert await bench.axil.read_dword(4) == 4, f"{name} = {value}"
        assert bench.phase() == 0
    registers = dict(zip(good, (0x08, 0x0C, 0x10, 0x14, 0x18, 0x1C), strict=True))
    await bench.begin(**good)
    assert await bench.axil.read_dword(4) == 1
    for name, address in registers.items():
        assert await bench.axil.read_dword(address) == good[name]
    assert await bench.axil.read_dword(0x24) == p["Q_HEADS"] << 16 | p["DIM"]
    assert await bench.axil.read_dword(0x7C) == 0
    first = await bench.axil.read_dword(0x20)
    assert 0 < first < await bench.axil.read_dword(0x20)
    await bench.axil.write_dword(0, 1)  # while it runs, a start is not heard
    assert bench.phase() == CHANNELS


@cocotb.test()
async def reset_in_a_walk(dut):
    rng = await start(dut)
    bench, p = Bench(dut, rng), parameters()
    await bench.begin(4, 9, 2, 4, 8, 30)
    await bench.mask([True] * p["DIM"])
    for _ in range(9):
        await RisingEdge(dut.clk)
    await reset(dut)
    bench.requests.beats.clear()
    await RisingEdge(dut.clk)
    assert bench.phase() == 0 and await bench.axil.read_dword(0x08) == 0
    await bench.begin(4, 9, 2, 4, 8, 30)
    assert bench.phase() == CHANNELS


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("m 1", "m 2", "m 4", "m 8", "one group", "groups", "few", "many")
    COVER.require("m_req waits", "m_req held up", "m_page waits", "m_page held up")


@pytest.mark.rtl
@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_sparf_ctrl(simulator):
    shape = {"DIM": 32, "Q_HEADS": 2, "N_MAX": 256, "PAGE_VALUES": 512, "WAYS": 8}
    simulate("sparf_ctrl", shape, simulator)
