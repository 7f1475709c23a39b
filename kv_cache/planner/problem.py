"""Which layers of which request lie away from the device, what that takes of its memory, and how long a step is.

OrbitFlow (VLDB 2026), section 3.3: a request keeps all layers but every N-th one on the device; those that lie away are
fetched in each step, each into the one buffer that a request has. Fetches share a link by earliest deadline here, the
layer that waits for them: no order makes any layer start earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64, I64

BLOCK_TOKENS = 16


@cache
def strides(layers: int) -> tuple[int, ...]:
    """How many layers can lie away where every N-th one does, N from 2 up, and none: ascending."""
    return (0, *sorted({layers // n for n in range(2, layers + 1)}))


@cache
def spread(layers: int) -> tuple[int, ...]:
    """The same where any number of layers may, evenly spread."""
    return tuple(range(layers + 1))


@cache
def away(layers: int, count: int) -> tuple[int, ...]:
    """Which layers lie away, ascending: every N-th one where `count` is layers // N, else the nearest to even."""
    stride = layers // count if count else 0
    if stride > 1 and layers // stride == count:
        return tuple(range(stride - 1, stride * count, stride))
    return tuple((i + 1) * layers // count - 1 for i in range(count))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes of a batch of R requests. All times in seconds.

    compute: of each layer, (L,). fetch: of one layer of each request, with the link for itself, (R,). blocks: of each
    request in a layer, (R,). room: blocks on the device. attend: of one layer of each request in a drive, (R,); None
    where there are no drives.
    """

    compute: F64
    fetch: F64
    blocks: I64
    room: int
    attend: F64 | None = None

    @property
    def layers(self) -> int:
        return self.compute.size

    @property
    def requests(self) -> int:
        return self.blocks.size

    @property
    def least_s(self) -> float:
        """No placement that fits has a shorter step: layers that must leave are fetched or take longer in drives."""
        compute_s, lacking = float(self.compute.sum()), self.layers * int(self.blocks.sum()) - self.room
        fetched = float((self.fetch / self.blocks).min())  # seconds of a block, at the least
        attended = float((self.attend / self.blocks).min()) if self.attend is not None else np.inf
        if lacking <= 0 or attended <= 0 or fetched == 0:
            return 0.0 if attended < 0 else compute_s
        over_link = float(lacking)
        if attended < np.inf:  # so many that the link is busy as long as the device and the drives
            over_link = min(lacking, (compute_s + attended * lacking) / (fetched + attended))
        return max(compute_s, fetched * over_link)


@dataclass(frozen=True, slots=True)
class Offload:
    """What may become of a request: `count` layers lie away, and are fetched or, in drives, attended there.

    buffers: for layers that are fetched; with two the next one comes while one is attended.
    """

    count: int
    in_drives: bool = False
    buffers: int = 1

    def __post_init__(self) -> None:
        if self.count < 0 or self.buffers < 1:
            raise ValueError(f"count = {self.count}, buffers = {self.buffers}: must be at least 0, and at least 1")


Options = Sequence[Sequence[Offload]]  # of each request


@dataclass(frozen=True, slots=True)
class Placed:
    """What was chosen for each request, and how long a step takes then."""

    chosen: tuple[Offload, ...]
    latency_s: float


def on_device(layers: int, option: Offload) -> int:
    """Layers of a request that the device holds room for: those that stay, and a buffer where some are fetched.

    The paper's buffer (Eq. 1) is the largest sum of one layer's, which is too small: a request's next layer arrives
    between two of its own that lie away.
    """
    buffers = 0 if option.in_drives else min(option.buffers, option.count)
    return layers - option.count + buffers


def blocks_on_device(costs: StepCosts, chosen: Sequence[Offload]) -> int:
    """Blocks that a placement holds on the device."""
    return sum(b * on_device(costs.layers, option) for b, option in zip(costs.blocks.tolist(), chosen, strict=True))


@cache
def form(layers: int, option: Offload) -> tuple[I64, I64, F64]:
    """What `PlacementProblem` has of an option: asked and due, (L,), and 1 for the layers that drives attend, (L,)."""
    asked, due = np.full(layers, -1, np.int64), np.full(layers, -1, np.int64)
    in_drives, lie = np.zeros(layers), np.array(away(layers, option.count), np.int64)
    if option.in_drives:
        in_drives[lie] = 1
    else:
        due[: lie.size], asked[: lie.size] = lie, 0
        asked[option.buffers : lie.size] = lie[: -option.buffers] + 1
    return asked, due, in_drives


def _forms(layers: int, options: Sequence[Offload], width: int) -> tuple[Any, ...]:
    """The same of several, filled up to so many: (width, L) each."""
    every = [form(layers, option) for option in options] + [form(layers, Offload(0))] * (width - len(options))
    return tuple(np.array(each) for each in zip(*every, strict=True))


def latency_s(costs: StepCosts, chosen: Sequence[Offload]) -> float:
    """How long a step takes."""
    return PlacementProblem(costs, [[option] for option in chosen]).latency_s((0,) * len(chosen))


class PlacementProblem:
    """Costs and options as arrays, for those who search.

    asked, due: of each request, option and layer away, in ascending order, the layer from whose end on it can be
    fetched (0: the step's begin, else its number from 1) and the layer that waits for it; -1 behind the last. slower:
    seconds that a layer takes longer, since it is attended in drives, (R, options, L). held: blocks, (R, options);
    options that a request does not have hold more than there is room for.
    """

    def __init__(self, costs: StepCosts, options: Options) -> None:
        self.costs, self.options = costs, options
        width, L = max(map(len, options)), costs.layers
        known = {id(mine): _forms(L, mine, width) for mine in options}  # most often all have the same
        self.asked, self.due, in_drives = (np.stack([known[id(mine)][k] for mine in options]) for k in range(3))
        self.slower = np.zeros(in_drives.shape)
        if in_drives.any():
            assert costs.attend is not None, "there are no drives"
            self.slower = in_drives * costs.attend[:, None, None]
        self.step = costs.compute, costs.fetch, self.asked, self.due, self.slower  # what its length follows from
        self.held = np.full((costs.requests, width), costs.room + 1, np.int64)
        for request, mine in enumerate(options):
            self.held[request, : len(mine)] = costs.blocks[request] * np.array([on_device(L, each) for each in mine])

    @property
    def choices(self) -> int:
        """How many placements there are, whether they fit or not."""
        return math.prod(map(len, self.options))

    def latency_s(self, chosen: Sequence[int]) -> float:
        """How long a step takes with option chosen[r] of each request."""
        return float(self.ends(chosen)[-1])

    def ends(self, chosen: Sequence[int]) -> F64:
        """When layers end, counted from 1; 0 is the step's begin, (L + 1,)."""
        ends = np.zeros(self.costs.layers + 1)
        run(*self.step, np.array(chosen), ends)
        return ends

    def latencies_s(self, choices: I64) -> F64:
        """How long a step takes with each of choices (N, R)."""
        out = np.zeros(len(choices))
        _run_all(*self.step, choices, out)
        return out

    def placement(self, chosen: Sequence[int]) -> Placed:
        """What that is."""
        named = tuple(mine[number] for mine, number in zip(self.options, chosen, strict=True))
        return Placed(named, self.latency_s(chosen))

    def good(self) -> list[int] | None:
        """A choice that no change of two requests makes better, to start from; None where none fits."""
        chosen = self.held.argmin(axis=1)
        if self.held[np.arange(chosen.size), chosen].sum() > self.costs.room:
            return None
        _descend(*self.step, self.held, self.costs.room, chosen)
        found: list[int] = chosen.tolist()
        return found

    def best(self) -> Placed | None:
        """The placement with the shortest step, by looking at all that could be it; None where none fits."""
        chosen = np.full(self.costs.requests, -1)
        _search(*self.step, self.held, self.costs.room, chosen)
        return None if chosen[0] < 0 else self.placement(chosen.tolist())


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})  # the largest of numbers: no rounding follows the order
def run(compute, fetch, asked, due, slower, chosen, ends):  # type: ignore[no-untyped-def]
    """When layers end. A layer starts when the one before has ended and what is due by then has been fetched: of the
    fetches asked for from the end of a layer on, all that are due up to this one take their time from there.
    """
    load, at = np.zeros(ends.size), np.zeros(chosen.size, np.int64)
    for layer in range(compute.size):
        waits = False
        for request in range(chosen.size):
            now, option = at[request], chosen[request]
            if now < compute.size and due[request, option, now] == layer:
                waits = True
                for since in range(asked[request, option, now] + 1):
                    load[since] += fetch[request]
                at[request] += 1
        start, took = ends[layer], compute[layer]
        if waits:
            for since in range(layer + 1):
                start = max(start, ends[since] + load[since])
        for request in range(chosen.size):
            took += slower[request, chosen[request], layer]
        ends[layer + 1] = start + took


@njit(cache=True, nogil=True)
def _run_all(compute, fetch, asked, due, slower, choices, out):  # type: ignore[no-untyped-def]
    ends = np.zeros(compute.size + 1)
    for number in range(choices.shape[0]):
        run(compute, fetch, asked, due, slower, choices[number], ends)
        out[number] = ends[compute.size]


@njit(cache=True, nogil=True)
def _search(compute, fetch, asked, due, slower, held, room, best):  # type: ignore[no-untyped-def]
    """The best option of each request, by depth-first search.

    A step is at least as long as the fetches due up to any layer and the layers from there on; what is left to choose
    only adds to both.
    """
    R, options = held.shape
    L = compute.size
    fetched, added = np.zeros((R + 1, L)), np.zeros((R + 1, L))  # of the requests so far: due up to a layer, from it on
    for layer in range(L - 1, -1, -1):
        added[0, layer] = compute[layer] + (added[0, layer + 1] if layer + 1 < L else 0.0)
    least = np.zeros(R + 1, np.int64)  # blocks of the requests from one on, at the least
    for request in range(R - 1, -1, -1):
        least[request] = least[request + 1] + held[request].min()
    used, chosen, ends = np.zeros(R + 1, np.int64), np.full(R, -1), np.zeros(L + 1)
    shortest, depth = np.inf, 0
    while depth >= 0:
        chosen[depth] += 1
        option = chosen[depth]
        if option == options:
            chosen[depth] = -1
            depth -= 1
            continue
        used[depth + 1] = used[depth] + held[depth, option]
        if used[depth + 1] + least[depth + 1] > room:
            continue
        at, volume, late, bound = 0, 0.0, 0.0, 0.0
        for layer in range(L - 1, -1, -1):
            late += slower[depth, option, layer]
            added[depth + 1, layer] = added[depth, layer] + late
        for layer in range(L):
            if at < L and due[depth, option, at] == layer:
                volume += fetch[depth]
                at += 1
            fetched[depth + 1, layer] = fetched[depth, layer] + volume
            bound = max(bound, fetched[depth + 1, layer] + added[depth + 1, layer])
        if bound >= shortest:
            continue
        if depth + 1 < R:
            depth += 1
            continue
        ends[0] = 0.0
        run(compute, fetch, asked, due, slower, chosen, ends)
        if ends[L] < shortest:
            shortest = ends[L]
            best[:] = chosen


@njit(cache=True, nogil=True)
def _descend(compute, fetch, asked, due, slower, held, room, chosen):  # type: ignore[no-untyped-def]
    """Change the options of one request, or of two, as long as the step becomes shorter."""
    R, options = held.shape
    ends = np.zeros(compute.size + 1)
    run(compute, fetch, asked, due, slower, chosen, ends)
    shortest, better = ends[-1], True
    while better:
        better = False
        for one in range(R):
            for other in range(min(one + 1, R - 1), R):  # the last one, and one alone, with itself
                best, second_best = chosen[one], chosen[other]
                for second in range(options):
                    for option in range(options):
                        chosen[other] = second
                        chosen[one] = option
                        taken = 0
                        for request in range(R):
                            taken += held[request, chosen[request]]
                        if taken > room:
                            continue
                        run(compute, fetch, asked, due, slower, chosen, ends)
                        if ends[-1] < shortest * (1 - 1e-12):
                            shortest, best, second_best, better = ends[-1], option, second, True
                chosen[other] = second_best
                chosen[one] = best
