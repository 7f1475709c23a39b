"""The attention kernels beside their rivals and the machine's limits, in turns in one process. Wall time only."""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from attention_engine import METHODS, Compute, Memory, Queries, Read, Step, add_rows, oracle
from attention_engine._parallel import over_streams
from csd_spec import KvLayout, KvView, SparFParams
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.plot import new_figure, save_figure
from eval.rivals._prefetch import prefetch
from ftl import Ftl, PagePlan

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
Tick = Callable[[object], None] | None
CHUNK = 4096  # tokens of one append, as a prefill ships them
ROUNDS = 5
AHEAD = 32  # rows asked for in advance
SWEEP_TOKENS, SWEEP_GROUPS = (1024, 8192, 32768), (1, 2, 4, 8)
RUN = 1 << 20  # words that are read in one loop


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


class Contest:
    """One layer of one sequence in a drive's flash, and the same in tensors."""

    def __init__(self, tokens: int, heads: int, head_dim: int, kv_heads: int, threads: int, seed: int) -> None:
        self.tokens, self.head_dim, self.kv_heads, self.threads = tokens, head_dim, kv_heads, threads
        generator = np.random.default_rng(seed)
        self.K, self.V = (_random(generator, tokens, kv_heads, head_dim) for _ in range(2))
        self.q = generator.standard_normal((kv_heads, heads // kv_heads, head_dim), np.float32)
        top_k = -(-tokens // 8)
        self.params = SparFParams(min(16, head_dim), top_k, -(-top_k // 4))
        ftl = self.ftl = Ftl(INSTCSD_ZYNQ7045_8CH)
        layout = KvLayout.for_context(ftl.spec.geometry.page_bytes, head_dim, tokens)
        (handle,) = ftl.create(1, 1, kv_heads, layout)
        for start in range(0, tokens, CHUNK):
            k, v = self.K[start : start + CHUNK], self.V[start : start + CHUNK]
            ftl.append([handle], 0, np.array([k.shape[0]]), k, v, 0)
        self.view: KvView = ftl.view([handle], 0)
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

    def read_all(self) -> int:
        """Read K and V once, in order, but for a last part of a run: the rate to measure by. Returns the bytes read."""
        for part in (self.K, self.V):
            words = part.ravel().view(np.uint16)[: part.size // 4 * 4].view(np.uint64)
            run = min(words.size, RUN)
            rows = words[: words.size // run * run].reshape(-1, run)
            over_streams(_read, self.threads, rows.shape[0], (rows, np.empty(rows.shape[0], np.uint64)))
        return 2 * 8 * rows.size

    def read_rows(self) -> None:
        """Read the rows of K and V that were chosen last, each asked for in advance: the rate of a gather."""
        for part in self.rows:
            sums = np.empty(len(self.counts), np.uint64)
            over_streams(_gather, self.threads, len(self.counts), (part, self.chosen, self.counts, sums))

    def attend(self, method: str) -> F32:
        """Our kernels; where the pages are is worked out the first time only, as `vcsd bench ftl` measures that."""
        memory = [self.memory.setdefault(method, {})]
        queries = Queries.alike(self.q, self.params, self.v_mean, memory)
        if method not in self.plans:  # the first step makes tables
            METHODS[method](Step(self.view, self.ftl, queries))
            self.plans[method] = Plans(self.ftl)
        plans = self.plans[method]
        plans.next = 0
        step = Step(self.view, plans, queries, self.threads)
        out = METHODS[method](step)
        self.step = step
        return out

    def used_bytes(self) -> int:
        """Bytes of K and V, and of what scores them, that the last step used; chosen rows are kept for `read_rows`."""
        assert self.step.chosen is not None
        tokens, self.counts = self.step.chosen
        counts = self.counts
        heads = np.arange(len(counts)) * self.kv_heads // len(counts)  # a query head may have chosen for itself
        self.chosen = tokens + heads[:, None] * self.tokens
        self.row_bytes = int(counts.sum()) * 4 * self.head_dim
        scoring = sum(
            item.plan.useful.sum() for item in self.step.work if isinstance(item, Read) and "token" not in item.unit
        )
        return self.row_bytes + int(scoring)

    def operations(self) -> int:
        """Multiplications and additions of the last step's kernels."""
        jobs = [item for item in self.step.work if isinstance(item, Compute) and item.job == "kernel"]
        return sum(2 * int((item.lines * item.length).sum()) * item.queries for item in jobs)

    def torch_sdpa(self) -> torch.Tensor:
        """PyTorch's attention on FP32 tensors."""
        return torch.nn.functional.scaled_dot_product_attention(
            self.queries, self.keys, self.values, enable_gqa=self.kv_heads != self.queries.shape[1]
        )

    def torch_gather(self) -> torch.Tensor:
        """SparF's selection with torch.gather on FP32 tensors, which is how SparQ is published for PyTorch."""
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
        """Largest |out - ref| over largest |ref| in float64, and tokens that Algorithm 1 would not have chosen.

        ref: Algorithm 1 for SparF, dense attention for dense; for other methods exact attention over what they chose.
        """
        assert self.step.chosen is not None
        (tokens, counts), (largest, difference, others) = self.step.chosen, (0.0, 0.0, 0)
        q, alpha = (part.reshape(len(counts), -1, part.shape[-1]) for part in (self.q, self.step.alpha[..., None]))
        out = out.reshape(q.shape)
        for row in range(len(counts)):
            head = row * self.kv_heads // len(counts)
            K, V = (part[:, head].astype(np.float64) for part in (self.K, self.V))
            chosen = tokens[row, : counts[row]]
            if method == "sparf":
                p = self.params
                expected, _, wanted = oracle.sparf(q[row].astype(np.float64), K, V, p.r, p.k, p.l)
                others += np.setdiff1d(wanted, chosen).size
            else:
                exact = oracle.dense(q[row].astype(np.float64), K[chosen], V[chosen])
                expected = alpha[row] * exact + (1 - alpha[row].astype(np.float64)) * V.mean(0)
            largest = max(largest, np.abs(expected).max())
            difference = max(difference, np.abs(out[row] - expected).max())
        return difference / largest, others


class Plans:
    """The pages behind one step's selections, asked of the FTL once and remembered in order."""

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


def bench_attention(
    tokens: int, heads: int, head_dim: int, kv_heads: int, method: str, threads: int, seed: int = 0, tick: Tick = None
) -> dict[str, Any]:
    """Medians of five rounds, in each of which every contestant has its turn; the first round does not count.

    gb_per_s: bytes that the method uses over its time; bandwidth_share: of reading K and V in order. limit_ms: reading
    its rows where they lie, and in order what it scores with; limit_share: how much of that is reached. scratch_mib:
    what a step of 64 sequences with 1536 tokens takes beside K and V. max_rel_error: max |out - ref| / max |ref|.
    """
    if heads % kv_heads:
        raise ValueError(f"heads = {heads}: must be a multiple of kv-heads = {kv_heads}")
    if method not in METHODS:
        raise ValueError(f"method = {method!r}: must be one of {', '.join(METHODS)}")
    contest = Contest(tokens, heads, head_dim, kv_heads, threads, seed)
    error, others = contest.error(contest.attend(method), method)
    nbytes = contest.used_bytes()
    runs: dict[str, Callable[[], Any]] = {
        "read": contest.read_all,
        "gather rows": contest.read_rows,
        **{name: partial(contest.attend, name) for name in dict.fromkeys(["dense", "sparf", method])},
        "sdpa": contest.torch_sdpa,
        "gather": contest.torch_gather,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
            if tick:
                tick(None)
    median = {name: statistics.median(times[1:]) for name, times in taken.items()}
    bandwidth = contest.read_all() / median["read"] / 1e9
    everything = contest.K.nbytes + contest.V.nbytes
    limit = median["read"]
    if contest.row_bytes < everything:
        limit = median["gather rows"] + median["read"] * (nbytes - contest.row_bytes) / everything
    speed = nbytes / median[method] / 1e9
    return {
        "tokens": tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "method": method,
        "threads": threads,
        "kernel_ms": median[method] * 1e3,
        "gb_per_s": speed,
        "read_bandwidth_gb_per_s": bandwidth,
        "bandwidth_share": speed / bandwidth,
        "limit_ms": limit * 1e3,
        "limit_share": limit / median[method],
        "torch_sdpa_f32_ms": median["sdpa"] * 1e3,
        "torch_gather_ms": median["gather"] * 1e3,
        "speedup_vs_sdpa": median["sdpa"] / median[method],
        "speedup_vs_gather": median["gather"] / median[method],
        "speedup_vs_dense": median["dense"] / median[method],
        "scratch_mib": scratch_mib(heads, head_dim, kv_heads, method),
        "max_rel_error": error,
        "tokens_chosen_otherwise": others,
    }


def scratch_mib(
    heads: int, head_dim: int, kv_heads: int, method: str, sequences: int = 64, tokens: int = 1536
) -> float:
    """Most memory, in MiB, that arrays take at once during a step of many sequences, its inputs and K and V left out.

    All sequences are the same one, so that the pages of one are enough.
    """
    contest = Contest(tokens, heads, head_dim, kv_heads, 1, 0)
    one, times = contest.view, (sequences, 1)
    view = replace(
        one,
        seq_lens=np.tile(one.seq_lens, sequences),
        k_slots=np.tile(one.k_slots, times),
        v_slots=np.tile(one.v_slots, times),
        e_slots=np.tile(one.e_slots, (*times, 1)),
    )
    q, v_mean = np.tile(contest.q, (*times, 1)), np.tile(contest.v_mean, times)
    memory: list[Memory] = [{} for _ in range(sequences)]
    tracemalloc.start()
    METHODS[method](Step(view, contest.ftl, Queries.alike(q, contest.params, v_mean, memory)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def sweep(threads: int, tick: Tick = None) -> dict[str, Any]:
    """Dense and SparF over lengths and query groups, against the machine's two limits: memory and arithmetic."""
    points = []
    for tokens in SWEEP_TOKENS:
        for group in SWEEP_GROUPS:
            contest = Contest(tokens, 16 * group, 128, 16, threads, 0)
            for method in ("dense", "sparf"):
                ms = _median_ms(partial(contest.attend, method))
                operations = contest.operations()
                points.append(
                    {
                        "tokens": tokens,
                        "group": group,
                        "method": method,
                        "flop_per_byte": operations / contest.used_bytes(),
                        "gflop_per_s": operations / ms / 1e6,
                    }
                )
                if tick:
                    tick(None)
    square = torch.randn(2048, 2048)
    peak = 2 * 2048**3 / _median_ms(lambda: square @ square) / 1e6
    bandwidth = contest.read_all() / _median_ms(contest.read_all) / 1e6
    return {"threads": threads, "read_bandwidth_gb_per_s": bandwidth, "peak_gflop_per_s": peak, "points": points}


def _median_ms(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def plot_sweep(result: dict[str, Any], path: Path) -> None:
    """A roofline: arithmetic rate over operations for each byte."""
    figure, axes = new_figure()
    bandwidth, peak = result["read_bandwidth_gb_per_s"], result["peak_gflop_per_s"]
    intensity = np.geomspace(0.5, 64, 100)
    axes.plot(intensity, np.minimum(intensity * bandwidth, peak), "k-", label="reading in order, FP32 matrix product")
    for method, marker in (("dense", "o"), ("sparf", "^")):
        for tokens in SWEEP_TOKENS:
            points = [p for p in result["points"] if (p["method"], p["tokens"]) == (method, tokens)]
            x, y = [p["flop_per_byte"] for p in points], [p["gflop_per_s"] for p in points]
            axes.plot(x, y, marker, markersize=4, label=f"{method}, {tokens:,} tokens")
    axes.set(xscale="log", yscale="log", xlabel="operations / byte of K and V used", ylabel="GFLOP/s")
    axes.set_title(f"{result['threads']} threads, 16 KV heads of 128, {', '.join(map(str, SWEEP_GROUPS))} queries each")
    axes.legend(fontsize=7)
    save_figure(figure, path)
