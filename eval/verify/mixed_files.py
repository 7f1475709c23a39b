"""Files of a drive from before and after some commands, mixed, as by a copy that stopped half way."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_firmware import InProcessDrive
from csd_firmware.logs import smart
from csd_io.medium import KINDS, Kind, Medium
from csd_spec import LAYOUTS, Command, Completion, Flush, KvAppend, KvCrop, KvFree, KvRead, SeqCreate, Status
from ftl.flash.files import data_sizes
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import flat_table
from vcsd_eval.experiment import Outcome
from vcsd_eval.verify.random_host import DIM, DRIVE, HEADS, LAYERS
from vcsd_eval.verify.tested_storage import CACHE_BYTES

LAYOUTS_USED = "fp16", "fp8", "progressive"
FILES = tuple(data_sizes(DRIVE.geometry))
Rows = dict[int, list[bytes] | None]  # handle -> key and value rows of each layer; None if the drive reports a loss


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one drive's folder after an earlier and a later flush, and the drive's contents after the later one."""

    old: Path
    new: Path
    rows: Rows


class FolderHost:
    """A host of one drive in a folder."""

    def __init__(self, path: Path, medium: Kind, seed: int) -> None:
        self.device = InProcessDrive(DRIVE, path, medium=Medium(medium, CACHE_BYTES))
        self._generator = np.random.default_rng(seed)

    def do(self, command: Command) -> Completion:
        done = self.device.submit(command, 0).result()
        if done.status is not Status.SUCCESS:
            raise ChildProcessError(f"{type(command).__name__}: {done.reason}")
        return done

    def append(self, handle: int, tokens: int) -> None:
        for layer in range(LAYERS):
            k, v = self._generator.standard_normal((2, tokens, HEADS, DIM)).astype(np.float16)
            self.do(KvAppend((handle,), layer, np.array([tokens]), k, v))

    def create(self, layout: str, *tokens: int) -> list[int]:
        """Create a sequence of each of these lengths."""
        made = self.do(SeqCreate(len(tokens), LAYERS, HEADS, DIM, 256, LAYOUTS[layout].code)).data[0].tolist()
        for handle, count in zip(made, tokens, strict=True):
            self.append(handle, count)
        return [int(handle) for handle in made]


def make(scratch: Path, layout: str, medium: Kind, seed: int) -> Copies:
    """Fill a drive and copy its files; free, crop and write until blocks were erased and reused; copy them again."""
    path, old, new = (scratch / name for name in ("drive", "old", "new"))
    host = FolderHost(path, medium, seed)
    kept, cut, *others = host.create(layout, 70, 90, 60, 50)
    host.do(Flush())
    shutil.copytree(path, old)
    host.do(KvFree(tuple(others)))
    host.do(Flush())
    for layer in range(LAYERS):
        host.do(KvCrop((cut,), layer, np.array([33])))
    for tokens in (60, 50, 80):
        (handle,) = host.create(layout, tokens)
        host.append(kept, 9)
        host.do(Flush())
        if tokens == 60:
            host.do(KvFree((handle,)))
    rows = read_rows(host.device)
    host.device.close()
    shutil.copytree(path, new)
    return Copies(old, new, rows)


def read_rows(device: InProcessDrive) -> Rows:
    """Rows of each sequence, read by commands."""
    found: Rows = {}
    for handle in list(device.firmware.ftl.sequences):
        done = [device.submit(KvRead((handle,), layer), 0).result() for layer in range(LAYERS)]
        good = all(each.status is Status.SUCCESS for each in done)
        found[handle] = [array.tobytes() for each in done for array in each.data] if good else None
    return found


def judge(path: Path, medium: Kind, copies: Copies, older: tuple[str, ...]) -> str:
    """Open a mix of files.

    Returns:
        `reported`: the drive is refused with the names of the older files, or says what is lost; `unnamed`: it is
        refused with another reason; `harmless`: it holds what it has to; `silent`: something else.
    """
    try:
        device = InProcessDrive(DRIVE, path, medium=Medium(medium, CACHE_BYTES))
    except ValueError as error:
        return "reported" if all(f"{name} is older" in str(error) for name in older) else "unnamed"
    try:
        rows = read_rows(device)
        noticed = bool(smart(device.firmware.ftl)["critical_warning"])
    finally:
        device.close()
    if rows == copies.rows:
        return "harmless"
    wrong = any(each is not None and each != copies.rows.get(handle) for handle, each in rows.items())
    return "silent" if wrong or not noticed else "reported"


def bench_mixed_files(seed: int, tick: Tick = no_tick) -> dict[str, Any]:
    """Open every mix of old and new files on every medium, in several layouts."""
    total, silent = Counter[str](), list[str]()
    for medium, layout in product(KINDS, LAYOUTS_USED):
        with tempfile.TemporaryDirectory(prefix="vcsd-mixed-") as scratch:
            copies = make(Path(scratch), layout, medium, seed)
            for mask in range(1, (1 << len(FILES)) - 1):
                older = tuple(file for bit, file in enumerate(FILES) if mask >> bit & 1)
                path = Path(scratch) / f"mix{mask}"
                shutil.copytree(copies.new, path)
                for file in older:
                    shutil.copyfile(copies.old / file, path / file)
                outcome = judge(path, medium, copies, older)
                total.update({"mixes": 1, outcome: 1})
                if outcome in ("silent", "unnamed"):
                    silent.append(f"{outcome}: {layout}, {medium}: older {', '.join(older)}")
                tick(None)
    keys = "mixes", "reported", "harmless", "unnamed", "silent"
    return {key: total[key] for key in keys} | {"layouts": list(LAYOUTS_USED), "media": list(KINDS), "found": silent}


def experiment(
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of the rows")] = 0,
) -> Outcome:
    """Mix files of a drive from before and after some commands: each mix must be reported, or hold everything."""
    with progress("mixes", ((1 << len(FILES)) - 2) * len(LAYOUTS_USED) * len(KINDS)) as tick:
        result = bench_mixed_files(seed, tick)
    shown = {key: value for key, value in result.items() if isinstance(value, int)}
    bad = bool(result["silent"] or result["unnamed"])
    return Outcome(result, [flat_table("mixed files", shown)], result["found"], failed=bad)
