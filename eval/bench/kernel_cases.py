"""One layer of one sequence, stored in a drive's flash and as tensors, as input of kernels and baselines."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer

from attention_engine import METHODS, Compute, DecodeStep, Memory, Queries, Read, add_rows, reference
from attention_engine._parallel import over_streams
from csd_io.compiled import njit
from csd_spec import NAMED, AttentionConfig, KvSlotView, SparFParams
from csd_spec.arrays import F16, F32
from csd_spec.layouts import layout_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl, PagePlan
from vcsd_eval.baselines._prefetch import prefetch

CHUNK = 4096  # tokens of one append, as in a prefill
AHEAD = 32  # rows prefetched
RUN = 1 << 20  # words read per loop


@njit(cache=True, nogil=True, fastmath=True)
def _read(begin, end, rows, sums):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for row in range(begin, end):
        for i in range(rows.shape[1]):
            total += rows[row, i]
    sums[begin] = total


@njit(cache=True, nogil=True, fastmath=True)
def _gather(begin, end, rows, chosen, counts, sums):  # type: ignore[no-untyped-def]
    for head in range(begin, end):
        total = np.uint64(0)
        for i in range(counts[head]):
            ahead = chosen[head, min(i + AHEAD, counts[head] - 1)]
            for j in range(0, rows.shape[1], 8):
                prefetch(rows, ahead, j)
            for j in range(rows.shape[1]):
                total += rows[chosen[head, i], j]
        sums[head] = total


def read_rate(threads: int, nbytes: int = 1 << 28) -> float:
    """Rate of a sequential memory read, bytes per second."""
    rows = np.ones((nbytes // 8 // RUN, RUN), np.uint64)
    sums, taken = np.empty(rows.shape[0], np.uint64), []
    for _ in range(4):
        began = time.perf_counter()
        over_streams(_read, threads, rows.shape[0], (rows, sums))
        taken.append(time.perf_counter() - began)
    return rows.nbytes / statistics.median(taken[1:])


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the layer."""

    tokens: Annotated[int, typer.Option(min=16, max=1 << 18, help="length of the sequence")] = 32768
    heads: Annotated[int, typer.Option(min=1, max=256, help="query heads")] = 40
    head_dim: Annotated[int, typer.Option(min=8, max=256, help="channels of a head")] = 128
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=256, help="KV heads (default: the number of query heads)")
    ] = None

    def __post_init__(self) -> None:
        if self.heads % self.streams:
            raise ValueError(f"heads = {self.heads}: must be a multiple of kv-heads = {self.kv_heads}")

    @property
    def streams(self) -> int:
        """Number of KV heads."""
        return self.kv_heads or self.heads


class Contest:
    """One layer of one sequence in a drive's flash, and the same data as tensors.

    layouts: layout of each method that does not use the one that its name implies.
    """

    def __init__(self, size: Size, threads: int = 1, seed: int = 0) -> None:
        tokens, heads, head_dim, kv_heads = size.tokens, size.heads, size.head_dim, size.streams
        self.tokens, self.head_dim, self.kv_heads, self.threads = tokens, head_dim, kv_heads, threads
        generator = np.random.default_rng(seed)
        self.K, self.V = (_random(generator, tokens, kv_heads, head_dim) for _ in range(2))
        self.q = generator.standard_normal((kv_heads, heads // kv_heads, head_dim), np.float32)
        top_k = -(-tokens // 8)
        self.params = SparFParams(min(16, head_dim), top_k, -(-top_k // 4))
        self.ftl = Ftl(INSTCSD_ZYNQ7045_8CH)
        self.layouts: dict[str, str] = {}
        self.views, self.handles = dict[str, KvSlotView](), dict[str, int]()
        self.view = self.stored(AttentionConfig().layout)
        self.v_mean: F32 = np.zeros((kv_heads, head_dim), np.float32)
        add_rows(self.v_mean, self.V.view(np.uint16))
        self.v_mean /= tokens
        by_head = (part.transpose(1, 0, 2)[..., : head_dim // 4 * 4] for part in (self.K, self.V))
        self.rows = [np.ascontiguousarray(part).reshape(kv_heads * tokens, -1).view(np.uint64) for part in by_head]
        self.plans: dict[str, Plans] = {}
        self.memory: dict[str, Memory] = {}
        torch.set_num_threads(threads)
        tensors = (torch.from_numpy(part).float().transpose(0, 1)[None].contiguous() for part in (self.K, self.V))
        self.keys, self.values = tensors
        self.queries = torch.from_numpy(self.q).reshape(1, heads, 1, head_dim)

    def layout(self, method: str) -> str:
        """Layout in which a method attends."""
        return self.layouts.get(method, AttentionConfig.named(method).layout)

    def stored(self, layout: str) -> KvSlotView:
        """View of the layer in a layout."""
        if layout not in self.views:
            form = layout_named(layout).form(self.ftl.spec.geometry.page_bytes, self.head_dim, self.tokens)
            (handle,) = self.ftl.create(1, 1, self.kv_heads, form)
            for start in range(0, self.tokens, CHUNK):
                k, v = self.K[start : start + CHUNK], self.V[start : start + CHUNK]
                self.ftl.append([handle], 0, np.array([k.shape[0]]), k, v, 0)
            self.views[layout], self.handles[layout] = self.ftl.view([handle], 0), handle
        return self.views[layout]

    def asked(self, name: str) -> Queries:
        """Queries of a method, with the parameters that its name carries, if any."""
        return Queries.uniform(self.q, self.params_of(name), self.v_mean, [self.memory.setdefault(name, {})])

    def params_of(self, name: str) -> SparFParams:
        """r, k and l of a method."""
        return NAMED[name].at(self.tokens, self.head_dim) if name in NAMED else self.params

    def read_all(self) -> int:
        """Read the KV data once, sequentially, except the rest of the last run. Returns the bytes read.

        The rate of this read is the reference of the other rates.
        """
        for part in (self.K, self.V):
            words = part.ravel().view(np.uint16)[: part.size // 4 * 4].view(np.uint64)
            run = min(words.size, RUN)
            rows = words[: words.size // run * run].reshape(-1, run)
            over_streams(_read, self.threads, rows.shape[0], (rows, np.empty(rows.shape[0], np.uint64)))
        return 2 * 8 * rows.size

    def read_rows(self) -> None:
        """Read the K and V rows that were selected last, with prefetch: the rate of a gather."""
        for part in self.rows:
            sums = np.empty(len(self.counts), np.uint64)
            over_streams(_gather, self.threads, len(self.counts), (part, self.chosen, self.counts, sums))

    def attend(self, method: str) -> F32:
        """Run our kernels; pages are located in the first call only, since `vcsd bench ftl` measures that part."""
        run, queries = METHODS[AttentionConfig.named(method).method], self.asked(method)
        view = self.stored(self.layout(method))
        if method not in self.plans:  # the first step builds the tables
            run(DecodeStep(view, self.ftl, queries))
            self.plans[method] = Plans(self.ftl)
        plans = self.plans[method]
        plans.next = 0
        step = DecodeStep(view, plans, queries, self.threads)
        out = run(step)
        self.step, self.view_of_last = step, view
        return out

    def used_bytes(self) -> int:
        """Bytes of KV data, in any representation, that the last step used; keeps the chosen rows for `read_rows`."""
        assert self.step.chosen is not None
        tokens, self.counts = self.step.chosen
        heads = (
            np.arange(len(self.counts)) * self.kv_heads // len(self.counts)
        )  # query heads may have separate selections
        self.chosen = tokens + heads[:, None] * self.tokens
        self.row_bytes = int(self.counts.sum()) * 4 * self.head_dim
        read = [item for item in self.step.work if isinstance(item, Read)]
        if self.view_of_last.layout.progressive:  # reads whole pages only
            self.row_bytes = 0
            return sum(int(item.plan.useful.sum()) for item in read)
        scoring = sum(int(item.plan.useful.sum()) for item in read if "token" not in item.unit)
        return self.row_bytes + scoring

    def operations(self) -> int:
        """Multiplications and additions of the kernels in the last step."""
        jobs = [item for item in self.step.work if isinstance(item, Compute) and item.job == "kernel"]
        return sum(2 * int((item.lines * item.length).sum()) * item.queries for item in jobs)

    def torch_sdpa(self) -> torch.Tensor:
        """PyTorch's attention on FP32 tensors."""
        return torch.nn.functional.scaled_dot_product_attention(
            self.queries, self.keys, self.values, enable_gqa=self.kv_heads != self.queries.shape[1]
        )

    def torch_gather(self) -> torch.Tensor:
        """SparF's selection with torch.gather on FP32 tensors, as in the PyTorch code that SparQ was published with."""
        q, K, V = torch.from_numpy(self.q)[None], self.keys, self.values
        d, S, G, r, k = self.head_dim, self.tokens, self.q.shape[1], self.params.r, self.params.k
        size = q.abs().sum(2, keepdim=True)
        i = torch.topk(size, r, -1).indices
        some = torch.gather(q, -1, i.expand(-1, -1, G, -1))
        columns = torch.gather(K, -1, i.expand(-1, -1, S, -1))
        share = some.abs().sum(-1, keepdim=True) / q.abs().sum(-1, keepdim=True)
        weights = torch.softmax(some @ columns.transpose(-1, -2) / torch.sqrt(d * share), -1)
        score = weights.sum(2, keepdim=True)
        score[..., S - -(-k // 4) :] = float("inf")
        j = torch.topk(score, k, -1).indices
        rows = j.transpose(-1, -2).expand(-1, -1, -1, d)
        out = torch.softmax(q @ torch.gather(K, 2, rows).transpose(-1, -2) / math.sqrt(d), -1) @ torch.gather(
            V, 2, rows
        )
        alpha = torch.gather(weights, -1, j.expand(-1, -1, G, -1)).sum(-1, keepdim=True)
        return alpha * out + (1 - alpha) * torch.from_numpy(self.v_mean)[None, :, None]

    def error(self, out: F32, method: str) -> tuple[float, int]:
        """Largest |out - ref| over largest |ref| in float64, and number of tokens that Algorithm 1 would not select.

        ref: Algorithm 1 for SparF; dense attention for dense and for progressive precision, of which it measures the
        error; for other methods exact attention over the tokens that they chose, as their layout stores them.
        """
        stored_k, stored_v, _ = self.ftl.read_back(self.handles[self.layout(method)], 0)
        assert self.step.chosen is not None
        (tokens, counts), (largest, difference, others) = self.step.chosen, (0.0, 0.0, 0)
        q, alpha = (part.reshape(len(counts), -1, part.shape[-1]) for part in (self.q, self.step.alpha[..., None]))
        out = out.reshape(q.shape)
        for row in range(len(counts)):
            head = row * self.kv_heads // len(counts)
            K, V = (part[:, head].astype(np.float64) for part in (stored_k, stored_v))
            chosen = tokens[row, : counts[row]]
            if method == "sparf":
                p = self.params
                expected, _, wanted = reference.sparf(q[row].astype(np.float64), K, V, p.r, p.k, p.l)
                others += np.setdiff1d(wanted, chosen).size
            else:
                if self.view_of_last.layout.progressive:
                    chosen = np.arange(self.tokens, dtype=np.int32)
                exact = reference.dense(q[row].astype(np.float64), K[chosen], V[chosen])
                rest = self.V[:, head].astype(np.float64).mean(0)
                expected = alpha[row] * exact + (1 - alpha[row].astype(np.float64)) * rest
            largest = max(largest, np.abs(expected).max())
            difference = max(difference, np.abs(out[row] - expected).max())
        return difference / largest, others


class Plans:
    """Pages of one step's selections; the FTL is asked once and the answers are replayed in order."""

    def __init__(self, ftl: Ftl) -> None:
        self.ftl, self.known, self.next = ftl, list[PagePlan](), 0

    def __getattr__(self, name: str) -> Callable[..., PagePlan]:
        def plan(*arguments: Any) -> PagePlan:
            if self.next == len(self.known):
                self.known.append(getattr(self.ftl, name)(*arguments))
            self.next += 1
            return self.known[self.next - 1]

        return plan


def _random(generator: np.random.Generator, tokens: int, heads: int, dim: int) -> F16:
    out: F16 = np.empty((tokens, heads, dim), np.float16)
    for start in range(0, tokens, CHUNK):
        out[start : start + CHUNK] = generator.standard_normal(out[start : start + CHUNK].shape, np.float32)
    return out
