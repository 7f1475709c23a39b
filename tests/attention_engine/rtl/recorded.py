"""The cocotb side of test_recorded: whole heads through the engine."""

import os

import cocotb
import numpy as np
from rtl_bench import start
from test_sparf_engine import Bench, shape

from attention_engine.clock import sparf_cycles
from attention_engine.rtl.params import EngineRun
from csd_spec import CompressionBudget


@cocotb.test()
async def heads(dut):
    """Output, pages and status are the golden model's, and cycles the clock's within 2 %."""
    rng = await start(dut)
    bench, arrays = Bench(dut, rng), list(np.load(os.environ["RTL_HEADS"]).values())
    for first in range(0, len(arrays), 4):
        head = arrays[first : first + 4]
        S, size = len(head[1]), shape()
        budget = CompressionBudget(float(os.environ["RTL_COMPRESSION"])).at(S, size.head_dim)
        run = EngineRun(shape=size, sparf=budget, m=4, n=size.page_values // size.head_dim, seq_len=S)
        await bench.ready()
        measured, *touched = await bench.check(run, head)
        formula = sparf_cycles(run, *touched)
        dut._log.info(f"NOTE head {first // 4}: {measured} cycles, the clock says {formula}")
        assert abs(formula / measured - 1) <= 0.02
