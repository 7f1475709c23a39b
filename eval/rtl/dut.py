"""Simulator side of `vcsd bench rtl`: heads through `digit_scores`, one beat per cycle, scores as they arrive.

It runs inside a simulation: arrays are read from the file named by RTL_IN, results are written to RTL_OUT.
"""

from __future__ import annotations

import os
from typing import Any

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge


async def _send(dut: Any, prefix: str, beats: list[dict[str, int]]) -> None:
    valid, ready = getattr(dut, f"{prefix}_tvalid"), getattr(dut, f"{prefix}_tready")
    for beat in beats:
        for field, value in beat.items():
            getattr(dut, f"{prefix}_{field}").value = value
        valid.value = 1
        await RisingEdge(dut.clk)
        while ready.value != 1:
            await RisingEdge(dut.clk)
    valid.value = 0


class _Scores:
    """Takes scores as they come: (score, query, flags), and the cycle of the last one."""

    def __init__(self, dut: Any) -> None:
        self.dut, self.cycle, self.last, self.rows = dut, 0, 0, list[tuple[int, int, int]]()
        dut.m_tready.value = 1
        cocotb.start_soon(self._run())

    async def _run(self) -> None:
        dut = self.dut
        while True:
            await RisingEdge(dut.clk)
            self.cycle += 1
            if dut.rst.value == 0 and dut.m_tvalid.value == 1:
                self.rows.append((dut.m_tdata.value.to_signed(), int(dut.m_tid.value), int(dut.m_tuser.value)))
                self.last = self.cycle


@cocotb.test()
async def heads(dut: Any) -> None:
    """Every head of the file: q, then its pages; scores and cycles are kept."""
    inputs = np.load(os.environ["RTL_IN"])
    Clock(dut.clk, 10, "ns").start()
    dut.s_q_tvalid.value = dut.s_page_tvalid.value = 0
    dut.rst.value = 1
    for _ in range(3):
        await RisingEdge(dut.clk)
    dut.rst.value = 0
    scores, outputs = _Scores(dut), dict[str, Any]()
    for head, q in enumerate(inputs["q"]):
        values = q.T.ravel().tolist()
        await _send(dut, "s_q", [{"tdata": v, "tlast": int(i == len(values) - 1)} for i, v in enumerate(values)])
        begin, due = scores.cycle, int(inputs["tokens"].sum()) * len(q)
        for page, tokens in zip(inputs["pages"][head], inputs["tokens"].tolist(), strict=True):
            lines = [int.from_bytes(line.tobytes(), "little") for line in page.reshape(-1, 16)]
            ends = [int(number == len(lines) - 1) for number in range(len(lines))]
            await _send(
                dut,
                "s_page",
                [{"tdata": line, "tuser": tokens, "tlast": end} for line, end in zip(lines, ends, strict=True)],
            )
        sent = scores.cycle
        for _ in range(40 * due):
            if len(scores.rows) >= due:
                break
            await RisingEdge(dut.clk)
        outputs[f"scores_{head}"] = np.array(scores.rows, np.int64).reshape(-1, 3)
        outputs[f"cycles_{head}"] = max(sent, scores.last) - begin
        scores.rows = []
    np.savez(os.environ["RTL_OUT"], **outputs)
