"""Speed of the emulator: decode steps with the KV cache in drives, compared with the same model and an in-memory cache.

All times are CPU or wall-clock times, never simulated time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

import vcsd
from csd_firmware import InProcessDrive
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.hf.cache import KvCache
from host_driver.hf.cache_argument import forward_on
from host_driver.hf.staging import stage
from vcsd.loading import CHECKPOINT
from vcsd.loading import load as load_model
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.baselines import caches, llamacpp
from vcsd_eval.bench.kernel_cases import read_rate
from vcsd_eval.experiment import Outcome

PREALLOCATED = ("preallocated", "preallocated, repeated")  # the faster one counts
IN_DRIVES = {"dense": ("dense", "sparf"), "ours": ("ours",)}  # attention methods that share a drive, by fill method
FIXED_TOKENS = (64, 256, 512, 1024)  # lengths for the fit of the fixed cost per layer
PREFILL_TOKENS = 1024
LAYERS, HIDDEN, VOCABULARY = 4, 512, 1024  # of a model specified by its attention shape


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Decode workload and number of repetitions."""

    shape: Annotated[
        str, typer.Option(help="model: shipped, a model folder, or query heads x KV heads x channels (16x4x128)")
    ] = "shipped"
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="tokens stored before decoding")] = 1024
    batch: Annotated[int, typer.Option(min=1, max=1024, help="sequences")] = 1
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="data type of the model and of in-memory caches")] = (
        "fp32"
    )
    drives: Annotated[int, typer.Option(min=1, max=1024, help="virtual drives")] = 1
    threads: Annotated[
        int,
        typer.Option(min=1, max=1024, help="threads of PyTorch and of the drives, pinned to the same number of cores"),
    ] = 1
    steps: Annotated[int, typer.Option(min=1, max=1 << 20, help="decode steps per turn")] = 8
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="measured turns, after one warm-up")] = 5

    def model(self) -> PreTrainedModel:
        """Model of that shape; raises ValueError for an unknown shape or for more tokens than its context."""
        if self.shape == "shipped" or Path(self.shape).is_dir():
            model, _ = load_model(CHECKPOINT if self.shape == "shipped" else Path(self.shape))
        else:
            try:
                heads, kv_heads, head_dim = (int(part) for part in self.shape.split("x"))
                model = _random_model(heads, kv_heads, head_dim, self.tokens + self.room)
            except ValueError as error:
                what = "query heads x KV heads that divide them x channels, as 16x4x128"
                raise ValueError(f"shape = {self.shape!r}: must be shipped, a model's folder, or {what}") from error
        context = model.config.max_position_embeddings
        if self.tokens + self.room > context:
            raise ValueError(
                f"tokens = {self.tokens}: the model's context is {context}, {self.room} are decoded: reduce --tokens"
            )
        return model.to(torch.bfloat16 if self.dtype == "bf16" else torch.float32).eval()

    @property
    def room(self) -> int:
        """Tokens that are decoded after the stored ones."""
        return 2 * self.steps * (self.repeats + 1)


def _random_model(heads: int, kv_heads: int, head_dim: int, tokens: int) -> PreTrainedModel:
    """Small random model around attention of that shape; raises ValueError if query heads are not a multiple."""
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise ValueError(f"{heads} x {kv_heads} x {head_dim}")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max(tokens, 2 * PREFILL_TOKENS),
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@dataclass(slots=True)
class CacheVariant:
    """One KV cache implementation and its step times.

    step: runs the model on one token per sequence and returns logits. begin: switches the model to this implementation.
    """

    step: Callable[[torch.Tensor], torch.Tensor]
    begin: Callable[[], None] = lambda: None
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    def turn(self, ids: torch.Tensor, steps: int, counts: bool) -> None:
        """Run `steps` decode steps; record their times if `counts` is set."""
        self.begin()
        for _ in range(steps):
            cpu, wall = time.process_time(), time.perf_counter()
            self.step(ids)
            if counts:
                self.cpu_ms.append((time.process_time() - cpu) * 1e3)
                self.wall_ms.append((time.perf_counter() - wall) * 1e3)


class DecodeBench:
    """KV cache implementations filled with the same random KV data, each with a copy of the model."""

    def __init__(self, load: DecodeLoad, tokens: int, batch: int, undo: ExitStack) -> None:
        self.load, self.tokens, self.batch, self.undo = load, tokens, batch, undo
        self.ways: dict[str, CacheVariant] = {}
        self.layers = 0

    def _model(self) -> PreTrainedModel:
        model = self.load.model()
        self.layers = model.config.num_hidden_layers
        return model

    def _fill(self, take: Callable[[int, torch.Tensor, torch.Tensor], None], config: Any) -> None:
        """Generate keys and values of each layer, (B, kv_heads, tokens, d): FP16 numbers, so that all implementations
        match.
        """
        generator = torch.Generator().manual_seed(0)
        shape = self.batch, config.num_key_value_heads, self.tokens, config.head_dim
        for layer in range(self.layers):
            k, v = (torch.randn(shape, generator=generator).half() for _ in range(2))
            take(layer, k, v)

    def in_memory(self, name: str, cache: Cache, attention: str = "sdpa") -> None:
        """Add a cache of transformers, or a compatible one."""
        model = self._model()
        model.set_attn_implementation(attention)
        self._fill(lambda layer, k, v: _update(cache, layer, k.to(model.dtype), v.to(model.dtype)), model.config)
        self.ways[name] = CacheVariant(_step(model, cache))

    def in_drives(self, fills: str, names: Sequence[str]) -> None:
        """Add drives in which the methods `names` attend, filled as `fills` stores its KV data."""
        model, count = self._model(), self.load.drives
        threads = max(1, self.load.threads // count)
        devices = [InProcessDrive(INSTCSD_ZYNQ7045_8CH, threads=threads) for _ in range(count)]
        for device in devices:
            self.undo.callback(device.close)
        attached = self.undo.enter_context(vcsd.attach(model, drives=devices, method=fills))
        layers = attached.placed.in_drives
        cache = KvCache(attached.kv, model.config, layers, layers)
        cache.create(self.batch)
        self._fill(lambda layer, k, v: _store(cache, layer, k, v), model.config)
        attached.kv.store_in_drives(dict.fromkeys(cache.requests, self.tokens), range(len(layers)))
        cache.valid = np.ones((self.batch, self.tokens), bool)
        for name in names:
            config = vcsd.AttentionConfig.named(name)

            def begin(name: str = name, config: vcsd.AttentionConfig = config) -> None:
                attached.set_method(name, config.budget)

            self.ways[name] = CacheVariant(_step(model, cache), begin)

    def in_llamacpp(self) -> tuple[dict[str, float], dict[str, str]]:
        """Add llama.cpp with its cache types, filled by a prompt.

        Returns:
            The logit difference of each cache type, and the reasons why others are left out.
        """
        model, differences, missing = self._model(), dict[str, float](), dict[str, str]()
        reason = llamacpp.missing(model, self.tokens)
        if reason:
            return {}, {"llama.cpp": reason}
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, model.config.vocab_size, (self.batch, self.tokens), generator=generator)
        logits = llamacpp.expected(model, ids)
        for name, kind in llamacpp.kinds_of(model.dtype).items():
            try:
                rival = llamacpp.LlamaCpp(model, self.tokens + self.load.room, self.batch, self.load.threads, kind)
            except OSError as error:
                missing[name] = str(error)
                continue
            self.undo.callback(rival.close)
            differences[name] = llamacpp.difference(rival, ids, logits)
            if differences[name] < kind.differs(model.dtype):
                self.ways[name] = CacheVariant(rival)
            else:
                missing[name] = f"its logits are off by {differences[name]:.1e} of the largest"
        return differences, missing

    def run(self, tick: Tick) -> None:
        """Run all implementations in turn; the first turn is a warm-up."""
        ids = torch.ones((self.batch, 1), dtype=torch.long)
        for number in range(self.load.repeats + 1):
            for way in self.ways.values():
                way.turn(ids, self.load.steps, counts=number > 0)
                tick(None)


def _step(model: PreTrainedModel, cache: Cache) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(ids: torch.Tensor) -> torch.Tensor:
        out, _ = forward_on(model, cache, input_ids=ids)
        return out.logits[:, -1]  # type: ignore[no-any-return]  # a tensor, which transformers does not say

    return step


def _update(cache: Cache, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    cache.update(k, v, layer)


def _store(cache: KvCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write a layer to the drives, as a prefill does."""
    batch, heads, tokens, d = k.shape
    drives = cache.kv.drives
    assert drives
    staged = stage(
        *(part.transpose(1, 2).reshape(batch * tokens, heads, d) for part in (k, v)), bf16=drives.driver.bf16
    )
    rows = staged()
    drives.append(cache.requests, layer, np.full(batch, tokens), lambda: (rows[0], rows[1]))
    drives.driver.settle()
    cache.layers[layer].length, cache.layers[layer].is_initialized = tokens, True


@contextmanager
def pinned(threads: int) -> Iterator[list[int]]:
    """Pin `threads` PyTorch threads to the same number of cores until the block ends; yields the cores."""
    before, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores[:threads])
    try:
        yield cores[:threads]
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


def _others(config: Any) -> tuple[dict[str, Cache], dict[str, str]]:
    """Caches of transformers that run here, and the reasons why others do not."""
    ways: dict[str, Cache] = {"dynamic": DynamicCache()}
    missing = dict[str, str]()
    if torch.cuda.is_available():
        ways["offloaded"] = DynamicCache(config=config, offloading=True)
    else:
        missing["offloaded"] = "DynamicCache(offloading=True) needs a GPU"
    try:
        ways["quantized"] = QuantizedCache("quanto", config)
    except ImportError:
        missing["quantized"] = "QuantizedCache needs optimum-quanto"
    return ways, missing


@torch.inference_mode()
def bench_decode(load: DecodeLoad, tick: Tick = no_tick) -> dict[str, Any]:
    """CPU and wall-clock milliseconds of a decode step, medians over `steps` x `repeats`, implementations in turn.

    Columns:
        X_over_preallocated: CPU time of a step over that of the faster preallocated cache.
        dense_over_llamacpp: CPU time of a dense step over that of the fastest llama.cpp cache type. Its KV data come
            from a prompt; the others use random data.
        fixed_us_per_layer: Cost of a layer in one drive in addition to attention (dense, batch 1): the intercept over
            64 to 1,024 tokens, less the model without attention.
        prefill_over_plain: CPU time of a prompt whose KV data are written to drives, over that of one without.
    """
    caches.register()
    with pinned(load.threads) as cores, ExitStack() as undo:
        bench = DecodeBench(load, load.tokens, load.batch, undo)
        model = load.model()
        others, missing = _others(model.config)
        for name, cache in others.items():
            bench.in_memory(name, cache)
        layers, room = model.config.num_hidden_layers, load.tokens + load.room
        for name, attention in zip(PREALLOCATED, ("sdpa", caches.REPEATED), strict=True):
            bench.in_memory(name, caches.preallocated(layers, room), attention)
        for fills, names in IN_DRIVES.items():
            bench.in_drives(fills, names)
        differences, refused = bench.in_llamacpp()
        bench.run(tick)
        cpu = {name: statistics.median(way.cpu_ms) for name, way in bench.ways.items()}
        rival = min(PREALLOCATED, key=cpu.__getitem__)
        weights = sum(parameter.numel() for parameter in model.parameters())
        stored = load.batch * load.tokens * layers * 2 * model.config.num_key_value_heads * model.config.head_dim
        moved = (stored + weights) * (2 if load.dtype == "bf16" else 4)
        return {
            "shape": load.shape,
            "tokens": load.tokens,
            "batch": load.batch,
            "dtype": load.dtype,
            "drives": load.drives,
            "threads": load.threads,
            "cores": cores,
            "step_cpu_ms": cpu,
            "step_wall_ms": {name: statistics.median(way.wall_ms) for name, way in bench.ways.items()},
            "step_wall_p99_ms": {name: float(np.percentile(way.wall_ms, 99)) for name, way in bench.ways.items()},
            "fastest_preallocated_cache": rival,
            "preallocated_bandwidth_share": moved / cpu[rival] * 1e3 / read_rate(load.threads),
            **{f"{name}_over_preallocated": cpu[name] / cpu[rival] for names in IN_DRIVES.values() for name in names},
            "dense_over_dynamic": cpu["dense"] / cpu["dynamic"],
            **_over_llamacpp(cpu, differences),
            "fixed_us_per_layer": fixed_us_per_layer(load, tick),
            **prefill_over_plain(load, tick),
            "not_run": missing | refused,
        }


def _over_llamacpp(cpu: dict[str, float], differences: dict[str, float]) -> dict[str, Any]:
    """Results for llama.cpp, if it ran: the fastest cache type, and the other times over its time."""
    ran = [name for name in differences if name in cpu]
    if not ran:
        return {}
    rival = min(ran, key=cpu.__getitem__)
    names = [f"{method}_over_llamacpp" for method in ("dense", "ours")]
    ratios = [cpu[method] / cpu[rival] for method in ("dense", "ours")]
    return {
        "fastest_llamacpp_cache": rival,
        **dict(zip(names, ratios, strict=True)),
        "llamacpp_logit_differences": differences,
    }


def fixed_us_per_layer(load: DecodeLoad, tick: Tick = no_tick) -> float:
    """CPU microseconds of a layer in a drive, extrapolated to zero tokens; dense, one sequence, one drive."""
    points = []
    for tokens in FIXED_TOKENS:
        with ExitStack() as undo:
            one = DecodeLoad(load.shape, tokens, 1, load.dtype, 1, load.threads, load.steps, load.repeats)
            bench = DecodeBench(one, tokens, 1, undo)
            bench.in_drives("dense", ["dense"])
            bench.in_memory("none", caches.preallocated(bench.layers, tokens + one.room), caches.NONE)
            bench.run(tick)
            taken = [statistics.median(bench.ways[name].cpu_ms) for name in ("dense", "none")]
            points.append((taken[0] - taken[1]) / bench.layers * 1e3)
    _, intercept = np.polyfit(FIXED_TOKENS, points, 1)
    return float(intercept)


def prefill_over_plain(load: DecodeLoad, tick: Tick = no_tick) -> dict[str, float]:
    """CPU time of a prompt with KV data written as FP16 and in progressive precision, over the model alone."""
    model, tokens = load.model(), min(load.tokens, PREFILL_TOKENS)
    ids = torch.randint(1, model.config.vocab_size, (load.batch, tokens))
    taken: dict[str, list[float]] = {"": [], "dense": [], "ours": []}
    for _ in range(load.repeats + 1):
        for name, times in taken.items():
            with ExitStack() as undo:
                if name:
                    undo.enter_context(vcsd.attach(model, drives=load.drives, method=name))
                began = time.process_time()
                out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
                times.append(time.process_time() - began)
                del out
            tick(None)
    plain, fp16, ours = (statistics.median(times[1:]) for times in taken.values())
    return {"prefill_over_plain": fp16 / plain, "prefill_ours_over_plain": ours / plain}


def experiment(load: DecodeLoad) -> Outcome:
    """CPU and wall-clock time of a decode step: KV cache in emulated drives compared with in-memory caches."""
    ways = 3 + sum(map(len, IN_DRIVES.values())) + len(llamacpp.KINDS) * llamacpp.installed()
    turns = (load.repeats + 1) * (ways + 2 * len(FIXED_TOKENS) + 3)
    with progress("turns", turns) as tick:
        result = bench_decode(load, tick)
    title = f"Decode step, {load.batch} x {load.tokens:,} tokens, {load.shape}, {load.dtype}, {load.threads} threads"
    rival = result["step_cpu_ms"][result["fastest_preallocated_cache"]]
    keys = "step_cpu_ms", "step_wall_ms", "step_wall_p99_ms"
    rows = [
        (name, *(f"{result[key][name]:.2f}" for key in keys), f"{ms / rival:.2f}x")
        for name, ms in result["step_cpu_ms"].items()
    ]
    shown = table(title, ("K and V", "CPU ms", "wall ms", "p99", "of preallocated"), rows)
    lines = [
        f"preallocated reaches {result['preallocated_bandwidth_share']:.0%} of the memory's bandwidth",
        f"a layer in a drive costs {result['fixed_us_per_layer']:.0f} us besides attention",
        f"a prompt takes {result['prefill_over_plain']:.2f} of the plain one's time, "
        f"{result['prefill_ours_over_plain']:.2f} in progressive precision",
        *(f"{name}: {reason}" for name, reason in result["not_run"].items()),
    ]
    return Outcome(result, [shown], lines)
