"""Block traces in MQSim's text format: a line is `time_ns device lba sectors op`; sectors of 512 bytes, op 1 = read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from csd_firmware import Firmware
from csd_spec import (
    Attend,
    BlockSsdSpec,
    Command,
    Completion,
    CompressionBudget,
    DriveError,
    KvAppend,
    SeqCreate,
    Status,
)
from csd_spec.arrays import F16, I64, U32
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd_eval.baselines.conventional import READ, ConventionalSsd
from vcsd_eval.bench._trace_lines import FIELDS, MAX_DEVICE, MAX_LBA, MAX_NS, MAX_SECTORS, parse_lines
from vcsd_eval.bench.ftl import latency_keys

SECTOR_BYTES = 512
SHORTEST = 10  # bytes, including the line end


def load_trace(path: Path) -> I64:
    """Requests (N, 5) in order of time; raises ValueError with the number of a malformed line."""
    return _parse(path.read_bytes(), path)


def _parse(content: bytes, path: Path) -> I64:
    """Requests in the content of a trace file."""
    text = np.frombuffer(content, np.uint8)
    requests = np.empty((text.size // SHORTEST + 1, len(FIELDS)), np.int64)
    at = lines = count = 0
    while True:
        at, more, count = parse_lines(text, at, requests, count)
        lines += more
        if at == text.size:
            break
        end = content.find(b"\n", at) + 1 or text.size
        rows, more = _read_lines(path, content[at:end].decode("utf-8", "replace"), lines)
        requests[count : count + len(rows)] = np.array(rows, np.int64).reshape(-1, len(FIELDS))
        at, lines, count = end, lines + more, count + len(rows)
    if not count:
        raise ValueError(f"{path}: the trace has no requests; add at least one line")
    requests = requests[:count]
    times = requests[:, 0]
    return requests if (times[1:] >= times[:-1]).all() else requests[np.argsort(times, kind="stable")]


def _read_lines(path: Path, text: str, lines: int) -> tuple[list[tuple[int, ...]], int]:
    """Requests of lines that are not plain, and the number of such lines; raises ValueError for an invalid line.

    lines: number of lines before these.
    """
    rows, each = list[tuple[int, ...]](), text.splitlines()
    for number, line in enumerate(each, lines + 1):
        if not line.strip():
            continue
        try:
            time_ns, device, lba, sectors, op = (int(field) for field in line.split())
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: a line must be five integers: {' '.join(FIELDS)}") from error
        if not (0 <= time_ns < MAX_NS and 0 <= lba < MAX_LBA and 1 <= sectors < MAX_SECTORS and op in (0, 1)):
            raise ValueError(
                f"{path}, line {number}: allowed: time 0 to 2^61 ns, lba 0 to 2^48, sectors 1 to 2^22, op 0 or 1"
            )
        if not 0 <= device < MAX_DEVICE:
            raise ValueError(f"{path}, line {number}: device must be from 0 to 2^32")
        rows.append((time_ns, device, lba, sectors, op))
    return rows, len(each)


def replay_file(path: Path, spec: BlockSsdSpec) -> dict[str, Any]:
    """Replay a trace, and measure the time that the emulator needs to read and to simulate it."""
    replay(_parse(b"0 0 0 1 1", path), ConventionalSsd(spec))  # compiles
    drive = ConventionalSsd(spec)
    began = time.perf_counter()
    requests = load_trace(path)
    parsed = time.perf_counter()
    result = replay(requests, drive)
    ended = time.perf_counter()
    return result | {
        "parse_wall_s": parsed - began,
        "simulate_wall_s": ended - parsed,
        "requests_per_wall_s": len(requests) / (ended - began),
    }


def replay(requests: I64, drive: ConventionalSsd) -> dict[str, Any]:
    """Modelled latencies of a trace on a conventional SSD; addresses wrap at its capacity."""
    times, _, lbas, sectors, ops = requests.T
    latencies = drive.replay(times.copy(), lbas * SECTOR_BYTES, sectors * SECTOR_BYTES, ops.copy())
    end_ns = int((times + latencies).max() - times[0])
    keys = latency_keys(latencies, end_ns, 1.0)
    keep = ("iops", "mean_latency_us", "p99_latency_us", "simulated_s")
    reads = int((ops == READ).sum())
    return {"preset": drive.spec.name, "requests": len(times), "reads": reads} | {key: keys[key] for key in keep}


def record(path: Path, prompt: int, steps: int, method: str, compression: float) -> dict[str, Any]:
    """Record every page that a drive's flash reads and programs while one sequence decodes, with its address.

    The sequence is random data in the shipped model's shape (4 layers, 4 KV heads of 64, groups of 2 queries).
    """
    layers, heads, group, dim = 4, 4, 2, 64
    firmware, generator = Firmware(INSTCSD_ZYNQ7045_8CH), np.random.default_rng(0)
    lines: list[str] = []
    sectors = firmware.spec.geometry.page_bytes // SECTOR_BYTES

    def note(operation: str, ppns: U32, start_ns: int) -> None:
        op = int(operation == "read")
        lines.extend(f"{start_ns} 0 {int(ppn) * sectors} {sectors} {op}" for ppn in ppns)

    def half(*shape: int) -> F16:
        return generator.standard_normal(size=shape).astype(np.float16)

    def done(command: Command, submit_ns: int) -> Completion:
        answer = firmware.step(command, submit_ns)
        if answer.status is not Status.SUCCESS:
            raise DriveError(firmware.spec.name, answer.status, answer.reason)
        return answer

    firmware.set_page_listener(note)
    seqs = tuple(done(SeqCreate(1, layers, heads, dim, prompt + steps), 0).data[0].tolist())
    now = 0
    for layer in range(layers):
        append = KvAppend(seqs, layer, np.array([prompt]), half(prompt, heads, dim), half(prompt, heads, dim))
        now = done(append, now).finish_ns
    for step in range(steps):
        params = CompressionBudget(compression).at(prompt + step + 1, dim)
        for layer in range(layers):
            q, k, v = half(1, heads, group, dim), half(1, heads, dim), half(1, heads, dim)
            top_k, recent = np.array([params.k]), np.array([params.l])
            now = done(Attend(seqs, layer, q, k, v, method, params.r, top_k, recent), now).finish_ns
    path.write_text("\n".join(lines) + "\n")
    return {"file": str(path), "requests": len(lines), "simulated_s": now / 1e9}
