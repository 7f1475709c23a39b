"""Train the shipped byte-level checkpoint: `python -m eval.train_checkpoint --out eval/checkpoint`.

A Llama-style decoder with grouped queries learns to continue documentation text, to copy a passage that it has
seen and to recall facts by key. Restartable: a killed run goes on from its last saved state and ends in the same
place, because batch number i draws its samples from (seed, i) alone.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.corpus import load_corpus

IGNORED = -100  # transformers' label for "no loss here"
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the length curriculum: `tokens` are seen in sequences of `length`."""

    length: int
    tokens: int
    copying: float  # share of sequences that repeat a passage
    recall: float  # share of sequences of facts and questions


# Copying heads form on short sequences first; started at full length they do not form in this budget.
CURRICULUM = (
    Stage(64, 2_000_000, copying=0.67, recall=0.00),
    Stage(128, 2_000_000, copying=0.67, recall=0.05),
    Stage(256, 2_500_000, copying=0.60, recall=0.10),
    Stage(512, 3_000_000, copying=0.50, recall=0.15),
    Stage(1024, 4_000_000, copying=0.40, recall=0.15),
    Stage(CONTEXT, 3_000_000, copying=0.30, recall=0.15),
)


def new_model(seed: int) -> LlamaForCausalLM:
    """The untrained model: 4 layers, width 256, 8 query heads on 4 KV heads of 64, tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ids are the bytes of the UTF-8 text."""
    shown = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    vocabulary = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    vocabulary |= {chr(256 + i): byte for i, byte in enumerate(rest)}  # GPT-2's byte alphabet
    assert set(vocabulary) == set(shown)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    pad = next(char for char, byte in vocabulary.items() if byte == 0)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, padding_side="left", model_max_length=CONTEXT)


def _passage(rng: random.Random, corpus: bytes, length: int) -> bytes:
    start = rng.randrange(len(corpus) - length)
    return corpus[start : start + length]


def _copying(rng: random.Random, corpus: bytes, length: int) -> tuple[bytes, int]:
    """Random bytes repeated to the end, or a passage told twice and then left behind."""
    if rng.random() < 0.6:
        period = int(2 ** rng.uniform(3, math.log2(length // 2)))
        return (rng.randbytes(period) * (length // period + 1))[:length], period
    passage = _passage(rng, corpus, rng.randint(length // 4, length // 2))
    return (passage + passage + _passage(rng, corpus, length))[:length], 0


def _recall(rng: random.Random, corpus: bytes, length: int) -> tuple[bytes, int]:
    """Facts scattered in a passage, each asked for at the end."""
    names = rng.sample(range(100, 1000), k=max(1, min(6, length // 96)))
    facts = [(f"N{name}", f"{rng.randrange(100_000):05d}") for name in names]
    told = [f" The pass key of {name} is {key}. ".encode() for name, key in facts]
    asked = b"".join(
        f" What is the pass key of {name}? The pass key of {name} is {key}.".encode()
        for name, key in rng.sample(facts, k=len(facts))
    )
    room = max(0, length - len(asked) - sum(map(len, told)))
    cuts = sorted(rng.randrange(room + 1) for _ in told)
    filler = _passage(rng, corpus, room + 1)
    parts = [filler[: cuts[0]]]
    for fact, start, end in zip(told, cuts, [*cuts[1:], room], strict=True):
        parts += [fact, filler[start:end]]
    return (b"".join(parts) + asked)[-length:], 0


def batch(rng: random.Random, corpus: bytes, stage: Stage, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, each (rows, length) int64; incompressible noise carries no loss."""
    ids = np.empty((rows, stage.length), np.int64)
    labels = np.empty_like(ids)
    for row in range(rows):
        draw = rng.random()
        if draw < stage.copying:
            text, silent = _copying(rng, corpus, stage.length)
        elif draw < stage.copying + stage.recall:
            text, silent = _recall(rng, corpus, stage.length)
        else:
            text, silent = _passage(rng, corpus, stage.length), 0
        ids[row] = labels[row] = np.frombuffer(text, np.uint8)
        labels[row, :silent] = IGNORED
    return torch.from_numpy(ids), torch.from_numpy(labels)


def schedule(batch_tokens: int) -> Iterator[tuple[Stage, int]]:
    """Each optimiser step's stage and number of rows."""
    for stage in CURRICULUM:
        rows = max(1, batch_tokens // stage.length)
        for _ in range(stage.tokens // (rows * stage.length)):
            yield stage, rows


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2 % of the steps, then a cosine down to 5 % of the peak."""
    if progress < 0.02:
        return peak * progress / 0.02
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98)))


def save_checkpoint(model: LlamaForCausalLM, out: Path) -> None:
    """Write weights (FP16), configuration and tokenizer where `from_pretrained` finds them."""
    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.save_pretrained(out)
    byte_tokenizer().save_pretrained(out)


class Optimizer:
    """Muon for the hidden matrices, AdamW for embeddings and norms, at one rate."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        named = list(model.named_parameters())
        hidden = [weight for name, weight in named if weight.dim() > 1 and "embed" not in name]
        others = [weight for name, weight in named if weight.dim() == 1 or "embed" in name]
        self.parts = [
            torch.optim.Muon(hidden, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, rate: float) -> None:
        """Apply the gradients and forget them."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)


class Run:
    """A training run that can be killed at any moment: its state goes to `path` every 200 steps."""

    def __init__(self, path: Path, seed: int, device: str) -> None:
        self.path, self.seed, self.device = path, seed, device
        self.model = new_model(seed).to(device)
        self.optimizer = Optimizer(self.model)
        self.done = 0
        self.curve: list[list[str | int | float]] = [["step", "length", "loss"]]
        if path.exists():
            saved = torch.load(path, map_location=device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for part, state in zip(self.optimizer.parts, saved["optimizer"], strict=True):
                part.load_state_dict(state)
            self.done, self.curve = saved["done"], saved["curve"]

    def save(self) -> None:
        """Replace the state file in one move."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": [part.state_dict() for part in self.optimizer.parts],
            "done": self.done,
            "curve": self.curve,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def step(self, corpus: bytes, stage: Stage, rows: int, rate: float) -> float:
        """One optimiser step; returns its loss in nats a byte."""
        ids, labels = batch(random.Random(f"{self.seed}/{self.done}"), corpus, stage, rows)
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(input_ids=ids.to(self.device), labels=labels.to(self.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(rate)
        if self.done % 20 == 0:
            self.curve.append([self.done, stage.length, round(loss.item(), 4)])
        self.done += 1
        return float(loss)


def main(
    out: Annotated[Path, typer.Option(help="folder of the checkpoint")] = Path("eval/checkpoint"),
    state: Annotated[Path, typer.Option(help="restart file")] = Path("build/train_state.pt"),
    seed: int = 20261120,
    batch_tokens: int = 4096,
    peak_rate: float = 2e-3,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train, or go on training, and write the checkpoint with its loss curve."""
    corpus, run, steps = load_corpus(), Run(state, seed, device), list(schedule(batch_tokens))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=len(steps), completed=run.done)
        for stage, rows in steps[run.done :]:
            loss = run.step(corpus, stage, rows, learning_rate(run.done / len(steps), peak_rate))
            progress.update(bar, completed=run.done, description=f"length {stage.length}, loss {loss:.3f}")
            if run.done % 200 == 0:
                run.save()
    save_checkpoint(run.model, out)
    with (out / "loss_curve.csv").open("w", newline="") as file:
        csv.writer(file).writerows(run.curve)


if __name__ == "__main__":
    typer.run(main)
