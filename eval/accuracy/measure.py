"""How well a model does its tasks when its decode attention runs in drives, by method and compression.

A batch of samples is prefilled once, all but the last token of each prompt. Then every method decodes from there
in turn and is cropped away again, so what is compared differs in nothing but the method. Every answer's first token
is the method's too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import vcsd
from csd_spec import Compression
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.accuracy.contenders import Contender
from eval.accuracy.plan import Counts, Journal, Plan, Turn
from eval.accuracy.prefilled import Prefilled
from eval.accuracy.tasks import TASKS, Room, Sample
from vcsd.progress import Tick, no_tick

BATCH = 8  # samples that are decoded together
RESAMPLES = 2000  # of the bootstrap


@torch.inference_mode()
def measure_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    progress_dir: Path | None = None,
    tick: Tick = no_tick,
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
        subject.measure(number, samples[first : first + BATCH], journal, tick)
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
        csd.use(contender.method, contender.own or Compression(c, self.plan.convention))
        total = csd.driver.traffic.total
        before = replace(total)
        if dense is not None:
            counts = _likelihoods(_force(prefilled, samples), dense, samples, self.tokenizer)
        else:
            counts = _scores(_generate(prefilled, samples, self.tokenizer, self.plan.task), samples, self.plan.task)
        return Turn(
            batch=number,
            method=contender.name,
            compression=c,
            samples=counts,
            groups=[sample.group for sample in samples],
            useful_bytes=total.flash.useful_bytes - before.flash.useful_bytes,
            fetched_bytes=total.flash.fetched_bytes - before.flash.fetched_bytes,
            dense_bytes=total.plain_offload_bytes - before.plain_offload_bytes,
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
            if step < samples[row].max_tokens and token != tokenizer.eos_token_id:
                ids[row].append(token)
                texts[row] = tokenizer.decode(ids[row], skip_special_tokens=True)
        over = (step + 1 >= s.max_tokens or TASKS[task].over(s, text) for s, text in zip(samples, texts, strict=True))
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
                "convention": contender.own.convention if contender.own else plan.convention,
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
