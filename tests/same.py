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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and how its command line is called."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.folder)}

    @property
    def vcsd(self) -> list[str]:
        """The command line that its pyproject.toml names."""
        scripts = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]["scripts"]
        module, _, function = scripts["vcsd"].partition(":")
        return [sys.executable, "-c", f"from {module} import {function}; {function}()"]

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Begin a command in this tree."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, **pipes)


def check_out(revision: str, folder: Path) -> Tree:
    """The files of a revision; raises ValueError where git has none such."""
    done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Tree(folder)


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
    started = []
    for number, tree in enumerate((old, new)):
        folder = scratch / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        mine = [word.format(folder=folder) for word in words]
        if "--all-layers" in mine and tree is old and not _has(old, "--all-layers", mine[:2]):
            mine.remove("--all-layers")  # it always took them all
        started.append(tree.start([*tree.vcsd, *mine, "-o", "json"]))
    answers = [process.communicate() for process in started]
    for which, process, (_, errors) in zip(("before", "now"), started, answers, strict=True):
        if process.returncode:
            return [f"exit {process.returncode} {which}: {errors.strip().splitlines()[-1:]}"]
    return list(differences(*(json.loads(out) for out, _ in answers)))


def _has(tree: Tree, option: str, command: list[str]) -> bool:
    out, _ = tree.start([*tree.vcsd, *command, "--help"]).communicate()
    return option in out


def old_drive_opens(old: Tree, new: Tree, scratch: Path) -> list[str]:
    """A folder that the old tree has written is read by the new one."""
    folder = str(scratch / "drive")
    answers = [
        tree.start([sys.executable, "-c", DRIVE, verb, folder]).communicate()
        for tree, verb in ((old, "write"), (new, "read"))
    ]
    (wrote, _), (read, errors) = answers
    return [] if wrote and wrote == read else [f"K and V differ: {errors.strip().splitlines()[-1:]}"]


def main(
    revision: Annotated[str, typer.Argument(help="revision to compare with")],
    only: Annotated[str, typer.Option(help="run, bench, claims or drive, with commas")] = "run,drive,bench,claims",
    tokens: Annotated[int, typer.Option(help="new tokens of a run")] = 16,
    output: Annotated[str, typer.Option("-o", help="normal or json")] = "normal",
) -> None:
    """Exit 1 where a figure differs."""
    err, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        old, new = check_out(revision, scratch / "tree"), Tree(ROOT)
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
            err.print(f"{number}/{len(jobs)} {name}: {verdict} ({time.monotonic() - began:.0f} s)", highlight=False)
    same = sum(row["same"] for row in rows)
    result = {"revision": revision, "commands": len(rows), "same": same, "differing": len(rows) - same}
    print(json.dumps(result | {"rows": rows}) if output == "json" else f"{same} of {len(rows)} commands: the same")
    sys.exit(same != len(rows))


if __name__ == "__main__":
    typer.run(main)
