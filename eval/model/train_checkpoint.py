"""Train the shipped byte-level checkpoint: `python -m vcsd_eval.model.train_checkpoint --out vcsd/shipped/checkpoint`.

A Llama-style decoder with grouped queries, whose attention begins as `eval/model/circuits.py` has it, learns to
continue documentation text, to copy passages that it has seen and to recall facts by key. Restartable: a killed run
goes on from its last saved state and ends in the same place, because batch number i draws its samples from (seed, i)
alone.
"""

from __future__ import annotations

import csv
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from csd_spec.arrays import F32
from vcsd_eval.model.circuits import THETA, WIDTH, make_louder, write_circuits
from vcsd_eval.model.corpus import load_corpus

CONTEXT = 4096
MATCH, TRUST = 16, 20  # bytes that identify a position; loss weight of the byte predicted by a match
LOST = 32  # bytes of a repeated piece from which on it can be known where it comes from


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the length curriculum: `tokens` are seen in sequences of `length`."""

    length: int
    tokens: int
    copying: float  # share of sequences that repeat a passage
    recall: float  # share of sequences of facts and questions


STAGES = (
    Stage(512, 1_200_000, copying=0.40, recall=0.20),
    Stage(1024, 700_000, copying=0.45, recall=0.25),
    Stage(2048, 400_000, copying=0.50, recall=0.30),
    Stage(CONTEXT, 1_200_000, copying=0.50, recall=0.35),
)
PEAK_RATE = 2e-3
# Training on text alone adapts the matching heads to short contexts: one byte in five of a copy over 3700 is then
# wrong. So these heads, and the layers before them, keep their initial weights.
HELD = re.compile(r"embed_tokens|layers\.([01]\.|2\.(input_layernorm|self_attn))")
MATRICES = re.compile(r"(layers\.3\.self_attn|mlp)\..*weight")  # that Muon trains


def new_model(seed: int) -> LlamaForCausalLM:
    """Model before training: 4 layers, width 288, 8 query and 4 KV heads of 64. Frozen weights have no gradient."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    write_circuits(model, seed)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not HELD.search(name))
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
    """A passage with some bytes replaced: the most likely byte is often wrong here."""
    text, wrong = bytearray(_passage(rng, corpus, length)), rng.uniform(0.03, 0.25)
    for at in range(length):
        if rng.random() < wrong:
            text[at] = text[rng.randrange(length)]
    return bytes(text)


def _copying(rng: random.Random, corpus: bytes, length: int) -> tuple[bytes, NDArray[np.bool_]]:
    """Something and then pieces from within it, to the end; a piece counts once it can be known."""
    kind = rng.choices((_noise, _words, _disguised, _misspelt, _passage), (0.15, 0.1, 0.15, 0.45, 0.15))[0]
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


def _recall(rng: random.Random, corpus: bytes, length: int) -> bytes:
    """Facts scattered in a passage, each asked for at the end."""
    count = rng.randint(1, max(1, min(6, length // 96)))
    noun, of = rng.choice(_NOUNS), rng.random() < 0.7 or count > 1
    facts = [(f" of N{name}" if of else "", f"{rng.randrange(100_000):05d}") for name in rng.sample(range(1000), count)]
    again = rng.choice((". ", ".\n", ". Remember that. ", f". It is the {noun}. "))
    told = [f" The {noun}{of} is {value}{again}".encode() for of, value in facts]
    questions = b"".join(
        f"\nWhat is the {noun}{of}? The {noun}{of} is {value}.".encode() for of, value in rng.sample(facts, count)
    )
    room = max(0, length - len(questions) - sum(map(len, told)))
    cuts = sorted(rng.randrange(room + 1) for _ in told)
    filler = _passage(rng, corpus, room + 1)
    parts = [filler[: cuts[0]]]
    for fact, start, end in zip(told, cuts, [*cuts[1:], room], strict=True):
        parts += [fact, filler[start:end]]
    return (b"".join(parts) + questions)[-length:]


def _weights(text: bytes) -> F32:
    """Loss weight of each byte: TRUST if the MATCH bytes before it occurred earlier and predict it.

    Zero if they predict another byte: learning that would reduce the confidence in copies.
    """
    followed: dict[bytes, set[int]] = {}
    weights = np.ones(len(text), np.float32)
    for at in range(MATCH, len(text)):
        seen = followed.setdefault(text[at - MATCH : at], set())
        if seen:
            weights[at] = TRUST if text[at] in seen else 0
        seen.add(text[at])
    return weights


def batch(rng: random.Random, corpus: bytes, stage: Stage, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (rows, length) int64, and their loss weights, float32: zero for unpredictable tokens."""
    ids = np.empty((rows, stage.length), np.int64)
    weights = np.empty((rows, stage.length), np.float32)
    for row in range(rows):
        draw = rng.random()
        counts = np.ones(stage.length, bool)
        if draw < stage.copying:
            text, counts = _copying(rng, corpus, stage.length)
        elif draw < stage.copying + stage.recall:
            text = _recall(rng, corpus, stage.length)
        else:
            text = _passage(rng, corpus, stage.length)
        ids[row] = np.frombuffer(text, np.uint8)
        weights[row] = _weights(text) * counts
    return torch.from_numpy(ids), torch.from_numpy(weights)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimiser step."""

    stage: Stage
    rows: int
    rate: float


def schedule(batch_tokens: int) -> list[OptimizerStep]:
    """All steps of the training."""
    steps = []
    for stage in STAGES:
        rows = max(1, batch_tokens // stage.length)
        steps += [(stage, rows)] * (stage.tokens // (rows * stage.length))
    return [
        OptimizerStep(stage, rows, learning_rate(number / len(steps), PEAK_RATE))
        for number, (stage, rows) in enumerate(steps)
    ]


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
    """Muon for the matrices that read what was found; AdamW, at a part of its rate, for the rest that is not held."""

    GENTLE = 0.25

    def __init__(self, model: LlamaForCausalLM) -> None:
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.parts = [
            torch.optim.Muon(
                [weight for name, weight in named if MATRICES.search(name)],
                weight_decay=0.0,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [weight for name, weight in named if not MATRICES.search(name)], betas=(0.9, 0.98), weight_decay=0.0
            ),
        ]

    def step(self, rate: float) -> None:
        """Apply the gradients and forget them."""
        for part, share in zip(self.parts, (1, self.GENTLE), strict=True):
            for group in part.param_groups:
                group["lr"] = rate * share
            part.step()
            part.zero_grad(set_to_none=True)


class TrainingRun:
    """A training run that can be killed at any moment: its state goes to `path` every 100 steps."""

    def __init__(self, path: Path, seed: int, device: str) -> None:
        self.path, self.seed, self.device = path, seed, device
        self.model = new_model(seed).to(device)
        self.done = 0
        self.curve: list[list[str | int | float]] = [["step", "length", "loss"]]
        self.optimizer = Optimizer(self.model)
        if path.exists():
            saved = torch.load(path, map_location=device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.done, self.curve = saved["done"], saved["curve"]
            for part, state in zip(self.optimizer.parts, saved["optimizer"], strict=True):
                part.load_state_dict(state)

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

    def step(self, corpus: bytes, plan: OptimizerStep) -> float:
        """One optimiser step; returns its weighted loss in nats a byte."""
        ids, weights = batch(random.Random(f"{self.seed}/{self.done}"), corpus, plan.stage, plan.rows)
        ids, weights = ids.to(self.device), weights.to(self.device)[:, 1:].flatten()
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
        losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        loss = (losses @ weights) / weights.sum().clamp(min=1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(plan.rate)
        if self.done % 20 == 0:
            self.curve.append([self.done, plan.stage.length, round(loss.item(), 4)])
        self.done += 1
        return float(loss.item())


def main(
    out: Annotated[Path, typer.Option(help="output folder of the checkpoint")] = Path("vcsd/shipped/checkpoint"),
    state: Annotated[Path, typer.Option(help="file for the state of an interrupted training")] = Path(
        "build/train_state.pt"
    ),
    seed: int = 7,
    batch_tokens: int = 4096,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train, or go on training, and write the checkpoint with its loss curve."""
    corpus, run, steps = load_corpus(), TrainingRun(state, seed, device), schedule(batch_tokens)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=len(steps), completed=run.done)
        for plan in steps[run.done :]:
            loss = run.step(corpus, plan)
            progress.update(bar, completed=run.done, description=f"length {plan.stage.length}, loss {loss:.3f}")
            if run.done % 100 == 0:
                run.save()
    run.save()
    make_louder(run.model)
    save_checkpoint(run.model, out)
    with (out / "loss_curve.csv").open("w", newline="") as file:
        csv.writer(file).writerows(run.curve)


if __name__ == "__main__":
    typer.run(main)
