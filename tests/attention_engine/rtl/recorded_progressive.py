"""The cocotb side of test_recorded: whole heads in pages of progressive precision through the engine."""

import os

import cocotb
import numpy as np
from progressive_pages import head_pages
from rtl_bench import start
from test_progressive_engine import Bench, run_of, shape


@cocotb.test()
async def heads(dut):
    """Output, l, and pages that are chosen are the golden model's."""
    rng = await start(dut)
    bench, arrays = Bench(dut, rng), list(np.load(os.environ["RTL_HEADS"]).values())
    for first in range(0, len(arrays), 3):
        q, K, V = (part.view(np.float16) for part in arrays[first : first + 3])
        want = await bench.check(run_of(len(K), 1e-6, 1e-3), q, head_pages(shape(), K, V))
        cycles = await bench.axil.read_dword(0x20)
        logits = q.astype(float) @ K.astype(float).T / np.sqrt(K.shape[1])
        w = np.exp(logits - logits.max(1, keepdims=True))
        exact = w / w.sum(1, keepdims=True) @ V.astype(float)
        off = np.linalg.norm(want.out.view(np.float16) - exact, axis=1) / np.linalg.norm(exact, axis=1)
        dut._log.info(
            f"NOTE head {first // 3}: {want.chosen.sum()} of {len(want.chosen)} refined pages, {want.read.sum()} of "
            f"{len(want.read)} value pages, {cycles} cycles, off from exact attention by {off.max():.3f}"
        )
