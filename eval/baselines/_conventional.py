"""What requests to a conventional SSD do and how long that takes, compiled: NVMeVirt's partitions, lines, write buffer
and unit credits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from csd_io.compiled import njit
from csd_spec import BlockSsdSpec
from csd_spec.arrays import I32, I64
from vcsd_eval.baselines._prefetch import prefetch

SLOTS = 1 << 15  # of a calendar: 131 ms ahead of the earliest request
USED_BITS = 12  # a calendar cell is slot number << USED_BITS | units used

READ, WRITE = 1, 0
AHEAD = 8  # requests drawn early, so that their mapping is in the cache when they are issued


class Params(NamedTuple):
    """A `BlockSsdSpec` as compiled code takes it, under its own names."""

    partitions: int
    channels: int
    luns: int
    flash_pages_per_block: int
    units_per_page: int
    line_units: int
    blocks_per_lun: int
    mapping_bytes: int
    flash_page_bytes: int
    chunk_bytes: int
    cell_levels: int
    firmware_small_ns: int
    firmware_large_ns: int
    firmware_small_bytes: int
    sense_one_unit_ns: int
    sense_ns: int
    sense_swing_ns: int
    program_ns: int
    write_base_ns: int
    write_unit_ns: int
    gc_free_lines: int
    unit_bytes: int
    slot_ns: int
    channel_unit_ns: int
    channel_credits: int
    pcie_unit_ns: int
    pcie_credits: int
    command_ns: int

    @classmethod
    def of(cls, spec: BlockSsdSpec) -> Params:
        """The same numbers."""
        return cls(**{name: getattr(spec, name) for name in cls._fields})


class ConventionalState(NamedTuple):
    """Everything that requests change."""

    l2p: I32  # (partitions, units): physical unit, -1 unmapped
    p2l: I32  # (partitions, units): logical unit, -1 invalid
    valid: I32  # (partitions, lines)
    closed: NDArray[np.bool_]  # (partitions, lines): full, a candidate victim
    free: I32  # (partitions, lines): ring of free lines
    free_ends: I64  # (partitions, 2): head, count
    pointer: I64  # (partitions, 2 streams, 2): line, next unit in it; stream 0 host, 1 GC
    credits: I64  # (partitions, 2): writes left before GC is looked at, refill
    lun_free: I64  # (partitions, luns)
    channel_calendars: I64  # (channels, SLOTS)
    pcie_calendar: I64  # (SLOTS,)
    buffer: I64  # [bytes free, pending count]
    released: I64  # (heap, 2): time, bytes; ends of programs that return buffer space, the earliest first
    controller: I64  # (1,): when it takes the next command
    moved: I64  # [host units, GC units, erases]


@njit(inline="always")
def _book(at, nbytes, now, unit_bytes, unit_ns, capacity, slot_ns, calendar):  # type: ignore[no-untyped-def]
    """Move bytes over a shared resource from `at` on; one dated before now passes unseen."""
    if at < now:
        return at
    units = (nbytes + unit_bytes - 1) // unit_bytes
    slot, left, spilled = at // slot_ns, units, 0
    while True:
        cell = calendar[slot % SLOTS]
        if cell >> USED_BITS != slot:
            cell = slot << USED_BITS
        taken = min(left, capacity - (cell & ((1 << USED_BITS) - 1)))
        calendar[slot % SLOTS] = cell + taken
        left -= taken
        if left <= 0:
            break
        slot += 1
        spilled += 1
    return at + unit_ns * units + slot_ns * max(0, spilled - units // capacity)


@njit(inline="always")
def _over_channel(at, nbytes, now, channel, p, s):  # type: ignore[no-untyped-def]
    calendar = s.channel_calendars[channel]
    return _book(at, nbytes, now, p.unit_bytes, p.channel_unit_ns, p.channel_credits, p.slot_ns, calendar)


@njit(inline="always")
def _over_pcie(at, nbytes, now, p, s):  # type: ignore[no-untyped-def]
    return _book(at, nbytes, now, p.unit_bytes, p.pcie_unit_ns, p.pcie_credits, p.slot_ns, s.pcie_calendar)


@njit(inline="always")
def _place(unit, p):  # type: ignore[no-untyped-def]
    """LUN and flash page in its block of a physical unit: one-shot page, channel, LUN, next word line."""
    page = unit // p.units_per_page
    return page % p.luns, (page // p.luns) % p.flash_pages_per_block


@njit(inline="always")
def _channel(partition, lun, p):  # type: ignore[no-untyped-def]
    lanes = p.channels // p.partitions
    return partition * lanes + lun % lanes


@njit(inline="always")
def _nand_read(partition, unit, nbytes, start, now, host, p, s):  # type: ignore[no-untyped-def]
    """Sense one flash page and move `nbytes` of it; with `host`, over PCIe too. Returns when the last byte is out."""
    lun, page = _place(unit, p)
    sense = p.sense_one_unit_ns if nbytes == p.mapping_bytes else p.sense_ns
    level = page % p.cell_levels
    sense += p.sense_swing_ns * (2 * level - (p.cell_levels - 1))
    channel = _channel(partition, lun, p)
    at = max(s.lun_free[partition, lun], start) + sense
    done, left = at, nbytes
    chunk = p.chunk_bytes if host else nbytes
    while left > 0:
        part = min(left, chunk)
        at = _over_channel(at, part, now, channel, p, s)
        done = at
        if host:
            done = _over_pcie(done, part, now, p, s)
        left -= part
    s.lun_free[partition, lun] = at
    return done


@njit(cache=True, nogil=True, error_model="numpy")
def _nand_program(partition, unit, start, now, p, s):  # type: ignore[no-untyped-def]
    lun, _ = _place(unit, p)
    channel = _channel(partition, lun, p)
    at = max(s.lun_free[partition, lun], start)
    at = _over_channel(at, p.flash_page_bytes, now, channel, p, s)
    s.lun_free[partition, lun] = at + p.program_ns
    return at + p.program_ns


@njit(cache=True, nogil=True, error_model="numpy")
def _next_unit(partition, stream, p, s):  # type: ignore[no-untyped-def]
    """Take the next physical unit of a write stream; a full line closes and a free one opens."""
    line, offset = s.pointer[partition, stream, 0], s.pointer[partition, stream, 1]
    if offset == p.line_units:
        s.closed[partition, line] = True
        head = s.free_ends[partition, 0]
        line, offset = s.free[partition, head], 0
        s.free_ends[partition, 0] = (head + 1) % p.blocks_per_lun
        s.free_ends[partition, 1] -= 1
        s.pointer[partition, stream, 0] = line
    s.pointer[partition, stream, 1] = offset + 1
    return line * p.line_units + offset


@njit(cache=True, nogil=True, error_model="numpy")
def _map(partition, logical, unit, p, s):  # type: ignore[no-untyped-def]
    old = s.l2p[partition, logical]
    if old >= 0:
        s.p2l[partition, old] = -1
        s.valid[partition, old // p.line_units] -= 1
    s.l2p[partition, logical], s.p2l[partition, unit] = unit, logical
    s.valid[partition, unit // p.line_units] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _collect(partition, now, p, s):  # type: ignore[no-untyped-def]
    """Clean the closed line with the fewest valid units; returns how many were invalid."""
    victim, fewest = -1, p.line_units
    for line in range(p.blocks_per_lun):
        if s.closed[partition, line] and s.valid[partition, line] < fewest:
            victim, fewest = line, s.valid[partition, line]
    if victim < 0:
        return 0
    for page in range(p.line_units // p.units_per_page):
        first = victim * p.line_units + page * p.units_per_page
        count = 0
        for unit in range(first, first + p.units_per_page):
            count += s.p2l[partition, unit] >= 0
        if count == 0:
            continue
        _nand_read(partition, first, count * p.mapping_bytes, 0, now, False, p, s)
        for unit in range(first, first + p.units_per_page):
            logical = s.p2l[partition, unit]
            if logical >= 0:
                target = _next_unit(partition, 1, p, s)
                _map(partition, logical, target, p, s)
                s.moved[1] += 1
                if target % p.units_per_page == p.units_per_page - 1:
                    _nand_program(partition, target, 0, now, p, s)
    s.closed[partition, victim] = False
    tail = (s.free_ends[partition, 0] + s.free_ends[partition, 1]) % p.blocks_per_lun
    s.free[partition, tail] = victim
    s.free_ends[partition, 1] += 1
    s.moved[2] += p.luns
    return p.line_units - fewest


@njit(inline="always")
def _read(first, count, now, p, s):  # type: ignore[no-untyped-def]
    """Units that share a flash page are read by one command; partitions one after the other."""
    start = now + (p.firmware_small_ns if count * p.mapping_bytes <= p.firmware_small_bytes else p.firmware_large_ns)
    done = start
    for partition in range(min(count, p.partitions)):
        logical = first + partition
        where, page, size = logical % p.partitions, -1, 0
        unit = -1
        while logical < first + count:
            ppn = s.l2p[where, logical // p.partitions]
            if ppn >= 0:
                if page >= 0 and ppn // p.units_per_page != page:
                    done = max(done, _nand_read(where, unit, size, start, now, True, p, s))
                    size = 0
                page, unit, size = ppn // p.units_per_page, ppn, size + p.mapping_bytes
            logical += p.partitions
        if size:
            done = max(done, _nand_read(where, unit, size, start, now, True, p, s))
    return done


@njit(cache=True, nogil=True, error_model="numpy")
def _push(time, nbytes, s):  # type: ignore[no-untyped-def]
    """Note when a program ends and how much buffer space it returns."""
    heap, child = s.released, s.buffer[1]
    s.buffer[1] += 1
    while child:
        parent = (child - 1) // 2
        if heap[parent, 0] <= time:
            break
        heap[child, 0], heap[child, 1] = heap[parent, 0], heap[parent, 1]
        child = parent
    heap[child, 0], heap[child, 1] = time, nbytes


@njit(cache=True, nogil=True, error_model="numpy")
def _write(first, count, now, p, s):  # type: ignore[no-untyped-def]
    """Complete when the data is in the buffer; full flash pages are programmed afterwards."""
    nbytes = count * p.mapping_bytes
    done = now + p.write_base_ns + p.write_unit_ns * count
    done = _over_pcie(done, nbytes, now, p, s)
    s.buffer[0] -= nbytes
    for logical in range(first, first + count):
        partition = logical % p.partitions
        unit = _next_unit(partition, 0, p, s)
        _map(partition, logical // p.partitions, unit, p, s)
        s.moved[0] += 1
        if unit % p.units_per_page == p.units_per_page - 1:
            end = _nand_program(partition, unit, done, now, p, s)
            _push(end, p.flash_page_bytes, s)
        s.credits[partition, 0] -= 1
        if s.credits[partition, 0] <= 0:
            if s.free_ends[partition, 1] <= p.gc_free_lines:
                s.credits[partition, 1] = _collect(partition, now, p, s)
            s.credits[partition, 0] += s.credits[partition, 1]
    return done


@njit(cache=True, nogil=True, error_model="numpy")
def _release(now, s):  # type: ignore[no-untyped-def]
    """Return the buffer space of programs that have finished by now."""
    heap = s.released
    while s.buffer[1] and heap[0, 0] <= now:
        s.buffer[0] += heap[0, 1]
        s.buffer[1] -= 1
        count, parent = s.buffer[1], 0
        time, nbytes = heap[count, 0], heap[count, 1]
        while 2 * parent + 1 < count:
            child = 2 * parent + 1
            if child + 1 < count and heap[child + 1, 0] < heap[child, 0]:
                child += 1
            if heap[child, 0] >= time:
                break
            heap[parent, 0], heap[parent, 1] = heap[child, 0], heap[child, 1]
            parent = child
        heap[parent, 0], heap[parent, 1] = time, nbytes


@njit(inline="always")
def _admit(first, count, op, now, p, s):  # type: ignore[no-untyped-def]
    """Start one request; a write that finds the buffer full starts when a part is released."""
    at = now
    if p.command_ns:
        at = max(at, s.controller[0])
        s.controller[0] = at + p.command_ns
    if op == READ:
        return _read(first, count, at, p, s)
    _release(at, s)
    while s.buffer[0] < count * p.mapping_bytes and s.buffer[1]:
        at = max(at, s.released[0, 0])
        _release(at, s)
    return _write(first, count, at, p, s)


@njit(cache=True, nogil=True, error_model="numpy")
def run_closed_loop(depth, requests, count, places, read_percent, sequential, seed, p, s, latencies):  # type: ignore[no-untyped-def]
    """`depth` workers, each with one request under way; the earliest to complete issues the next.

    Requests are at random places, or at one after the other.
    """
    np.random.seed(seed)
    heap = np.zeros(depth, np.int64)  # completion times; the smallest first
    coming = np.zeros(AHEAD, np.int64)
    for i in range(AHEAD):
        coming[i] = (i % places if sequential else np.random.randint(0, places)) * count
    last = 0
    for number in range(requests):
        now = heap[0]
        first = coming[number % AHEAD]
        later = ((number + AHEAD) % places if sequential else np.random.randint(0, places)) * count
        coming[number % AHEAD] = later
        prefetch(s.l2p, later % p.partitions, later // p.partitions)
        op = READ if read_percent >= 100 or np.random.randint(0, 100) < read_percent else WRITE
        done = _admit(first, count, op, now, p, s)
        latencies[number] = done - now
        last = max(last, done)
        parent = 0
        while True:
            child = 2 * parent + 1
            if child >= depth:
                break
            if child + 1 < depth and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= done:
                break
            heap[parent] = heap[child]
            parent = child
        heap[parent] = done
    return last


@njit(cache=True, nogil=True, error_model="numpy")
def run_replay(times, firsts, counts, ops, p, s, latencies):  # type: ignore[no-untyped-def]
    """Requests at given times. Where they will look is asked for ahead: its mapping first, then what a write makes
    invalid."""
    for number in range(times.size):
        mapped, written = number + AHEAD, number + AHEAD // 2
        if mapped < times.size:
            for logical in range(firsts[mapped], firsts[mapped] + min(counts[mapped], p.partitions)):
                prefetch(s.l2p, logical % p.partitions, logical // p.partitions)
        if written < times.size and ops[written] == WRITE:
            for logical in range(firsts[written], firsts[written] + min(counts[written], p.partitions)):
                old = s.l2p[logical % p.partitions, logical // p.partitions]
                prefetch(s.p2l, logical % p.partitions, max(old, 0))
        latencies[number] = _admit(firsts[number], counts[number], ops[number], times[number], p, s) - times[number]
