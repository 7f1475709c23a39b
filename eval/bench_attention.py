"""The attention kernels beside their rivals and the machine's limits, in turns in one process. Wall time only."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from attention_engine import add_rows, approximate, attend, oracle, top_channels, top_tokens
from attention_engine._parallel import over_streams
from csd_spec import KvLayout, KvView
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Ftl

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
Tick = Callable[[object], None] | None
CHUNK = 4096  # tokens of one append, as a prefill ships them
ROUNDS = 5
RUN = 1 << 20  # words that are read in one loop


@njit(cache=True, nogil=True, fastmath=True)
def _read(begin, end, rows, sums):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for row in range(begin, end):
        for i in range(rows.shape[1]):
            total += rows[row, i]
    sums[begin] = total


class Contest:
    """One layer of one sequence in a drive's flash, and the same in tensors."""

    def __init__(self, tokens: int, heads: int, head_dim: int, kv_heads: int, threads: int, seed: int) -> None:
        self.tokens, self.head_dim, self.kv_heads, self.threads = tokens, head_dim, kv_heads, threads
        generator = np.random.default_rng(seed)
        self.K, self.V = (_random(generator, tokens, kv_heads, head_dim) for _ in range(2))
        self.q = generator.standard_normal((kv_heads, heads // kv_heads, head_dim), np.float32)
        ftl = Ftl(INSTCSD_ZYNQ7045_8CH)
        layout = KvLayout.for_context(ftl.spec.geometry.page_bytes, head_dim, tokens)
        (handle,) = ftl.create(1, 1, kv_heads, layout)
        for start in range(0, tokens, CHUNK):
            k, v = self.K[start : start + CHUNK], self.V[start : start + CHUNK]
            ftl.append([handle], 0, np.array([k.shape[0]]), k, v, 0)
        self.view: KvView = ftl.view([handle], 0)
        self.v_mean: F32 = np.zeros((kv_heads, head_dim), np.float32)
        add_rows(self.v_mean, self.V.view(np.uint16))
        self.v_mean /= tokens
        torch.set_num_threads(threads)
        by_head = (torch.from_numpy(part).float().transpose(0, 1)[None].contiguous() for part in (self.K, self.V))
        self.keys, self.values = by_head
        self.queries = torch.from_numpy(self.q).reshape(1, heads, 1, head_dim)

    def read_all(self) -> int:
        """Read K and V once, in order, but for a last part of a run: the rate to measure by. Returns the bytes read."""
        for part in (self.K, self.V):
            words = part.ravel().view(np.uint16)[: part.size // 4 * 4].view(np.uint64)
            run = min(words.size, RUN)
            rows = words[: words.size // run * run].reshape(-1, run)
            over_streams(_read, self.threads, rows.shape[0], (rows, np.empty(rows.shape[0], np.uint64)))
        return 2 * 8 * rows.size

    def dense(self) -> tuple[F32, Any, int]:
        """Our kernel over all tokens: output, None, bytes."""
        counts = self.view.seq_lens
        every = np.broadcast_to(np.arange(self.tokens, dtype=np.int32), (self.kv_heads, self.tokens))
        alpha = np.ones(self.q.shape[:2], np.float32)
        out = attend(self.view, self.q, every, counts, alpha, self.v_mean, self.threads)
        return out, None, self.K.nbytes + self.V.nbytes

    def sparf(self, r: int, k: int) -> tuple[F32, Any, int]:
        """Algorithm 1: output, selected tokens, bytes of the selected channels and rows."""
        channels = top_channels(self.q, r, self.threads)
        logits = approximate(self.view, self.q, channels, self.threads)
        each = np.full(self.kv_heads, k)
        tokens, alpha = top_tokens(logits, self.view.seq_lens, each, -(-each // 4), threads=self.threads)
        out = attend(self.view, self.q, tokens, each, alpha, self.v_mean, self.threads)
        return out, tokens, 2 * self.kv_heads * (r * self.tokens + 2 * k * self.head_dim)

    def torch_sdpa(self) -> torch.Tensor:
        """PyTorch's attention on FP32 tensors."""
        return torch.nn.functional.scaled_dot_product_attention(
            self.queries, self.keys, self.values, enable_gqa=self.kv_heads != self.queries.shape[1]
        )

    def torch_gather(self, r: int, k: int) -> torch.Tensor:
        """The same selection with torch.gather on FP32 tensors, which is how SparQ is published for PyTorch."""
        q, K, V = torch.from_numpy(self.q)[None], self.keys, self.values
        d, S, G = self.head_dim, self.tokens, self.q.shape[1]
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

    def error(self, out: F32, tokens: Any, r: int, k: int) -> tuple[float, int]:
        """Largest |out - ref| over largest |ref| against float64, and tokens chosen otherwise than by it."""
        largest, difference, others = 0.0, 0.0, 0
        for head in range(self.kv_heads):
            q, K, V = (part.astype(np.float64) for part in (self.q[head], self.K[:, head], self.V[:, head]))
            if tokens is None:
                expected = oracle.dense(q, K, V)
            else:
                expected, _, chosen = oracle.sparf(q, K, V, r, k, -(-k // 4))
                others += np.setdiff1d(chosen, tokens[head]).size
            largest, difference = (
                max(largest, np.abs(expected).max()),
                max(difference, np.abs(out[head] - expected).max()),
            )
        return difference / largest, others


def _random(generator: np.random.Generator, tokens: int, heads: int, dim: int) -> F16:
    out: F16 = np.empty((tokens, heads, dim), np.float16)
    for start in range(0, tokens, CHUNK):
        out[start : start + CHUNK] = generator.standard_normal(out[start : start + CHUNK].shape, np.float32)
    return out


def bench_attention(
    tokens: int, heads: int, head_dim: int, kv_heads: int, method: str, threads: int, seed: int = 0, tick: Tick = None
) -> dict[str, Any]:
    """Medians of five rounds, in each of which every contestant has its turn; the first round does not count.

    gb_per_s: bytes that the method loads over its time; bandwidth_share: of reading as many threads' worth in order.
    max_rel_error: max |out - ref| / max |ref| against Algorithm 1 in float64.
    """
    if heads % kv_heads:
        raise ValueError(f"heads = {heads}: must be a multiple of kv-heads = {kv_heads}")
    contest = Contest(tokens, heads, head_dim, kv_heads, threads, seed)
    r, k = min(16, head_dim), -(-tokens // 8)
    runs: dict[str, Callable[[], Any]] = {
        "read": contest.read_all,
        "dense": contest.dense,
        "sparf": lambda: contest.sparf(r, k),
        "sdpa": contest.torch_sdpa,
        "gather": lambda: contest.torch_gather(r, k),
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
    out, chosen, nbytes = runs[method]()
    error, others = contest.error(out, chosen, r, k)
    bandwidth = contest.read_all() / median["read"] / 1e9
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
        "torch_sdpa_f32_ms": median["sdpa"] * 1e3,
        "torch_gather_ms": median["gather"] * 1e3,
        "speedup_vs_sdpa": median["sdpa"] / median[method],
        "speedup_vs_gather": median["gather"] / median[method],
        "speedup_vs_dense": median["dense"] / median[method],
        "max_rel_error": error,
        "tokens_chosen_otherwise": others,
    }
