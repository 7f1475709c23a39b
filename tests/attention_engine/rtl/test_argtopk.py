"""argtopk: the same selection as a sort, in a known number of cycles."""

import cocotb
import pytest
from rtl_bench import PRESSURES, Coverage, Sink, Source, pack, parameters, reset, simulate, start

from attention_engine.clock import argtopk_cycles
from attention_engine.rtl.golden import argtopk

COVER = Coverage()


def lines(keys, ways, width, rng):
    full = [*keys, *(rng.getrandbits(width) for _ in range(-len(keys) % ways))]
    return [{"tdata": pack(full[at : at + ways], width)} for at in range(0, len(full), ways)]


class Bench:
    def __init__(self, dut, rng, pressure=(0.0, 0.0)):
        p = parameters()
        self.rng, self.ways, self.width = rng, p["WAYS"], 3 * p["DIGIT"]
        self.cfg, self.source = Source(dut, "cfg", rng), Source(dut, "s", rng, pressure[0], COVER)
        self.sink = Sink(dut, "m", ("tdata", "tlast"), rng, pressure[1], COVER)

    async def ask(self, keys, k, recent=0, absolute=False):
        sending = cocotb.start_soon(self.cfg.send([{"n": len(keys), "k": k, "recent": recent, "abs": absolute}]))
        await self.source.send(lines(keys, self.ways, self.width, self.rng))
        await sending

    async def check(self, keys, k, recent=0, absolute=False):
        await self.ask(keys, k, recent, absolute)
        due = argtopk(keys, k, recent, absolute, self.width)
        beats = await self.sink.wait(-(-len(keys) // self.ways))
        got = [beat["tdata"] >> way & 1 for beat in beats for way in range(self.ways)]
        assert got == [int(bit) for bit in due] + [0] * (len(got) - len(keys))
        assert [beat["tlast"] for beat in beats] == [0] * (len(beats) - 1) + [1]


def key(kind, any_bits, rng):
    """A key of a kind: free in all digits, in the lowest ones only, or one of few values."""
    digit, base = parameters()["DIGIT"], 0x15A3C96
    return {
        "any": any_bits,
        "low digit": base >> digit << digit | any_bits % (1 << digit),
        "middle digit": base >> 2 * digit << 2 * digit | any_bits % (1 << 2 * digit),
        "ties": rng.choice((base, base ^ 1, base ^ 1 << digit, any_bits)),
        "two values": rng.choice((base, 0)),
    }[kind] % (1 << 3 * digit)


def still(dut):
    for name in ("cfg", "s"):
        getattr(dut, f"{name}_tvalid").value = 0


@cocotb.test()
@cocotb.parametrize(pressure=PRESSURES)
async def any_keys(dut, pressure):
    """Sizes up to N_MAX; keys all different, in a few digits only, or with many ties."""
    still(dut)
    rng = await start(dut)
    bench, n_max = Bench(dut, rng, pressure), parameters()["N_MAX"]
    for number in range(10):
        n = rng.choice((n_max, n_max - 1, rng.randrange(1, n_max + 1), rng.randrange(1, 40)))
        k = rng.randrange(1, n + 1)
        recent = rng.choice((0, k, rng.randrange(k + 1)))
        kind = ("any", "low digit", "middle digit", "ties", "two values")[number % 5]
        keys = [key(kind, rng.getrandbits(bench.width), rng) for _ in range(n)]
        absolute = rng.random() < 0.3
        COVER.hit(kind, "absolute" if absolute else "signed", "recent" if recent else "none recent")
        await bench.check(keys, k, recent, absolute)


@cocotb.test()
async def directed(dut):
    """N = 1, k = 1 and k = N, all equal, ties over lines, signed zeros, only recent ones."""
    still(dut)
    rng = await start(dut)
    bench, n_max = Bench(dut, rng), parameters()["N_MAX"]
    sign = 1 << bench.width - 1
    await bench.check([5], 1)
    await bench.check([5], 1, 1)
    for n in (2, bench.ways, n_max):
        for k in (1, n - 1, n):
            await bench.check([7] * n, k)
            await bench.check([rng.getrandbits(bench.width) for _ in range(n)], k, min(k, 3))
    await bench.check([0, sign, 0, sign, sign | 1, 1] * 3, 7)
    await bench.check([sign | 9, 8, sign | 7, 6], 2, 0, True)
    await bench.check([sign | 9, 8, sign | 7, 6], 3, 0, False)
    await bench.check([(1 << bench.width) - 1] * 5 + [sign - 1] * 3, 4)
    await bench.check(list(range(30)), 6, 6)


@cocotb.test()
async def cycles(dut):
    """From the last key to the last bit, and to the next configuration."""
    still(dut)
    rng = await start(dut)
    bench = Bench(dut, rng)
    for n in (1, parameters()["N_MAX"] // 2 - 3, parameters()["N_MAX"]):
        await bench.ask([rng.getrandbits(bench.width) for _ in range(n)], max(1, n // 8))
        taken = 0
        while not (bench.sink.beats and bench.sink.beats[-1]["tlast"]):
            await cocotb.triggers.RisingEdge(dut.clk)
            taken += 1
        await bench.sink.wait(-(-n // bench.ways))
        assert taken == argtopk_cycles(n, bench.ways, parameters()["DIGIT"])


@cocotb.test()
async def reset_while_busy(dut):
    still(dut)
    rng = await start(dut)
    bench = Bench(dut, rng)
    for wait in (1, 30, 90, 200):
        await bench.ask([rng.getrandbits(bench.width) for _ in range(60)], 9)
        for _ in range(wait):
            await cocotb.triggers.RisingEdge(dut.clk)
        await reset(dut)
        bench.sink.beats.clear()
        await bench.check([rng.getrandbits(bench.width) for _ in range(50)], 20, 4)
    await bench.cfg.send([{"n": 60, "k": 9, "recent": 0, "abs": 0}])
    await bench.source.send(lines(list(range(40)), bench.ways, bench.width, rng)[:-1])
    await reset(dut)
    await bench.check([rng.getrandbits(bench.width) for _ in range(50)], 20, 4)


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require(
        "any", "low digit", "middle digit", "ties", "two values", "absolute", "signed", "recent", "none recent"
    )
    COVER.require("s idle", "s held up", "m waits", "m held up")


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("simulator", "n_max", "ways", "digit"),
    [("icarus", 64, 4, 6), ("verilator", 512, 8, 10), ("verilator", 32768, 32, 10)],
)
def test_argtopk(simulator, n_max, ways, digit):
    simulate("argtopk", {"N_MAX": n_max, "WAYS": ways, "DIGIT": digit}, simulator)
