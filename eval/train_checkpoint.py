"""Train the shipped byte-level checkpoint: `python -m eval.train_checkpoint --out eval/checkpoint`.

A Llama-style decoder with grouped queries learns to continue documentation text, to copy a passage that it has
seen and to recall facts by key. Restartable: a killed run goes on from its last saved state and ends in the same
place, because batch number i draws its samples from (seed, i) alone.
"""

from __future__ import annotations

import csv
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import typer
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
    Stage(64, 1_000_000, copying=0.67, recall=0.00),
    Stage(128, 1_000_000, copying=0.67, recall=0.05),
    Stage(256, 1_500_000, copying=0.60, recall=0.10),
    Stage(512, 2_500_000, copying=0.40, recall=0.10),
    Stage(1024, 4_000_000, copying=0.25, recall=0.10),
    Stage(CONTEXT, 3_000_000, copying=0.20, recall=0.10),
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
    """A passage, then the same passage again from a random place in it; bytes before the repeat may be noise."""
    size = rng.randint(length // 4, length // 2)
    noise = rng.random() < 0.5
    passage = rng.randbytes(size) if noise else _passage(rng, corpus, size)
    head = _passage(rng, corpus, rng.randint(0, length - 2 * size) or 1)
    start = rng.randrange(size // 4 + 1)
    text = (head + passage + passage[start:] + _passage(rng, corpus, length))[:length]
    return text, len(head) + size if noise else 0


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


def main(
    out: Path = typer.Option(Path("eval/checkpoint"), help="folder of the checkpoint"),
    state: Path = typer.Option(Path("build/train_state.pt"), help="restart file, rewritten every 200 steps"),
    seed: int = 20261120,
    batch_tokens: int = 8192,
    peak_rate: float = 1.5e-3,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train, or go on training, and write the checkpoint with its loss curve."""
    corpus = load_corpus()
    model = new_model(seed).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95))
    steps = list(schedule(batch_tokens))
    first, curve = 0, []
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, curve = saved["step"], saved["curve"]
    state.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with Progress() as progress:
        bar = progress.add_task("training", total=len(steps), completed=first)
        for step in range(first, len(steps)):
            stage, rows = steps[step]
            ids, labels = batch(random.Random(f"{seed}/{step}"), corpus, stage, rows)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step / len(steps), peak_rate)
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.update(bar, completed=step + 1, description=f"length {stage.length}, loss {loss.item():.3f}")
            if step % 20 == 0:
                curve.append([step, stage.length, round(loss.item(), 4)])
                if not progress.console.is_terminal:
                    print(
                        f"{step}/{len(steps)} length {stage.length} loss {loss.item():.4f} {time.monotonic() - began:.0f}s",
                        flush=True,
                    )
            if step % 200 == 199:
                fresh = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "curve": curve,
                }
                torch.save(fresh, state.with_suffix(".new"))
                state.with_suffix(".new").replace(state)
    save_checkpoint(model, out)
    with (out / "loss_curve.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["step", "length", "loss"], *curve])


if __name__ == "__main__":
    typer.run(main)
