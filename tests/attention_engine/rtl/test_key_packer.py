"""key_packer: packs single keys into lines."""

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from rtl_bench import parameters, reset, simulate, start


async def send(dut, rng, keys, idle):
    """Keys in, lines out; there is no back-pressure."""
    lines = []

    async def cycle():
        await RisingEdge(dut.clk)
        if dut.m_tvalid.value == 1:
            lines.append(dut.m_tdata.value)

    for key in keys:
        while rng.random() < idle:
            dut.s_tvalid.value = 0
            await cycle()
        dut.s_tvalid.value, dut.s_tdata.value = 1, key
        await cycle()
    dut.s_tvalid.value = 0
    for _ in range(3):
        await cycle()
    return lines


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5])
async def any_count(dut, idle):
    dut.s_tvalid.value = 0
    rng = await start(dut)
    ways = parameters()["WAYS"]
    for count in (1, 2, ways - 1, ways, ways + 1, 3 * ways, 61):
        keys = [rng.getrandbits(30) for _ in range(count)]
        dut.n.value = count
        lines = await send(dut, rng, keys, idle)
        assert len(lines) == -(-count // ways)
        got = [int(line[30 * w + 29 : 30 * w]) for line in lines[:-1] for w in range(ways)]
        got += [int(lines[-1][30 * w + 29 : 30 * w]) for w in range(count - len(got))]
        assert got == keys


@cocotb.test()
async def reset_in_a_line(dut):
    dut.s_tvalid.value = 0
    rng = await start(dut)
    dut.n.value = 9
    await send(dut, rng, [1, 2, 3], 0)
    await reset(dut)
    lines = await send(dut, rng, list(range(9)), 0)
    assert int(lines[0][29:0]) == 0 and int(lines[0][59:30]) == 1


@pytest.mark.rtl
@pytest.mark.parametrize(("simulator", "ways"), [("icarus", 4), ("verilator", 8)])
def test_key_packer(simulator, ways):
    simulate("key_packer", {"WAYS": ways}, simulator)
