"""What each method fetches and how far its output is from dense attention, on recorded q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_engine import METHODS, EngineClock, Memory, Method, Methods, Queries, Read, Step, load_methods
from csd_firmware.schedule import SCHEDULES, Units
from csd_firmware.stopwatch import Stopwatch
from csd_spec import NAMED, Compression
from csd_spec.arrays import F16, F32, F64, I64
from csd_spec.planes import number_of
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.accuracy.recorded import TEXT, Recorded, record
from eval.experiment import Outcome
from eval.options import Picture, TextFile, check_picture, numbers
from eval.plot import new_figure, save_figure
from ftl import LAYOUTS, Ftl
from vcsd.loading import CHECKPOINT, load
from vcsd.options import MethodsFile, ModelFolder
from vcsd.progress import Tick, no_tick, progress, status
from vcsd.tables import table

WINDOW = 256  # tokens among which pages are shared out
TOLERANCE = 1.02  # of a budget: channels and tokens are whole
DENSE = ("dense", "kivi", "kivi-2")  # attend to everything, whatever the budget
IDEAL = ("sparq", "sparq-logits", "top-k-oracle")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """A method on a drive.

    bits: of the embedding-indexed copy of K. cache_share: drive DRAM for hot pages, as a share of all of that copy.
    similar: tokens of the prompt that are alike share pages. dense: heeds no budget, so one row says all.
    ideal: what no drive does; it fetches bytes without their pages, knows logits, or moves tokens, for nothing.
    own: the only budget that it is tried at.
    """

    name: str
    method: str
    bits: int = 16
    cache_share: float = 0
    similar: bool = False
    dense: bool = False
    ideal: bool = False
    own: Compression | None = None

    def budgets(self, compressions: Sequence[float]) -> Sequence[float]:
        """Those of some budgets 1/c at which it is worth a try."""
        return [self.own.c] if self.own else [1.0] if self.dense else compressions


def _named(name: str) -> Contender:
    """What is known by a name as a whole: layout, method and budget."""
    what = NAMED[name]
    assert isinstance(what.budget, Compression)
    return Contender(name, what.method, what.embedding_bits, own=what.budget)


OURS = (
    _named("ours"),
    Contender("ours-int8", "spending", 8),
    Contender("ours-int4", "spending", 4),
    Contender("ours-pages", "paged"),
    Contender("ours-similar", "sparf", similar=True, ideal=True),
    Contender("ours-cache", "sparf", cache_share=0.25),
    Contender("ours-pages-top-p", "paged-top-p"),
    Contender("ours-int8-pages", "paged", 8),
    Contender("ours-int4-pages", "paged", 4),
    Contender("ours-int4-pages-top-p", "paged-top-p", 4),
    Contender("ours-int4-pages-similar", "paged", 4, similar=True, ideal=True),
    *(Contender(f"ours-planes{bits}", "progressive", number_of(bits, exact=False)) for bits in (2, 3, 4)),
    Contender("ours-planes2-top-p", "progressive-top-p", number_of(2, exact=False)),
    Contender("dense-8-bits", "dense", number_of(2, exact=False), dense=True),
)


def contenders(methods: Methods = METHODS) -> list[Contender]:
    """Every method as it is known, and ours by the options that they combine."""
    mine = {contender.method for contender in OURS} - {"sparf", "dense"}
    theirs = [name for name in methods if name not in mine]
    return [*(Contender(name, name, dense=name in DENSE, ideal=name in IDEAL) for name in theirs), *OURS]


def trials(known: list[Contender], compressions: list[float]) -> list[tuple[Contender, float]]:
    """Every contender at every budget 1/c; those that heed none once, at 1, and those with one of their own at that."""
    return [(each, c) for each in known for c in each.budgets(compressions)]


@dataclass(frozen=True, slots=True)
class Passages:
    """What is recorded of a text."""

    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="prompt length")] = 1536
    steps: Annotated[int, typer.Option(min=1, max=1 << 17, help="decode steps")] = 8
    sequences: Annotated[int, typer.Option(min=1, max=1024, help="passages of the text")] = 4


@dataclass(slots=True)
class Tally:
    """Sums over steps, layers, sequences and heads."""

    errors: list[F64] = field(default_factory=list)
    recalls: list[F64] = field(default_factory=list)
    fetched: int = 0
    useful: int = 0
    dense: int = 0
    ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SCHEDULES, 0))


class Layer:
    """What is decoded of one layer: recorded behind a prompt of `tokens` tokens."""

    def __init__(self, recorded: Recorded, tokens: int) -> None:
        self.recorded, self.tokens, self.gathered = recorded, tokens, _gathered(recorded, tokens)
        self.steps = recorded.q.shape[2] - tokens
        self._placed: Recorded | None = None

    def placed(self, n: int) -> Recorded:
        """The same with tokens that are alike in the same page of n."""
        self._placed = self._placed or _placed(self.recorded, self.tokens, n)
        return self._placed


def record_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, passages: Passages
) -> list[Layer]:
    """All layers of passages that begin at equal distances in the text."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    tokens, sequences = passages.tokens, passages.sequences
    length = tokens + passages.steps
    if ids.numel() < length + sequences:
        raise ValueError(f"the text has {ids.numel()} tokens: at least {length + sequences} are needed")
    context = model.config.get_text_config(decoder=True).max_position_embeddings
    if length > context:
        raise ValueError(f"tokens + steps = {length}: the model's context is {context}")
    starts = np.linspace(0, ids.numel() - length, sequences).astype(int)
    recorded = record(model, torch.stack([ids[start : start + length] for start in starts]))
    return [Layer(each, tokens) for each in recorded]


def gaussian(layers: list[Layer], seed: int = 0) -> list[Layer]:
    """Layers of the same shapes whose q, k and v are standard normal: no token matters much more than another."""
    draw = np.random.default_rng(seed).standard_normal
    made = []
    for layer in layers:
        q, k, v = (
            draw(part.shape, np.float32).astype(np.float16)
            for part in (layer.recorded.q, layer.recorded.k, layer.recorded.v)
        )
        made.append(Layer(Recorded(q, k, v), layer.tokens))
    return made


def bench_selectors(
    layers: list[Layer], compressions: list[float], tick: Tick = no_tick, methods: Methods = METHODS
) -> dict[str, Any]:
    """Every method at every budget 1/c (`bytes` convention) on the decode steps of some layers; columns: `measured`.

    Rows of methods that use more than their budget, since scoring alone costs more or every query head fetches for
    itself, are set apart.
    """
    pairs = trials(contenders(methods), compressions)
    rows: list[Row] = []
    left_out: list[Row] = []
    for contender, c in pairs:
        row = measured(contender, c, layers, methods, tick)
        (rows if row["bytes_useful_share"] <= TOLERANCE * row["budget"] else left_out).append(row)
    return {
        "tokens": layers[0].tokens,
        "steps": layers[0].steps,
        "sequences": len(layers[0].recorded.q),
        "layers": len(layers),
        "methods": rows,
        "beyond_budget": left_out,
    }


def measured(contender: Contender, c: float, layers: list[Layer], methods: Methods, tick: Tick = no_tick) -> Row:
    """A contender at a budget 1/c on layers of the same passages.

    output_rel_error: |out - dense| / |dense| of a query head, the mean over all; mass_recall: softmax weight of the
    attended tokens, the mean; shares are of the bytes of all rows of K and V; times are modelled, of a layer's step on
    one drive that holds all sequences. The budget of what heeds none is what it uses.
    """
    tally = Tally()
    for layer in layers:
        _run(contender, methods[contender.method], c, layer, tally)
        tick(None)
    count = sum(layer.steps for layer in layers)
    useful = tally.useful / tally.dense
    return {
        "name": contender.name,
        "budget": useful if contender.dense else 1 / c,
        "bytes_fetched_share": tally.fetched / tally.dense,
        "bytes_useful_share": useful,
        "output_rel_error": float(np.mean(tally.errors)),
        "mass_recall": float(np.mean(tally.recalls)),
        **{f"{name}_us": ns / count / 1e3 for name, ns in tally.ns.items()},
    }


def _run(contender: Contender, method: Method, c: float, layer: Layer, tally: Tally) -> None:
    """Decode one layer of all sequences in a drive, behind its prompt."""
    recorded, tokens = layer.recorded, layer.tokens
    B, Hq, length, d = recorded.q.shape
    H = recorded.k.shape[1]
    copy_bytes = B * H * length * d * contender.bits // 8
    ftl = Ftl(replace(INSTCSD_ZYNQ7045_8CH, cache_bytes=int(contender.cache_share * copy_bytes)))
    units = Units(ftl, EngineClock(ftl.spec.engine))
    layout = LAYOUTS[contender.bits].form(ftl.spec.geometry.page_bytes, d, length)
    handles = ftl.create(B, 1, H, layout)
    memory: list[Memory] = [{"h2o": weights} for weights in layer.gathered]
    if contender.similar:
        recorded = layer.placed(layout.n)
    k, v = (part.transpose(0, 2, 1, 3) for part in (recorded.k, recorded.v))
    _append(ftl, handles, k[:, :tokens], v[:, :tokens])
    for position in range(tokens, length):
        _append(ftl, handles, k[:, position : position + 1], v[:, position : position + 1])
        stored = position + 1
        params = Compression(c, "bytes").at(stored, d)
        q = recorded.q[:, :, position].astype(np.float32).reshape(B * H, Hq // H, d)
        v_mean = recorded.v[:, :, :stored].astype(np.float32).mean(2).reshape(B * H, d)
        step = Step(ftl.view(handles, 0), ftl, Queries.alike(q, params, v_mean, memory))
        _count(tally, step, method(step), recorded, stored)
        for name, schedule in SCHEDULES.items():
            watch = Stopwatch(ftl.timing.idle_ns())
            schedule(step.work, units, watch)
            tally.ns[name] += sum(watch.breakdown_ns.values())


def _gathered(recorded: Recorded, tokens: int) -> F32:
    """Attention weight (B, H, tokens) that each token of the prompt has got from the prompt's queries."""
    (B, _, _, d), H = recorded.q.shape, recorded.k.shape[1]
    q, k = (torch.from_numpy(part[:, :, :tokens]).float() for part in (recorded.q, recorded.k))
    logits = q.reshape(B, H, -1, tokens, d) @ k[:, :, None].transpose(-1, -2) / d**0.5
    logits += torch.full((tokens, tokens), float("-inf")).triu(1)
    return torch.softmax(logits, -1).sum((2, 3)).numpy()


def _placed(recorded: Recorded, tokens: int, n: int) -> Recorded:
    """The same with each head's K and V of the prompt in another order: in every WINDOW, tokens whose K are alike share
    a page. The last WINDOW stays, so that recent tokens are the last ones."""
    k, v = recorded.k.copy(), recorded.v.copy()
    for start in range(0, (tokens // WINDOW - 1) * WINDOW, WINDOW):
        part = slice(start, start + WINDOW)
        for b, h in np.ndindex(k.shape[:2]):
            order = start + _alike(k[b, h, part].astype(np.float32), n)
            k[b, h, part], v[b, h, part] = recorded.k[b, h, order], recorded.v[b, h, order]
    return Recorded(recorded.q, k, v)


def _alike(rows: F32, n: int) -> I64:
    """An order of rows (t, d) in which those of a run of n are alike: halves along the widest direction, again and
    again."""
    if len(rows) <= n:
        return np.arange(len(rows))
    _, _, directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    order = np.argsort(rows @ directions[0], kind="stable")
    half = -(-len(rows) // (2 * n)) * n
    return np.concatenate([part[_alike(rows[part], n)] for part in (order[:half], order[half:])])


def _append(ftl: Ftl, handles: list[int], k: F16, v: F16) -> None:
    """Append rows (B, t, H, d) to every sequence."""
    lengths = np.full(len(handles), k.shape[1])
    flat_k, flat_v = (np.ascontiguousarray(part).reshape(-1, *part.shape[2:]) for part in (k, v))
    ftl.append(handles, 0, lengths, flat_k, flat_v, ftl.timing.idle_ns())


def _count(tally: Tally, step: Step, out: F32, recorded: Recorded, stored: int) -> None:
    shape = step.streams, stored, step.head_dim
    K, V = (part[:, :, :stored].astype(np.float64).reshape(shape) for part in (recorded.k, recorded.v))
    logits = step.q @ K.transpose(0, 2, 1) / np.sqrt(step.head_dim)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights @ V
    tally.errors.append(np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
    assert step.chosen is not None
    tokens, counts = step.chosen
    weights = weights.reshape(len(counts), -1, stored)  # a query head may have chosen for itself
    used = np.arange(tokens.shape[1]) < counts[:, None]
    kept = np.take_along_axis(weights, np.broadcast_to(tokens[:, None], (*weights.shape[:2], tokens.shape[1])), 2)
    tally.recalls.append((kept * used[:, None]).sum(-1))
    for item in step.work:
        if isinstance(item, Read):
            tally.fetched += int(item.plan.nbytes.sum())
            tally.useful += int(item.plan.useful.sum())
    tally.dense += step.streams * stored * step.head_dim * 4


def errors_over_bytes(result: dict[str, Any]) -> Any:
    """A figure of the error over the bytes fetched, a line for each method."""
    figure, axes = new_figure(width=8.5)
    for name in dict.fromkeys(row["name"] for row in result["methods"] if row["name"] != "dense"):
        rows = [row for row in result["methods"] if row["name"] == name]
        shares, errors = [row["bytes_fetched_share"] for row in rows], [row["output_rel_error"] for row in rows]
        axes.plot(shares, errors, "o-" if name.startswith("ours") else "x--", label=name, markersize=4, linewidth=1)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes fetched / bytes of K and V", ylabel="relative error of the output"
    )
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def experiment(
    passages: Passages,
    text: TextFile = None,
    model: ModelFolder = None,
    compression: Annotated[
        str, typer.Option(help="budgets 1/C in the bytes convention, with commas")
    ] = "2,4,5.333,8,16",
    plot: Picture = None,
    methods: MethodsFile = None,
    random: Annotated[bool, typer.Option("--gaussian", help="rows of random normal q, k and v besides")] = False,
) -> Outcome:
    """Every method's bytes, error and modelled time on recorded q, k, v."""
    compressions = numbers("compression", compression, float)
    known = load_methods(methods)
    check_picture(plot)
    with status("loading the model"):
        written = (text or TEXT).read_text(encoding="utf-8")
        loaded, tokenizer = load(model or CHECKPOINT)
        layers = record_layers(loaded, tokenizer, written, passages)
    turns = len(trials(contenders(known), compressions)) * len(layers) * (1 + random)
    with progress("layers", turns) as tick:
        result = bench_selectors(layers, compressions, tick, known)
        others = bench_selectors(gaussian(layers), compressions, tick, known) if random else None
    if plot:
        save_figure(errors_over_bytes(result), plot)
    names = sorted({row["name"] for row in result["beyond_budget"]})
    notes = [f"rows beyond their budget are in the json only: {', '.join(names)}"] if names else []
    if others is None:
        return Outcome(result, [_shown("Selectors", result)], notes)
    return Outcome(result | {"gaussian": others}, [_shown("Selectors", result), _shown("Gaussian", others)], notes)


def _shown(what: str, result: dict[str, Any]) -> Any:
    """A table of the methods."""
    rows = []
    for row in result["methods"]:
        shares = (row["budget"], row["bytes_fetched_share"], row["bytes_useful_share"])
        figures = *(f"{share:.3f}" for share in shares), f"{row['output_rel_error']:.4f}", f"{row['mass_recall']:.4f}"
        rows.append((row["name"], *figures, f"{row['serial_us']:,.0f}", f"{row['overlapped_us']:,.0f}"))
    size = f"{result['sequences']} x {result['tokens']} + {result['steps']} tokens"
    columns = ("method", "budget", "fetched", "useful", "error", "mass", "serial us", "overlapped us")
    return table(f"{what}, {size}, times of a layer's step on one drive", columns, rows)
