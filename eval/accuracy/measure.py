"""How well a model does its tasks when its decode attention runs in drives, by method and compression.

A batch of samples is prefilled once, all but the last token of each prompt. Then every method decodes from there
in turn and is cropped away again, so what is compared differs in nothing but the method. Every answer's first token
is the method's too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import vcsd
from attention_engine import METHODS, Methods
from csd_spec import Compression
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.sparf import Convention
from eval.accuracy.selectors import OURS, Contender
from eval.accuracy.tasks import TASKS, Room, Sample
from eval.plot import new_figure, save_figure

BATCH = 8  # samples that are decoded together
RESAMPLES = 2000  # of the bootstrap
Counts = dict[str, tuple[float, float]]  # a sample's figures: what it adds to a sum, and to what that is divided by
Tick = Callable[[object], None]


def contenders(names: Iterable[str], methods: Methods = METHODS) -> list[Contender]:
    """Methods by name: those of a table, or `ours` and the variants of it that need no set-up."""
    ours = {each.name: each for each in OURS if not (each.cache_share or each.similar)}
    ours["ours"] = replace(ours["ours-int4"], name="ours")
    known = {name: Contender(name, name) for name in methods} | ours
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
        """Every method with every compression, those of one storage format together."""
        turns = [(m, c) for m in self.methods for c in (self.compressions if m.name != "dense" else (1.0,))]
        return sorted(turns, key=lambda turn: -turn[0].bits)


@dataclass(frozen=True, slots=True)
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
                    self.done.append(Turn(**json.loads(line)))
                except (ValueError, TypeError):
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


class Prefilled:
    """Prompts of which drives hold all but the last token."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]]) -> None:
        self.model = model
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        self.last, self.cache = ids[:, -1:], None
        self.takes_positions = "position_ids" in model.forward.__wrapped__.__code__.co_varnames
        self._forward(ids[:, :-1], self.mask[:, :-1])

    def decode(self, steps: int, choose: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
        """Step on from the prompts' last tokens; afterwards the cache is as before.

        choose(step, logits (B, vocabulary)) gives the next tokens (B,), or None to end early.
        """
        ids, mask, stored = self.last, self.mask, 0
        for step in range(steps):
            logits = self._forward(ids, mask)
            stored += 1
            chosen = choose(step, logits)
            if chosen is None:
                break
            ids = chosen[:, None].to(mask.device)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        assert self.cache is not None
        self.cache.crop(-stored)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        extra = {"position_ids": positions} if self.takes_positions else {}
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **extra)
        self.cache = out.past_key_values
        last: torch.Tensor = out.logits[:, -1].float()
        return last


@torch.inference_mode()
def measure_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    progress_dir: Path | None = None,
    tick: Tick | None = None,
) -> dict[str, Any]:
    """Every method of a plan at every compression, with bootstrap intervals of 95 % over the samples.

    progress_dir: where a run that was killed left its turns; they are used if nothing has changed since.
    Raises ValueError for a file, a context or a method that cannot be used, before anything is run.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", plan.max_context)
    if not 64 <= plan.max_context <= limit:
        raise ValueError(f"max_context = {plan.max_context}: the model's context is {limit}, at least 64 are needed")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    samples, rule = TASKS[plan.task].make(plan.data, Room(encode, plan.max_context), plan.samples, plan.seed)
    journal = Journal(progress_dir and progress_dir / f"{_fingerprint(model, plan)}.jsonl")
    subject = Subject(model, tokenizer, plan)
    for number, first in enumerate(range(0, len(samples), BATCH)):
        subject.measure(number, samples[first : first + BATCH], journal, tick or (lambda _: None))
    rows = [row | {"rule": rule} for contender, c in plan.turns() for row in _rows(journal.done, contender, c, plan)]
    journal.close()
    return {
        "model": Path(model.config.name_or_path).name,
        "task": plan.task,
        "samples": len(samples),
        "max_context": plan.max_context,
        "drives": plan.drives,
        "seed": plan.seed,
        "rows": rows,
    }


@dataclass(frozen=True, slots=True)
class Subject:
    """A model at its task."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plan: Plan

    def measure(self, number: int, samples: list[Sample], journal: Journal, tick: Tick) -> None:
        """Do all turns of one batch that the journal does not have, with one prefill for each storage format."""
        turns = self.plan.turns()
        dense: torch.Tensor | None = None
        for bits in dict.fromkeys(contender.bits for contender, _ in turns):
            todo = []
            for contender, c in turns:
                if contender.bits == bits and journal.has(number, contender.name, c):
                    tick(None)
                elif contender.bits == bits:
                    todo.append((contender, c))
            if not todo:
                continue
            how: Any = {"attention": "dense", "methods": self.plan.own_methods}
            with vcsd.attach(self.model, self.plan.drives, embedding_bits=bits, **how) as csd:
                prefilled = Prefilled(self.model, [sample.prompt for sample in samples])
                if TASKS[self.plan.task].score is None and dense is None:
                    csd.use("dense", Compression(1))
                    dense = _force(prefilled, samples)
                for contender, c in todo:
                    journal.add(self._turn(csd, prefilled, number, samples, contender, c, dense))
                    tick(None)

    def _turn(
        self,
        csd: vcsd.Attached,
        prefilled: Prefilled,
        number: int,
        samples: list[Sample],
        contender: Contender,
        c: float,
        dense: torch.Tensor | None,
    ) -> Turn:
        csd.use(contender.method, Compression(c, self.plan.convention))
        before = len(csd.driver.traffic.steps)
        if dense is not None:
            counts = _likelihoods(_force(prefilled, samples), dense, samples, self.tokenizer)
        else:
            counts = _scores(_generate(prefilled, samples, self.tokenizer, self.plan.task), samples, self.plan.task)
        steps = csd.driver.traffic.steps[before:]
        return Turn(
            batch=number,
            method=contender.name,
            compression=c,
            samples=counts,
            groups=[sample.group for sample in samples],
            useful_bytes=sum(step.flash.useful_bytes for step in steps),
            fetched_bytes=sum(step.flash.fetched_bytes for step in steps),
            dense_bytes=sum(step.plain_offload_bytes for step in steps),
        )


def _force(prefilled: Prefilled, samples: list[Sample]) -> torch.Tensor:
    """Log-probabilities (B, steps, vocabulary) while the true tokens are forced; padding after shorter samples."""
    steps = max(len(sample.forced) for sample in samples)
    forced = torch.tensor([sample.forced + (0,) * (steps - len(sample.forced)) for sample in samples])
    seen: list[torch.Tensor] = []

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(torch.log_softmax(logits.cpu(), -1))
        return forced[:, step]

    prefilled.decode(steps, choose)
    return torch.stack(seen, 1)


def _likelihoods(
    logs: torch.Tensor, dense: torch.Tensor, samples: list[Sample], tokenizer: PreTrainedTokenizerBase
) -> list[Counts]:
    """Bits a byte, nats a token, and agreement with dense attention on the same text."""
    counts: list[Counts] = []
    for row, sample in enumerate(samples):
        n = len(sample.forced)
        mine, theirs, true = logs[row, :n], dense[row, :n], torch.tensor(sample.forced)
        nats = -float(mine.gather(1, true[:, None]).double().sum())
        size = len(tokenizer.decode(list(sample.forced)).encode())
        counts.append(
            {
                "bits_per_byte": (nats / math.log(2), size),
                "perplexity": (nats, n),
                "top1_agreement": (float((mine.argmax(-1) == theirs.argmax(-1)).sum()), n),
                "kl_to_dense": (float((theirs.exp() * (theirs - mine)).double().sum()), n),
            }
        )
    return counts


def _generate(prefilled: Prefilled, samples: list[Sample], tokenizer: PreTrainedTokenizerBase, task: str) -> list[str]:
    """Greedy text of each sample, until no score can change any more."""
    ids: list[list[int]] = [[] for _ in samples]
    texts = [""] * len(samples)

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor | None:
        best = logits.argmax(-1).cpu()
        for row, token in enumerate(best.tolist()):
            if step < samples[row].most and token != tokenizer.eos_token_id:
                ids[row].append(token)
                texts[row] = tokenizer.decode(ids[row], skip_special_tokens=True)
        over = (step + 1 >= s.most or TASKS[task].over(s, text) for s, text in zip(samples, texts, strict=True))
        return None if all(over) else best

    prefilled.decode(max(sample.steps for sample in samples), choose)
    return texts


def _scores(texts: list[str], samples: list[Sample], task: str) -> list[Counts]:
    score = TASKS[task].score
    assert score is not None
    figures = (score(sample, text) for sample, text in zip(samples, texts, strict=True))
    return [{name: (value, 1.0) for name, value in each.items()} for each in figures]


def _rows(done: list[Turn], contender: Contender, c: float, plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each figure, and for each group of samples where there are groups."""
    turns = [turn for turn in done if (turn.method, turn.compression) == (contender.name, c)]
    samples = [(counts, group) for turn in turns for counts, group in zip(turn.samples, turn.groups, strict=True)]
    dense = sum(turn.dense_bytes for turn in turns)
    for metric in samples[0][0]:
        for group in ["", *sorted({group for _, group in samples if group})]:
            pairs = np.array([counts[metric] for counts, mine in samples if group in ("", mine)])
            shape = math.exp if metric == "perplexity" else float
            value, low, high = map(shape, _interval(pairs, plan.seed))
            yield {
                "method": contender.name,
                "compression": c,
                "convention": plan.convention,
                "bytes_share": sum(turn.useful_bytes for turn in turns) / dense,
                "pages_share": sum(turn.fetched_bytes for turn in turns) / dense,
                "metric": f"{metric}, {group}" if group else metric,
                "value": value,
                "ci_low": low,
                "ci_high": high,
                "sample_values": [shape(ratio) for ratio in pairs[:, 0] / pairs[:, 1]],
            }


def _interval(pairs: np.ndarray[Any, Any], seed: int) -> tuple[float, float, float]:
    """The ratio of sums over samples, and its 95 % interval by the bootstrap."""
    draws = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    sums = pairs[draws].sum(1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    whole = pairs.sum(0)
    return float(whole[0] / whole[1]), float(low), float(high)


def _fingerprint(model: PreTrainedModel, plan: Plan) -> str:
    """Changes with the plan, the data, the model's weights and any of our sources."""
    digest = hashlib.sha256(repr((plan, model.config.to_dict(), INSTCSD_ZYNQ7045_8CH)).encode())
    folder = Path(model.config.name_or_path)
    for path in sorted(folder.glob("*.safetensors")) + [path for path in (plan.data, plan.own_methods) if path]:
        stat = path.stat()
        digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    root = Path(__file__).parents[2]
    for package in ("csd_spec", "csd_link", "ftl", "attention_engine", "csd_firmware", "host_driver", "vcsd", "eval"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def plot_accuracy(result: dict[str, Any], path: Path) -> None:
    """The task's first figure over the compression, with its interval, a line for each method."""
    figure, axes = new_figure()
    metric = result["rows"][0]["metric"]
    for name in dict.fromkeys(row["method"] for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["method"], row["metric"]) == (name, metric)]
        x = [row["compression"] for row in rows]
        y = [row["value"] for row in rows]
        if name == "dense":
            axes.axhline(y[0], color="black", linewidth=0.8, label=name)
            continue
        spread = [
            [v - row["ci_low"] for v, row in zip(y, rows, strict=True)],
            [row["ci_high"] - v for v, row in zip(y, rows, strict=True)],
        ]
        axes.errorbar(x, y, yerr=np.maximum(spread, 0), marker="o", markersize=3, capsize=2, linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel=f"compression ({result['rows'][0]['convention']})",
        ylabel=metric.replace("_", " "),
        title=f"{result['task']}, {result['samples']} samples",
    )
    axes.legend(fontsize=7)
    save_figure(figure, path)
