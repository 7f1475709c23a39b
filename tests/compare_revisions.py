"""`./dev same REVISION`: compare the figures of this tree with those of another revision, bit for bit.

Both run every command concurrently. The emulator's own time and memory are left out; everything else must be equal, or
numbers within `--within`. `cpu_ratio` is the CPU time of this tree's command divided by that of the other's.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
EMULATOR = re.compile(r"wall|rss|realtime")  # keys of figures that are the machine's, not the drive's
METHODS = (
    *(("--method", method) for method in ("dense", "sparf", "sparq")),
    *(("--method", method, "--layout", "int4") for method in ("spending", "paged")),
)
TRANSPORTS = ("inproc", "process", "fuse", "window:{folder}/window")
BENCHES = (
    ("bench", "ftl"),
    ("bench", "ftl", "--workload", "randread", "--requests", "200000"),
    ("bench", "ftl", "--workload", "churn", "--target-pe-cycles", "10"),
    ("verify", "power-loss"),
)
PARTS = "run", "drive", "families", "bench", "claims", "eval"
CLAIMS = ("eval", "claims", "--simulate-all-layers")
EVALS = (
    ("eval", "tiered-serving"),
    ("eval", "serving"),
    ("eval", "prefixes"),
    ("eval", "prefixes", "--trace", "{data}/mooncake_conversation.jsonl"),
)
# Commands of this tree as older ones, which have no eval/verify/verify.py, call them; goes with the last such revision
OLD_COMMANDS = {
    "verify power-loss": "bench power-loss",
    "eval prefixes --trace": "eval prefix-cache --trace",
    "eval prefixes": "eval prefix-reuse",
}
FAMILIES = Path(__file__).with_name("family_tokens.py")
DRIVE = """
import sys
import numpy as np
from pathlib import Path
from csd_firmware import InProcessDrive
from csd_spec import Flush, KvAppend, KvCrop, KvRead, SeqCreate
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
folder, generator = Path(sys.argv[2]), np.random.default_rng(0)
if sys.argv[1] == "write":
    device = InProcessDrive(INSTCSD_ZYNQ7045_8CH, folder)
    for bits in (16, 4):
        seqs = tuple(device.submit(SeqCreate(2, 2, 2, 64, 1024, bits), 0).result().data[0].tolist())
        for layer in range(2):
            k, v = (generator.standard_normal((1500, 2, 64)).astype(np.float16) for _ in "kv")
            device.submit(KvAppend(seqs, layer, np.array([900, 600]), k, v), 0).result()
            device.submit(KvCrop(seqs, layer, np.array([700, 600])), 0).result()
    device.submit(Flush(), 0).result()
else:
    device = InProcessDrive.reopen(folder)
for layer in range(2):
    for seq in sorted(device.firmware.ftl.sequences):
        done = device.submit(KvRead((seq,), layer), 0).result()
        print(done.status, seq, layer, *(part.tobytes().hex() for part in done.data))
device.close()
"""


WORKER = """
import contextlib, io, json, resource, sys
from importlib import import_module
module, _, function = sys.argv[1].partition(":")
main, commands, answers = getattr(import_module(module), function), sys.stdin, sys.stdout
def cpu_s():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
for line in commands:
    out, err, code, began_s = io.StringIO(), io.StringIO(), 0, cpu_s()
    sys.argv = ["vcsd", *json.loads(line)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue(), cpu_s() - began_s]), file=answers, flush=True)
"""


class Tree:
    """A checkout, and a process that runs its commands one after the other, so imports are loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._renames = {} if (folder / "eval/verify/verify.py").exists() else OLD_COMMANDS
        scripts = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["scripts"]
        self._worker = self.start([sys.executable, "-c", WORKER, scripts["vcsd"]])

    def begin(self, words: Sequence[str]) -> None:
        """Start a command; `answer` returns its result."""
        assert self._worker.stdin
        line = " ".join(words)
        for name, old_name in self._renames.items():
            if line.startswith(name):
                words = [*old_name.split(), *words[len(name.split()) :]]
                break
        print(json.dumps(list(words)), file=self._worker.stdin, flush=True)

    def answer(self) -> tuple[int, str, str, float]:
        """Exit code, stdout, stderr and CPU seconds of the command that was begun."""
        assert self._worker.stdout
        line = self._worker.stdout.readline()
        code, out, errors, cpu_s = json.loads(line) if line else (-1, "", "the process ended", 0.0)
        return code, out, errors, cpu_s

    def close(self) -> None:
        self._worker.kill()
        self._worker.communicate()

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Begin a program in this tree."""
        pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(self.folder)}
        pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **pipes)


def check_out(revision: str) -> Path:
    """A folder with the files of a revision, kept for later runs; raises ValueError if git has no such revision."""
    done = subprocess.run(["git", "rev-parse", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{revision}: no such revision")
    commit = done.stdout.decode().strip()
    folder = ROOT / "build" / "same" / commit
    if not folder.exists():
        scratch = folder.with_suffix(".new")
        shutil.rmtree(scratch, ignore_errors=True)
        files = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(files)) as archive:
            archive.extractall(scratch, filter="data")
        scratch.rename(folder)
    return folder


def differences(old: Any, new: Any, path: str = "", within: float = 0.0) -> Iterator[str]:
    """Differences of two results, without figures of the emulator itself. Keys that only the new one has are ignored.

    within: Largest relative difference of two numbers that count as equal.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            if not EMULATOR.search(key):
                yield from differences(old[key], new.get(key), f"{path}.{key}", within)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{number}]", within)
    elif old != new and not (_are_numbers(old, new) and math.isclose(old, new, rel_tol=within)):
        yield f"{path}: {str(old)[:60]} before, {str(new)[:60]} now"


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def compare(old: Tree, new: Tree, words: tuple[str, ...], scratch: Path, within: float) -> tuple[list[str], float]:
    """Run one command in both trees at the same time; returns what differs, and the ratio of CPU times."""
    for tree in (old, new):
        folder = scratch / ("old" if tree is old else "new")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        filled = [word.format(folder=folder, data=os.environ.get("VCSD_DATA", "")) for word in words]
        tree.begin([*filled, "-o", "json"])
    answers = [old.answer(), new.answer()]
    for which, (code, _, errors, _) in zip(("before", "now"), answers, strict=True):
        if code:
            return [f"exit {code} {which}: {errors.strip().splitlines()[-1:]}"], 0.0
    before, now = (json.loads(out) for _, out, _, _ in answers)
    return list(differences(before, now, within=within)), answers[1][3] / max(answers[0][3], 1e-9)


def same_tokens(old: Tree, new: Tree, within: float) -> list[str]:
    """Models of six families give the same tokens and logits."""
    running = [tree.start([sys.executable, "-c", FAMILIES.read_text()]) for tree in (old, new)]
    before, now = (process.communicate()[0] for process in running)
    if not before or not now:
        return [f"{FAMILIES.name} fails {'now' if before else 'before'}"]
    return list(differences(json.loads(before), json.loads(now), within=within))


def old_drive_opens(old: Tree, new: Tree, scratch: Path) -> list[str]:
    """A folder that the old tree has written is read by the new one."""
    folder = str(scratch / "drive")
    wrote, read = (
        tree.start([sys.executable, "-c", DRIVE, verb, folder]).communicate()[0]
        for tree, verb in ((old, "write"), (new, "read"))
    )
    return [] if wrote and wrote == read else ["K and V differ"]


def main(
    revision: Annotated[str, typer.Argument(help="revision to compare with")],
    only: Annotated[str, typer.Option(help=", ".join(PARTS) + ": with commas")] = ",".join(PARTS),
    within: Annotated[
        float, typer.Option(min=0, max=1, help="relative difference of numbers that counts as none")
    ] = 0.0,
    tokens: Annotated[int, typer.Option(help="new tokens of a run")] = 16,
    output: Annotated[str, typer.Option("-o", help="normal or json")] = "normal",
) -> None:
    """Exit 1 where a figure differs."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            trees = old, new = Tree(check_out(revision)), Tree(ROOT)
        except ValueError as error:
            sys.exit(f"same: {error}")
        runs = [
            ("run", *method, "--drives", str(drives), "--transport", transport, "--max-new-tokens", str(tokens))
            for transport, method, drives in product(TRANSPORTS, METHODS, (1, 2, 3, 4))
        ]
        evals = [words for words in EVALS if "VCSD_DATA" in os.environ or not any("{data}" in word for word in words)]
        chosen = {"run": runs, "bench": list(BENCHES), "claims": [CLAIMS], "eval": evals}
        jobs: list[tuple[str, Callable[[], tuple[list[str], float]]]] = []
        for part in only.split(","):
            if part == "drive":
                jobs.append(("a drive's folder", lambda: (old_drive_opens(old, new, scratch), 0.0)))
            if part == "families":
                jobs.append(("tokens of six families", lambda: (same_tokens(old, new, within), 0.0)))
            for words in chosen.get(part, []):
                jobs.append((" ".join(words), lambda words=words: compare(old, new, words, scratch, within)))
        for number, (name, job) in enumerate(jobs, 1):
            began = time.monotonic()
            differing, ratio = job()
            rows.append({"command": name, "same": not differing, "cpu_ratio": ratio or None, "differences": differing})
            verdict = "same" if not differing else "; ".join(differing[:3])
            print(f"{number}/{len(jobs)} {name}: {verdict} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        for tree in trees:
            tree.close()
    same = sum(row["same"] for row in rows)
    result = {"revision": revision, "commands": len(rows), "same": same, "differing": len(rows) - same}
    print(json.dumps(result | {"rows": rows}) if output == "json" else f"{same} of {len(rows)} commands: the same")
    sys.exit(same != len(rows))


if __name__ == "__main__":
    typer.run(main)
