"""A conventional page-mapped SSD in modelled time: mapping, lines, garbage collection, contention; no payload.

With the preset `nvmevirt-970pro` it gives the times that NVMeVirt gives for the same requests.
"""

from __future__ import annotations

import numpy as np

from csd_spec import BlockSsdSpec
from csd_spec.arrays import I64
from vcsd_eval.baselines._conventional import READ, SLOTS, WRITE, ConventionalState, Params, run_closed_loop, run_replay

__all__ = ["READ", "WRITE", "ConventionalSsd"]


class ConventionalSsd:
    """A drive that has been filled sequentially once. Times in, times out."""

    def __init__(self, spec: BlockSsdSpec) -> None:
        self.spec = spec
        self._p = Params.of(spec)
        self._s = self._filled()

    def _filled(self) -> ConventionalState:
        spec, parts, lines = self.spec, self.spec.partitions, self.spec.blocks_per_lun
        physical, logical = lines * spec.line_units, spec.logical_units // parts
        l2p = np.tile(np.arange(logical, dtype=np.int32), (parts, 1))
        p2l = np.full((parts, physical), -1, np.int32)
        p2l[:, :logical] = l2p
        full, rest = divmod(logical, spec.line_units)
        valid = np.zeros((parts, lines), np.int32)
        valid[:, :full], valid[:, full] = spec.line_units, rest
        closed = np.zeros((parts, lines), bool)
        closed[:, :full] = True
        free = np.tile(np.arange(lines, dtype=np.int32), (parts, 1))
        pointer = np.tile(np.array([[full, rest], [full + 1, 0]], np.int64), (parts, 1, 1))
        return ConventionalState(
            l2p, p2l, valid, closed, free,
            free_ends=np.tile(np.array([full + 2, lines - full - 2], np.int64), (parts, 1)),
            pointer=pointer,
            credits=np.full((parts, 2), spec.line_units, np.int64),
            lun_free=np.zeros((parts, spec.luns), np.int64),
            channel_calendars=np.zeros((spec.channels, SLOTS), np.int64),
            pcie_calendar=np.zeros(SLOTS, np.int64),
            buffer=np.array([spec.write_buffer_bytes, 0], np.int64),
            released=np.zeros((2 * spec.write_buffer_bytes // spec.flash_page_bytes + 64, 2), np.int64),
            controller=np.zeros(1, np.int64),
            moved=np.zeros(3, np.int64),
        )  # fmt: skip

    def closed_loop(
        self, depth: int, requests: int, block_bytes: int, read_percent: int, seed: int = 0, sequential: bool = False
    ) -> tuple[int, I64]:
        """Requests aligned to their own size, `depth` at a time: when the last ends, and each latency (ns).

        They are at random places; with `sequential` at one after the other, from the first on.
        """
        count = block_bytes // self.spec.mapping_bytes
        if block_bytes % self.spec.mapping_bytes or not 1 <= count <= self.spec.logical_units:
            raise ValueError(f"block_bytes = {block_bytes}: must be a multiple of {self.spec.mapping_bytes}")
        if not read_percent == 100 and block_bytes > self.spec.write_buffer_bytes:
            raise ValueError(
                f"block_bytes = {block_bytes}: writes go through a buffer of {self.spec.write_buffer_bytes}"
            )
        latencies = np.empty(requests, np.int64)
        places = self.spec.logical_units // count
        how = depth, requests, count, places, read_percent, sequential, seed
        end = run_closed_loop(*how, self._p, self._s, latencies)
        return int(end), latencies

    def replay(self, times_ns: I64, offsets: I64, nbytes: I64, ops: I64) -> I64:
        """Requests at given times: byte offsets and lengths, ops 1 = read, 0 = write. Returns latencies (ns)."""
        unit, total = self.spec.mapping_bytes, self.spec.logical_units
        firsts = offsets // unit
        counts = np.minimum(-(-(offsets + nbytes) // unit) - firsts, total)
        firsts = np.minimum(firsts % total, total - counts)
        latencies = np.empty(times_ns.size, np.int64)
        run_replay(times_ns, firsts, counts, ops, self._p, self._s, latencies)
        return latencies

    @property
    def units_written(self) -> tuple[int, int]:
        """Mapping units written for the host and moved by garbage collection."""
        return int(self._s.moved[0]), int(self._s.moved[1])
