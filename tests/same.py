"""`./dev same REVISION`: the figures of this tree beside those of another revision, bit for bit.

Both run every command side by side. Whatever is emulator time or memory is left out; all else must be equal.
"""

from __future__ import annotations

import json
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
    *(("--attention", method) for method in ("dense", "sparf", "sparq")),
    *(("--attention", method, "--embedding-bits", "4") for method in ("spending", "paged")),
)
TRANSPORTS = ("inproc", "process", "fuse", "window:{folder}/window")
BENCHES = (
    ("bench", "ftl"),
    ("bench", "ftl", "--workload", "randread", "--requests", "200000"),
    ("bench", "ftl", "--workload", "churn", "--erase-mean", "10"),
    ("bench", "crash"),
)
CLAIMS = ("eval", "claims", "--all-layers")
DRIVE = """
import sys
import numpy as np
from pathlib import Path
from csd_firmware import InProcessDevice
from csd_spec import Flush, KvAppend, KvCrop, KvRead, SeqCreate
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
folder, generator = Path(sys.argv[2]), np.random.default_rng(0)
if sys.argv[1] == "write":
    device = InProcessDevice(INSTCSD_ZYNQ7045_8CH, folder)
    for bits in (16, 4):
        seqs = tuple(device.submit(SeqCreate(2, 2, 2, 64, 1024, bits), 0).result().data[0].tolist())
        for layer in range(2):
            k, v = (generator.standard_normal((1500, 2, 64)).astype(np.float16) for _ in "kv")
            device.submit(KvAppend(seqs, layer, np.array([900, 600]), k, v), 0).result()
            device.submit(KvCrop(seqs, layer, np.array([700, 600])), 0).result()
    device.submit(Flush(), 0).result()
else:
    device = InProcessDevice.reopen(folder)
for layer in range(2):
    for seq in sorted(device.firmware.ftl.sequences):
        done = device.submit(KvRead((seq,), layer), 0).result()
        print(done.status, seq, layer, *(part.tobytes().hex() for part in done.data))
device.close()
"""


WORKER = """
import contextlib, io, json, sys
from importlib import import_module
module, _, function = sys.argv[1].partition(":")
main, commands, answers = getattr(import_module(module), function), sys.stdin, sys.stdout
for line in commands:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["vcsd", *json.loads(line)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""


class Tree:
    """A checkout, and a process that runs its commands one after the other: what they import is loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        scripts = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["scripts"]
        self._worker = self.start([sys.executable, "-c", WORKER, scripts["vcsd"]])

    def begin(self, words: Sequence[str]) -> None:
        """Run a command; `answer` gives what comes of it."""
        assert self._worker.stdin
        print(json.dumps(list(words)), file=self._worker.stdin, flush=True)

    def answer(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the command that was begun."""
        assert self._worker.stdout
        line = self._worker.stdout.readline()
        code, out, errors = json.loads(line) if line else (-1, "", "the process ended")
        return code, out, errors

    def has(self, option: str, command: Sequence[str]) -> bool:
        """Whether a command has an option."""
        self.begin([*command, "--help"])
        return option in self.answer()[1]

    def close(self) -> None:
        self._worker.kill()
        self._worker.communicate()

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Begin a program in this tree."""
        pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(self.folder)}
        pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **pipes)


def check_out(revision: str) -> Path:
    """A folder with the files of a revision, kept for another time; raises ValueError where git has none such."""
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


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Where two results differ, but for figures of the emulator itself. What only the new one has is no difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            if not EMULATOR.search(key):
                yield from differences(old[key], new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {str(old)[:60]} before, {str(new)[:60]} now"


def compare(old: Tree, new: Tree, words: tuple[str, ...], scratch: Path) -> list[str]:
    """Run one command in both trees at the same time; returns what differs."""
    for tree in (old, new):
        folder = scratch / ("old" if tree is old else "new")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        mine = [word.format(folder=folder) for word in words]
        if "--all-layers" in mine and not tree.has("--all-layers", mine[:2]):
            mine.remove("--all-layers")  # it always took them all
        tree.begin([*mine, "-o", "json"])
    answers = [old.answer(), new.answer()]
    for which, (code, _, errors) in zip(("before", "now"), answers, strict=True):
        if code:
            return [f"exit {code} {which}: {errors.strip().splitlines()[-1:]}"]
    return list(differences(*(json.loads(out) for _, out, _ in answers)))


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
    only: Annotated[str, typer.Option(help="run, bench, claims or drive, with commas")] = "run,drive,bench,claims",
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
        chosen: dict[str, list[tuple[str, ...]]] = {"run": runs, "bench": list(BENCHES), "claims": [CLAIMS]}
        jobs: list[tuple[str, Callable[[], list[str]]]] = []
        for part in only.split(","):
            if part == "drive":
                jobs.append(("a drive's folder", lambda: old_drive_opens(old, new, scratch)))
            for words in chosen.get(part, []):
                jobs.append((" ".join(words), lambda words=words: compare(old, new, words, scratch)))
        for number, (name, job) in enumerate(jobs, 1):
            began = time.monotonic()
            found = job()
            rows.append({"command": name, "same": not found, "differences": found})
            verdict = "same" if not found else "; ".join(found[:3])
            print(f"{number}/{len(jobs)} {name}: {verdict} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        for tree in trees:
            tree.close()
    same = sum(row["same"] for row in rows)
    result = {"revision": revision, "commands": len(rows), "same": same, "differing": len(rows) - same}
    print(json.dumps(result | {"rows": rows}) if output == "json" else f"{same} of {len(rows)} commands: the same")
    sys.exit(same != len(rows))


if __name__ == "__main__":
    typer.run(main)
