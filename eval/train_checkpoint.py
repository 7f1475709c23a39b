"""Train the shipped byte-level checkpoint: `python -m eval.train_checkpoint --out eval/checkpoint`.

A Llama-style decoder with grouped queries, whose attention begins as `eval/circuits.py` has it, learns to continue
documentation text, to copy passages that it has seen and to recall facts by key. Restartable: a killed run goes on from
its last saved state and ends in the same place, because batch number i draws its samples from (seed, i) alone.
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.circuits import THETA, write_circuits
from eval.corpus import load_corpus

IGNORED = -100  # transformers' label for "no loss here"
CONTEXT = 4096
LOST = 32  # bytes of a repeated piece from which on it can be known where it comes from


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the length curriculum: `tokens` are seen in sequences of `length`."""

    length: int
    tokens: int
    copying: float  # share of sequences that repeat a passage
    recall: float  # share of sequences of facts and questions
    held: bool = False  # what finds places is held as it began
    misspelt: float = 0.0  # share of copies that are of misspelt text


@dataclass(frozen=True, slots=True)
class Cycle:
    """Stages under one rise and fall of the rate. fast: names of the matrices that Muon trains at that rate.

    louder: what the bytes that layer 2 has found are multiplied by when the cycle begins.
    """

    stages: tuple[Stage, ...]
    peak_rate: float
    fast: re.Pattern[str]
    louder: float = 1.0


# Text alone bends the heads that find places to what short contexts need: a byte in five of a copy over 3700 is wrong
# then. So they are put back for the last third, in which the rest learns to read them. What is likely still drowns what
# was found in one byte of fifty. More copies and misspelt text do not unlearn that; making what was found louder does.
CYCLES = (
    Cycle(
        (
            Stage(512, 2_400_000, copying=0.40, recall=0.10),
            Stage(1024, 1_400_000, copying=0.45, recall=0.15),
            Stage(512, 672_000, copying=0.40, recall=0.15, held=True),
            Stage(1024, 410_000, copying=0.45, recall=0.15, held=True),
            Stage(2048, 369_000, copying=0.50, recall=0.20, held=True),
            Stage(CONTEXT, 246_000, copying=0.55, recall=0.25, held=True),
        ),
        2e-3,
        re.compile(r"layers\.(3\.self_attn|[23]\.mlp)\..*weight"),
    ),
    Cycle(
        (
            Stage(1024, 250_000, copying=0.75, recall=0.20, held=True),
            Stage(2048, 330_000, copying=0.75, recall=0.20, held=True),
            Stage(CONTEXT, 210_000, copying=0.75, recall=0.20, held=True),
        ),
        1e-3,
        re.compile(r"layers\.(2\.self_attn\.[vo]_proj|3\.self_attn|[23]\.mlp)\..*weight"),
    ),
    Cycle(
        (
            Stage(512, 500_000, copying=0.70, recall=0.15, held=True, misspelt=0.8),
            Stage(1024, 300_000, copying=0.70, recall=0.15, held=True, misspelt=0.8),
            Stage(CONTEXT, 123_000, copying=0.70, recall=0.20, held=True, misspelt=0.8),
        ),
        1.5e-3,
        re.compile(r"layers\.(2\.self_attn\.[vo]_proj|3\.self_attn|[23]\.mlp)\..*weight"),
    ),
    Cycle(
        (
            Stage(512, 400_000, copying=0.45, recall=0.15, held=True, misspelt=0.6),
            Stage(1024, 200_000, copying=0.45, recall=0.20, held=True, misspelt=0.6),
            Stage(CONTEXT, 62_000, copying=0.50, recall=0.25, held=True, misspelt=0.6),
        ),
        1.5e-3,
        re.compile(r"layers\.(3\.self_attn|[23]\.mlp)\..*weight"),
        louder=2.5,
    ),
    Cycle(
        (Stage(CONTEXT, 41_000, copying=0.50, recall=0.30, held=True, misspelt=0.6),),
        3e-4,
        re.compile(r"layers\.(3\.self_attn|[23]\.mlp)\..*weight"),
        louder=1.8,
    ),
)
FINDERS = re.compile(r"layers\.([01]\.self_attn|2\.self_attn\.[qk]_proj)")
HELD = re.compile(r"embed_tokens|layers\.([01]\.|2\.input_layernorm|2\.self_attn\.[qk]_proj)")


def new_model(seed: int) -> LlamaForCausalLM:
    """The model before training: 4 layers, width 256, 8 query heads on 4 KV heads of 64, tied embeddings."""
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
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    write_circuits(model, seed)
    return model


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


def _noise(rng: random.Random, corpus: bytes, length: int) -> bytes:
    """Random bytes of an alphabet of 2 to 256: the smaller it is, the more places look alike."""
    return bytes(rng.choices(rng.sample(range(256), int(2 ** rng.uniform(1, 8))), k=length))


def _words(rng: random.Random, corpus: bytes, length: int) -> bytes:
    """Some words of a passage in any order, over and over."""
    known = _passage(rng, corpus, 2000).split()
    words = rng.sample(known, min(len(known), int(2 ** rng.uniform(2, 6))))
    gap = rng.choice((b" ", b"\n", b", ", b": ", b"\n\n"))
    return b"".join(rng.choice(words) + (gap if rng.random() < 0.3 else b" ") for _ in range(length))[:length]


def _disguised(rng: random.Random, corpus: bytes, length: int) -> bytes:
    """A passage with its bytes exchanged: text in no language that could be learned."""
    return _passage(rng, corpus, length).translate(bytes(rng.sample(range(256), 256)))


def _misspelt(rng: random.Random, corpus: bytes, length: int) -> bytes:
    """A passage with some bytes in place of others: what is likely is often wrong here."""
    text, wrong = bytearray(_passage(rng, corpus, length)), rng.uniform(0.03, 0.25)
    for at in range(length):
        if rng.random() < wrong:
            text[at] = text[rng.randrange(length)]
    return bytes(text)


def _copying(rng: random.Random, corpus: bytes, length: int, misspelt: float) -> tuple[bytes, NDArray[np.bool_]]:
    """Something and then pieces from within it, to the end; a piece counts once it can be known."""
    kind = rng.choices((_noise, _words, _disguised, _passage), (0.35, 0.2, 0.2, 0.25))[0]
    if misspelt and rng.random() < misspelt:
        kind = _misspelt
    first = rng.randrange(length // 5, 7 * length // 10)
    text = kind(rng, corpus, first)
    counts = np.full(length, kind is _passage)
    while len(text) < length:
        start, size = rng.randrange(max(1, first - 64)), rng.randint(length // 8, length)
        counts[len(text) :] = True
        counts[len(text) : len(text) + LOST] = False
        text += text[start : min(start + size, first)]
    return text[:length], counts


_NOUNS = ("pass key", "key", "code", "number", "colour", "price", "address", "password", "answer", "name")


def _recall(rng: random.Random, corpus: bytes, length: int) -> tuple[bytes, NDArray[np.bool_]]:
    """Facts scattered in a passage, each asked for at the end."""
    count = rng.randint(1, max(1, min(6, length // 96)))
    noun, of = rng.choice(_NOUNS), rng.random() < 0.7 or count > 1
    facts = [(f" of N{name}" if of else "", f"{rng.randrange(100_000):05d}") for name in rng.sample(range(1000), count)]
    again = rng.choice((". ", ".\n", ". Remember that. ", f". It is the {noun}. "))
    told = [f" The {noun}{of} is {value}{again}".encode() for of, value in facts]
    asked = b"".join(
        f"\nWhat is the {noun}{of}? The {noun}{of} is {value}.".encode() for of, value in rng.sample(facts, count)
    )
    room = max(0, length - len(asked) - sum(map(len, told)))
    cuts = sorted(rng.randrange(room + 1) for _ in told)
    filler = _passage(rng, corpus, room + 1)
    parts = [filler[: cuts[0]]]
    for fact, start, end in zip(told, cuts, [*cuts[1:], room], strict=True):
        parts += [fact, filler[start:end]]
    return (b"".join(parts) + asked)[-length:], np.ones(length, bool)


def batch(rng: random.Random, corpus: bytes, stage: Stage, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, each (rows, length) int64; what cannot be known carries no loss."""
    ids = np.empty((rows, stage.length), np.int64)
    labels = np.empty_like(ids)
    for row in range(rows):
        draw = rng.random()
        counts = np.ones(stage.length, bool)
        if draw < stage.copying:
            text, counts = _copying(rng, corpus, stage.length, stage.misspelt)
        elif draw < stage.copying + stage.recall:
            text, counts = _recall(rng, corpus, stage.length)
        else:
            text = _passage(rng, corpus, stage.length)
        ids[row] = np.frombuffer(text, np.uint8)
        labels[row] = np.where(counts, ids[row], IGNORED)
    return torch.from_numpy(ids), torch.from_numpy(labels)


@dataclass(frozen=True, slots=True)
class Plan:
    """One optimiser step."""

    cycle: Cycle
    stage: Stage
    rows: int
    rate: float


def schedule(batch_tokens: int) -> Iterator[Plan]:
    """All steps of the training."""
    for cycle in CYCLES:
        steps = []
        for stage in cycle.stages:
            rows = max(1, batch_tokens // stage.length)
            steps += [(stage, rows)] * (stage.tokens // (rows * stage.length))
        for number, (stage, rows) in enumerate(steps):
            yield Plan(cycle, stage, rows, learning_rate(number / len(steps), cycle.peak_rate))


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
    """Muon for the matrices that read what was found; AdamW, at a small part of its rate, for all else.

    What comes before the place is found must stay clean, or long contexts find the wrong one.
    """

    GENTLE = 0.05

    def __init__(self, model: LlamaForCausalLM, fast: re.Pattern[str]) -> None:
        named = list(model.named_parameters())
        self.parts = [
            torch.optim.Muon(
                [weight for name, weight in named if fast.search(name)],
                weight_decay=0.0,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [weight for name, weight in named if not fast.search(name)], betas=(0.9, 0.98), weight_decay=0.0
            ),
        ]

    def step(self, rate: float) -> None:
        """Apply the gradients and forget them."""
        for part, share in zip(self.parts, (1, self.GENTLE), strict=True):
            for group in part.param_groups:
                group["lr"] = rate * share
            part.step()
            part.zero_grad(set_to_none=True)


class Run:
    """A training run that can be killed at any moment: its state goes to `path` every 100 steps."""

    def __init__(self, path: Path, seed: int, device: str) -> None:
        self.path, self.seed, self.device = path, seed, device
        self.model = new_model(seed).to(device)
        self.done, self.cycle = 0, CYCLES[0]
        self.curve: list[list[str | int | float]] = [["step", "length", "loss"]]
        saved = torch.load(path, map_location=device, weights_only=True) if path.exists() else None
        if saved:
            self.model.load_state_dict(saved["model"])
            self.done, self.cycle, self.curve = saved["done"], CYCLES[saved["cycle"]], saved["curve"]
        self.optimizer = Optimizer(self.model, self.cycle.fast)
        if saved:
            for part, state in zip(self.optimizer.parts, saved["optimizer"], strict=True):
                part.load_state_dict(state)

    def save(self) -> None:
        """Replace the state file in one move."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": [part.state_dict() for part in self.optimizer.parts],
            "cycle": CYCLES.index(self.cycle),
            "done": self.done,
            "curve": self.curve,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def hold(self) -> None:
        """Put the finders back as they began; keep them and all that comes before them from then on."""
        beginning = new_model(self.seed).state_dict()
        for name, weight in self.model.named_parameters():
            if FINDERS.search(name):
                weight.data.copy_(beginning[name])
            weight.requires_grad_(not HELD.search(name))

    def step(self, corpus: bytes, plan: Plan) -> float:
        """One optimiser step; returns its loss in nats a byte."""
        stage, rows = plan.stage, plan.rows
        if plan.cycle is not self.cycle:
            self.cycle, self.optimizer = plan.cycle, Optimizer(self.model, plan.cycle.fast)
            self.model.model.layers[2].self_attn.o_proj.weight.data.mul_(plan.cycle.louder)
        if stage.held and self.model.get_input_embeddings().weight.requires_grad:
            self.hold()
        ids, labels = batch(random.Random(f"{self.seed}/{self.done}"), corpus, stage, rows)
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(input_ids=ids.to(self.device), labels=labels.to(self.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(plan.rate)
        if self.done % 20 == 0:
            self.curve.append([self.done, stage.length, round(loss.item(), 4)])
        self.done += 1
        return float(loss.item())


def main(
    out: Annotated[Path, typer.Option(help="folder of the checkpoint")] = Path("eval/checkpoint"),
    state: Annotated[Path, typer.Option(help="restart file")] = Path("build/train_state.pt"),
    seed: int = 20261120,
    batch_tokens: int = 4096,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train, or go on training, and write the checkpoint with its loss curve."""
    corpus, run, steps = load_corpus(), Run(state, seed, device), list(schedule(batch_tokens))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=len(steps), completed=run.done)
        for plan in steps[run.done :]:
            loss = run.step(corpus, plan)
            progress.update(bar, completed=run.done, description=f"length {plan.stage.length}, loss {loss:.3f}")
            if run.done % 100 == 0:
                run.save()
    run.save()
    save_checkpoint(run.model, out)
    with (out / "loss_curve.csv").open("w", newline="") as file:
        csv.writer(file).writerows(run.curve)


if __name__ == "__main__":
    typer.run(main)
