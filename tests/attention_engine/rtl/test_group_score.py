"""group_score: sums of softmax weights as keys."""

import cocotb
import pytest
from rtl_bench import Coverage, Source, reset, simulate, start

from attention_engine.rtl.golden import Statistics, group_score, softmax_online

COVER = Coverage()


def tokens(rng, count):
    """For each token the (whole, mant, row) of 1 to 4 queries."""
    groups = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 5)):
            row = softmax_online([rng.randrange(-(1 << 24), 1 << 24) for _ in range(rng.randrange(1, 30))])
            whole = rng.choice((-1, -rng.randrange(1, 40), -rng.randrange(1, 4096)))
            parts.append((whole, rng.randrange(1 << 23, 1 << 24), row))
        if rng.random() < 0.1:  # a row whose sum is a power of two has the largest reciprocal
            parts[0] = (-1, (1 << 24) - 1, Statistics(0, 1 << 32, 15, 1 << 24))
        groups.append(parts)
    return groups


def beats(groups):
    return [
        {
            "tdata": (whole & 0x1FFF) << 24 | mant,
            "recip": row.recip,
            "zeros": row.zeros,
            "tlast": number == len(parts) - 1,
        }
        for parts in groups
        for number, (whole, mant, row) in enumerate(parts)
    ]


class Keys:
    """Accepts all outputs; there is no back-pressure."""

    def __init__(self, dut):
        self.dut, self.got = dut, []
        cocotb.start_soon(self._run())

    async def _run(self):
        while True:
            await cocotb.triggers.RisingEdge(self.dut.clk)
            if self.dut.rst.value == 0 and self.dut.m_tvalid.value == 1:
                self.got.append(int(self.dut.m_tdata.value))


class Sender(Source):
    """A source whose sink is always ready."""

    def _signal(self, field):
        return self if field == "tready" else super()._signal(field)

    value = 1


async def check(dut, idle, count):
    rng = await start(dut)
    sink, groups = Keys(dut), tokens(rng, count)
    await Sender(dut, "s", rng, idle, COVER).send(beats(groups))
    for _ in range(10):
        await cocotb.triggers.RisingEdge(dut.clk)
    due = [group_score(parts) for parts in groups]
    assert sink.got == due
    for parts, key in zip(groups, due, strict=True):
        COVER.hit("vanishes" if key == 0 else "a key", f"{len(parts)} queries")
        wholes = [whole + row.zeros for whole, _, row in parts]
        COVER.hit("far apart" if max(wholes) - min(wholes) > 24 else "close")


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5])
async def any_weights(dut, idle):
    await check(dut, idle, 400)


@cocotb.test()
async def reset_in_a_token(dut):
    rng = await start(dut)
    sender = Sender(dut, "s", rng)
    await sender.send(beats(tokens(rng, 20))[:-1])
    await reset(dut)
    sink, groups = Keys(dut), tokens(rng, 3)
    await sender.send(beats(groups))
    for _ in range(10):
        await cocotb.triggers.RisingEdge(dut.clk)
    assert sink.got == [group_score(parts) for parts in groups]


@cocotb.test()
async def bins(dut):
    await start(dut)
    COVER.require("vanishes", "a key", "far apart", "close", *(f"{n} queries" for n in range(1, 5)), "s idle")


@pytest.mark.rtl
@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_group_score(simulator):
    simulate("group_score", {"INT_W": 13}, simulator)
