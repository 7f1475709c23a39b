"""Mutated invocations and files for every command.

Commands are found by introspection of the entry point `vcsd`. Each input runs in a separate process, in a copy of a
folder of valid files; all processes in its group end with it. A *traceback* is an exception that leaves the command;
*silent* is exit code 0 for an input that must be refused. Functions listed in `CUT` would take minutes and are replaced
by an exit: everything before them is tested, nothing inside or after them.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from csd_io.parent_death import end_with_parent
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, progress
from vcsd_eval import sweep
from vcsd_eval.experiment import Outcome, flat
from vcsd_eval.verify.cli_files import make_folder
from vcsd_eval.verify.cli_inputs import Input, make_input

CUT = (
    "vcsd_eval.papers.instinfer.options:simulate",  # steps at full scale
    "vcsd_eval.papers.dual_blade.evaluate:infer",  # and whole inferences
    "vcsd_eval.papers.report:sweep",  # the same, in processes of their own
    "vcsd.guest:run_guest",  # boots a VM
    "nvmevirt_config.module:_run",  # insmod and rmmod
    "csd_firmware.process.supervisor:Supervisor.run",  # serves until interrupted
    "fleet.local:start_local",  # Ray starts
    "fleet.cluster:start",
    "vcsd.drive_metrics:serve_metrics",  # serves until interrupted
    "vcsd_cli.serve_model:http_server",
    "vcsd_eval.verify.cli_fuzz:bench_cli_fuzz",  # recursion
    "vcsd_eval.bench.transport:bench_transport",  # mounts, and minutes of fio
    "vcsd_eval.bench.page_cache:bench_page_cache",  # control groups, and the requested amount of disk space
    "vcsd_eval.bench.attention:sweep",  # this and the next ones: minutes
    "vcsd_eval.verify.flips:bench_flips",  # in processes of their own
    "vcsd_eval.verify.exceptions:bench_exceptions",
    "vcsd_eval.verify.signals:bench_signals",
    "vcsd_eval.verify.mixed_files:bench_mixed_files",
    "vcsd_eval.verify.soak:bench_soak",
    "vcsd_eval.verify.simulation.simulate:bench_simulate",
    "vcsd_eval.bench.vllm:bench_vllm",
    "vcsd_eval.ssd.ssd:row_of",
    "vcsd_eval.lifetime.lifetime:sweep",
    "vcsd_eval.fleet.fleet:calibrate",
    "vcsd_eval.fleet.fleet:run_jobs",
    "vcsd_eval.fair.map:rates",
    "vcsd_eval.fair.recorded:record",
    "vcsd_eval.fair.orbitflow:headline",
    "vcsd_eval.fair.tierkv:headline",
    "vcsd_eval.fair.dual_blade:headline",
)
PRELOADED = ("vcsd.session", "vcsd.generate", "vcsd.loading", "vcsd_eval.accuracy.measure", "vcsd_eval.model.llama2c")
HANG_S = 60.0  # CPU time: on a busy machine, compiling kernels takes longer than this in wall-clock time
WAIT_S = 5 * HANG_S  # wall-clock time
TRACEBACK = 70
KINDS = "tracebacks", "signals", "silent", "hangs"


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of an input. kind: one of KINDS, or None for the expected outcome."""

    number: int
    kind: str | None
    code: int
    says: str


class ForkedProgram:
    """The command line, ready to be forked: everything is imported, and slow functions are replaced."""

    def __init__(self) -> None:
        (entry,) = entry_points(group="console_scripts", name="vcsd")
        self.main = entry.load()
        self.commands = list(sys.modules[self.main.__module__].app.leaf_commands())
        for name in PRELOADED:
            importlib.import_module(name)
        for place in CUT:
            getattr(*_holder(place))  # raises if the function no longer exists

    def run(self, given: Input, folder: Path) -> NoReturn:
        """In the child: run the command in this folder, then end the process."""
        end_with_parent(os.getppid())
        os.setsid()
        for place in CUT:
            setattr(*_holder(place), _cut)
        os.chdir(folder)
        torch.set_num_threads(1)  # a forked process has no OpenMP threads and would wait for them
        os.environ |= {"VCSD_HOME": str(folder / "home"), "VCSD_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
        for name, fd in ((os.devnull, 0), (folder / ".stdout", 1), (folder / ".stderr", 2)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), fd)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace")  # pytest's is strict
        sys.argv, code = ["vcsd", *given.words], 0
        try:
            self.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            code = TRACEBACK
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                traceback.print_exc()
                code = TRACEBACK
        os._exit(code)


def _holder(place: str) -> tuple[Any, str]:
    """Object that holds the function `module:name` or `module:class.name`, and the function's name there."""
    module, _, names = place.partition(":")
    *parents, last = names.split(".")
    holder: Any = importlib.import_module(module)
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, last


def _cut(*args: object, **options: object) -> NoReturn:
    """Replacement of a function in CUT: the input was accepted."""
    raise SystemExit(0)


_program: ForkedProgram | None = None  # of this process; children of the pool inherit it


def _try(template: Path, seed: int, number: int) -> Ended:
    """Run one input in a copy of the folder; classify it by how its process ends."""
    assert _program
    given = make_input(_program.commands, seed, number)
    with tempfile.TemporaryDirectory(prefix="cli-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "here"
        shutil.copytree(template, folder)
        for name, content in given.files.items():
            (folder / name).write_bytes(content)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _program.run(given, folder)
        code = _wait(pid)
        said = (folder / ".stderr").read_text(errors="replace") if (folder / ".stderr").exists() else ""
    if code is None:
        return Ended(number, "hangs", -1, f"more than {HANG_S:g} s of CPU time or {WAIT_S:g} s")
    return Ended(number, _kind(code, said, given.refused), code, (said.strip().splitlines() or [""])[-1][-300:])


def _kind(code: int, said: str, refused: bool) -> str | None:
    if code < 0:
        return "signals"
    if code == TRACEBACK or "Traceback (most recent call last)" in said:
        return "tracebacks"
    return "silent" if refused and code == 0 else None


def _wait(pid: int) -> int | None:
    """Exit code, negative for a signal; None for a process that had to be killed. Ends its process group."""
    ends = time.monotonic() + WAIT_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        late = not found and (time.monotonic() > ends or _cpu_s(pid) > HANG_S)
        if found or late:
            with suppress(ProcessLookupError):  # the group is empty
                os.killpg(pid, signal.SIGKILL)
        if found:
            return os.waitstatus_to_exitcode(status)
        if late:
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def _cpu_s(pid: int) -> float:
    """CPU time of a process and of its finished children, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


def bench_cli_fuzz(inputs: int, seed: int, first: int, tick: Tick) -> dict[str, Any]:
    """Run inputs `first` to `first + inputs`; returns counts by kind, and details of failures in `found`."""
    global _program
    began, _program = time.perf_counter(), ForkedProgram()
    with tempfile.TemporaryDirectory(prefix="cli-files-") as scratch:
        template = Path(scratch) / "files"
        template.mkdir()
        make_folder(template)
        with sweep.workers(os.cpu_count() or 1, method="fork") as pool:
            tried = [pool.submit(_try, template, seed, number) for number in range(first, first + inputs)]
            for each in tried:
                each.add_done_callback(tick)
            ended = [each.result() for each in tried]
    found = [_describe(each, seed) for each in ended if each.kind]
    return {
        "inputs": inputs,
        **{kind: sum(each.kind == kind for each in ended) for kind in KINDS},
        "accepted": sum(each.code == 0 for each in ended),
        "commands": len(_program.commands),
        "wall_s": time.perf_counter() - began,
        "found": found,
    }


def _describe(ended: Ended, seed: int) -> dict[str, Any]:
    """Description of an input and its outcome; `--seed SEED --first NUMBER --inputs 1` repeats it."""
    assert _program
    given = make_input(_program.commands, seed, ended.number)
    words = [word if len(word) < 100 else f"{word[:40]}... {len(word)} characters" for word in given.words]
    files = {name: content[:2000].decode(errors="backslashreplace") for name, content in given.files.items()}
    return {"first": ended.number, "kind": ended.kind, "words": words, "files": files, "says": ended.says}


def experiment(
    inputs: Annotated[int, typer.Option(min=1, max=10**9, help="number of mutated invocations and files")] = 2000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of the mutations")] = 0,
    first: Annotated[int, typer.Option(min=0, max=10**9, help="number of the first input, to repeat one")] = 0,
) -> Outcome:
    """Run every command with mutated arguments and files."""
    with progress("inputs", inputs) as tick:
        result = bench_cli_fuzz(inputs, seed, first, tick)
    outcome = flat("cli-fuzz", {key: each for key, each in result.items() if key != "found"})
    notes = [
        f"{each['kind']}: --first {each['first']}: {' '.join(each['words'])}: {each['says']}"
        for each in result["found"]
    ]
    return Outcome(result, outcome.shown, notes, failed=bool(result["found"]))
