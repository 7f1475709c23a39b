"""What is measured of a model's accuracy: methods at compressions on a task, and the turns that are done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from attention_engine import METHODS, Methods
from csd_spec import Compression
from csd_spec.checked import from_json, value
from csd_spec.planes import is_lossy
from csd_spec.sparf import Convention
from eval.accuracy.contenders import Contender, on_drives
from eval.accuracy.tasks import TASKS

Counts = dict[str, tuple[float, float]]  # a sample's figures: what it adds to a sum, and to what that is divided by


def contenders(names: Iterable[str], methods: Methods = METHODS) -> list[Contender]:
    """Methods by name: those of a table, `ours`, and variants of it that need no set-up."""
    known = {each.name: each for each in on_drives(methods) if not (each.cache_share or each.similar)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"method = {unknown[0]!r}: must be one of {', '.join(sorted(known))}")
    return [known[name] for name in dict.fromkeys(names)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. compressions: every method is run at each, dense at 1 alone.

    own_methods: the file that some of the methods are from.
    """

    task: str
    data: Path | None
    methods: tuple[Contender, ...]
    compressions: tuple[float, ...]
    convention: Convention
    samples: int
    drives: int
    max_context: int
    seed: int
    own_methods: Path | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task = {self.task!r}: must be one of {', '.join(TASKS)}")
        if self.samples < 1:
            raise ValueError(f"samples = {self.samples}: at least 1 is needed")
        for c in self.compressions:
            Compression(c, self.convention)

    def turns(self) -> list[tuple[Contender, float]]:
        """Every method with every compression, those of one storage format together; first those in FP16."""
        turns = [(each, c) for each in self.methods for c in each.budgets(self.compressions)]
        return sorted(turns, key=lambda turn: (is_lossy(turn[0].bits), -turn[0].bits))


@value
class Turn:
    """One method at one compression on one batch: counts of each sample, and bytes by the drives' account."""

    batch: int
    method: str
    compression: float
    samples: list[Counts]
    groups: list[str]
    useful_bytes: int
    fetched_bytes: int
    dense_bytes: int


@dataclass(slots=True)
class Journal:
    """Turns that are done, kept in a file while a run lasts, so that a killed one goes on where it stopped."""

    path: Path | None
    done: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    self.done.append(from_json(line, Turn))
                except ValueError:
                    break  # the line during which the run was killed
            self.path.write_text("".join(json.dumps(asdict(turn)) + "\n" for turn in self.done), encoding="utf-8")

    def has(self, batch: int, method: str, c: float) -> bool:
        return any((turn.batch, turn.method, turn.compression) == (batch, method, c) for turn in self.done)

    def add(self, turn: Turn) -> None:
        self.done.append(turn)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(turn)) + "\n")

    def close(self) -> None:
        """The run is over: nothing is left to go on with."""
        if self.path:
            self.path.unlink(missing_ok=True)
