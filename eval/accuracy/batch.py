"""One batch of samples at its task: the true tokens forced, or text generated, by one method after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import vcsd
from csd_spec import CompressionBudget
from vcsd_eval.accuracy.compared_methods import Trial
from vcsd_eval.accuracy.plan import DENSE, Counts, Turn
from vcsd_eval.accuracy.prefilled import HostPrefill, Prefilled
from vcsd_eval.accuracy.rows import REFERENCE
from vcsd_eval.accuracy.tasks import Sample, Task


class BatchRun:
    """Samples that are prefilled once, and decoded by each trial in the drives of its storage format."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, samples: Sequence[Sample]
    ) -> None:
        self.model, self.tokenizer, self.task, self.samples = model, tokenizer, task, samples
        self.host = HostPrefill(model, [sample.prompt for sample in samples])
        self.reference = [self._reference(row) for row in range(len(samples))] if self.forces else []
        self._dense: torch.Tensor | None = None  # log-probabilities by dense attention, (B, steps, vocabulary)

    @property
    def forces(self) -> bool:
        """Whether the true tokens are forced, and not a text generated."""
        return self.task.score is None

    @contextmanager
    def in_drives(self, drives: int, layout: str, methods: Path | None) -> Iterator[tuple[vcsd.Session, Prefilled]]:
        """The prompts in new drives of a layout until the block ends."""
        how: Any = {"method": DENSE, "methods_file": methods}
        with vcsd.attach(self.model, drives=drives, layout=layout, **how) as csd:
            yield csd, self.host.in_drives(csd)

    def turn(self, number: int, trial: Trial, csd: vcsd.Session, prefilled: Prefilled) -> Turn:
        """Decode every sample by one trial; number: of the batch."""
        if self.forces and self._dense is None and not trial.is_dense:  # its turn was done by a run that was killed
            csd.set_method(DENSE, CompressionBudget(1))
            self._dense = _forced(prefilled, self.samples)
        csd.set_method(trial.contender.method, trial.budget)
        total = csd.driver.traffic.total
        before = replace(total)
        if not self.forces:
            counts = self._scores(prefilled)
        elif trial.is_dense:
            self._dense = _forced(prefilled, self.samples)
            counts = self._likelihoods(_Replayed(self._dense))
            counts = [each | {REFERENCE: result} for each, result in zip(counts, self.reference, strict=True)]
        else:
            counts = self._likelihoods(prefilled)
        return Turn(
            batch=number,
            method=trial.contender.name,
            compression=trial.c,
            convention=trial.convention,
            samples=counts,
            groups=[sample.group for sample in self.samples],
            useful_bytes=total.flash.useful_bytes - before.flash.useful_bytes,
            fetched_bytes=total.flash.fetched_bytes - before.flash.fetched_bytes,
            dense_bytes=total.plain_offload_bytes - before.plain_offload_bytes,
        )

    def _reference(self, row: int) -> tuple[float, float]:
        """Bits and bytes of a sample's true text by plain transformers."""
        true = self.samples[row].forced
        logs = self.host.force(row, true).cpu()
        nats = -float(logs.gather(1, torch.tensor(true)[:, None]).double().sum())
        return nats / math.log(2), self._size(self.samples[row])

    def _size(self, sample: Sample) -> int:
        """Bytes of a sample's true text."""
        return len(self.tokenizer.decode(list(sample.forced)).encode())

    def _likelihoods(self, prefilled: Prefilled | _Replayed) -> list[Counts]:
        """Bits a byte, nats a token, and agreement with dense attention on the same text."""
        assert self._dense is not None
        counts: list[Counts] = []
        sums = _compared(prefilled, self.samples, self._dense)
        for sample, (nats, agreeing, divergence) in zip(self.samples, sums.tolist(), strict=True):
            n = len(sample.forced)
            counts.append(
                {
                    "bits_per_byte": (nats / math.log(2), self._size(sample)),
                    "perplexity": (nats, n),
                    "top1_agreement": (agreeing, n),
                    "kl_to_dense": (divergence, n),
                }
            )
        return counts

    def _scores(self, prefilled: Prefilled) -> list[Counts]:
        assert self.task.score is not None
        texts = _generated(prefilled, self.samples, self.tokenizer, self.task)
        figures = (self.task.score(sample, text) for sample, text in zip(self.samples, texts, strict=True))
        return [{name: (value, 1.0) for name, value in each.items()} for each in figures]


class _Replayed:
    """Log-probabilities (B, steps, vocabulary) of a decode that was done."""

    def __init__(self, logs: torch.Tensor) -> None:
        self.logs = logs

    def decode(self, steps: int, choose: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
        """Give each step's as `Prefilled.decode` does."""
        for step in range(steps):
            choose(step, self.logs[:, step])


def _true(samples: Sequence[Sample]) -> torch.Tensor:
    """True tokens (B, steps), padded after shorter samples."""
    steps = max(len(sample.forced) for sample in samples)
    return torch.tensor([sample.forced + (0,) * (steps - len(sample.forced)) for sample in samples])


def _forced(prefilled: Prefilled, samples: Sequence[Sample]) -> torch.Tensor:
    """Log-probabilities (B, steps, vocabulary) while the true tokens are forced."""
    true, seen = _true(samples), list[torch.Tensor]()

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(torch.log_softmax(logits.cpu(), -1))
        return true[:, step]

    prefilled.decode(true.shape[1], choose)
    return torch.stack(seen, 1)


def _compared(prefilled: Prefilled | _Replayed, samples: Sequence[Sample], dense: torch.Tensor) -> torch.Tensor:
    """Nats, tokens whose most likely one is dense attention's, and KL divergence to it: sums (B, 3), float64."""
    true, sums = _true(samples), torch.zeros(len(samples), 3, dtype=torch.float64)
    lengths = torch.tensor([len(sample.forced) for sample in samples])

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
        mine = logits if isinstance(prefilled, _Replayed) else torch.log_softmax(logits.cpu(), -1)
        theirs = dense[:, step]
        nats = -mine.gather(1, true[:, step : step + 1])[:, 0]
        agreeing = mine.argmax(-1) == theirs.argmax(-1)
        divergence = (theirs.exp() * (theirs - mine)).double().sum(-1)
        result = torch.stack([nats.double(), agreeing.double(), divergence], 1)
        sums.add_(torch.where((step < lengths)[:, None], result, 0))
        return true[:, step]

    prefilled.decode(true.shape[1], choose)
    return sums


def _generated(
    prefilled: Prefilled, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, task: Task
) -> list[str]:
    """Greedy text of each sample up to its end-of-text token; ends early if no score can change any longer."""
    ids: list[list[int]] = [[] for _ in samples]
    texts, ended = [""] * len(samples), [False] * len(samples)

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor | None:
        best = logits.argmax(-1).cpu()
        for row, token in enumerate(best.tolist()):
            ended[row] |= step >= samples[row].max_tokens or token == tokenizer.eos_token_id
            if not ended[row]:
                ids[row].append(token)
                texts[row] = tokenizer.decode(ids[row], skip_special_tokens=True)
                ended[row] = step + 1 == samples[row].max_tokens or task.over(samples[row], texts[row])
        return None if all(ended) else best

    prefilled.decode(max(sample.steps for sample in samples), choose)
    return texts
