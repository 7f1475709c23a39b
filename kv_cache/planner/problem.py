"""Placement problem: which layers of each request are offloaded, the device memory needed, and the length of a step.

OrbitFlow (VLDB 2026), section 3.3: a request keeps all layers but every N-th one on the device. Offloaded layers are
fetched in each step into the one buffer of the request. Here fetches share a link by earliest deadline, the layer that
waits for them: no other order makes any layer start earlier.
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
    """Possible numbers of offloaded layers, ascending: none, or every N-th layer for each N from 2."""
    return (0, *sorted({layers // n for n in range(2, layers + 1)}))


@cache
def spread(layers: int) -> tuple[int, ...]:
    """Possible numbers of offloaded layers if they are spread evenly: all."""
    return tuple(range(layers + 1))


@cache
def offloaded_layers(layers: int, count: int) -> tuple[int, ...]:
    """Indices of `count` offloaded layers, ascending: every N-th one if `count` is layers // N, else nearly even."""
    stride = layers // count if count else 0
    if stride > 1 and layers // stride == count:
        return tuple(range(stride - 1, stride * count, stride))
    return tuple((i + 1) * layers // count - 1 for i in range(count))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a decode step of R requests.

    Attributes:
        compute: Time of each layer, (L,) seconds.
        fetch: Time to fetch one layer of each request on an idle link, (R,) seconds.
        blocks: KV blocks of each request in one layer, (R,).
        room: KV blocks that fit on the device.
        attend: Additional time of one layer of each request in drives, (R,) seconds; None without drives.
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
    def min_latency_s(self) -> float:
        """Lower bound of a step: layers that do not fit are fetched, or take longer in drives."""
        compute_s, lacking = float(self.compute.sum()), self.layers * int(self.blocks.sum()) - self.room
        fetched = float((self.fetch / self.blocks).min())  # lower bound of the seconds per block
        attended = float((self.attend / self.blocks).min()) if self.attend is not None else np.inf
        if lacking <= 0 or attended <= 0 or fetched == 0:
            return 0.0 if attended < 0 else compute_s
        over_link = float(lacking)
        if attended < np.inf:  # split so that the link is busy as long as the device and the drives
            over_link = min(lacking, (compute_s + attended * lacking) / (fetched + attended))
        return max(compute_s, fetched * over_link)


@dataclass(frozen=True, slots=True)
class Offload:
    """Option of a request: `count` layers are offloaded and either fetched or attended in drives.

    Attributes:
        count: Offloaded layers.
        in_drives: Whether they are attended in drives.
        buffers: Buffers for fetched layers; with two, the next layer is fetched while one is attended.
    """

    count: int
    in_drives: bool = False
    buffers: int = 1

    def __post_init__(self) -> None:
        if self.count < 0 or self.buffers < 1:
            raise ValueError(f"count = {self.count}, buffers = {self.buffers}: must be at least 0, and at least 1")


Options = Sequence[Sequence[Offload]]  # options of each request


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """Chosen option of each request, and the length of the step."""

    chosen: tuple[Offload, ...]
    latency_s: float


def device_layers(layers: int, option: Offload) -> int:
    """Layers of a request that need space on the device: resident layers, and buffers for fetched ones.

    The paper's buffer (Eq. 1) is the largest sum of one layer's, which is too small: a request's next layer arrives
    between two of its own offloaded layers.
    """
    buffers = 0 if option.in_drives else min(option.buffers, option.count)
    return layers - option.count + buffers


def blocks_on_device(costs: StepCosts, chosen: Sequence[Offload]) -> int:
    """Number of blocks that a placement needs on the device."""
    return sum(b * device_layers(costs.layers, option) for b, option in zip(costs.blocks.tolist(), chosen, strict=True))


@cache
def option_arrays(layers: int, option: Offload) -> tuple[I64, I64, F64]:
    """Arrays of an option for `PlacementProblem`: issued, due, and 1 for each layer attended in drives, (L,) each."""
    issued, due = np.full(layers, -1, np.int64), np.full(layers, -1, np.int64)
    in_drives, lie = np.zeros(layers), np.array(offloaded_layers(layers, option.count), np.int64)
    if option.in_drives:
        in_drives[lie] = 1
    else:
        due[: lie.size], issued[: lie.size] = lie, 0
        issued[option.buffers : lie.size] = lie[: -option.buffers] + 1
    return issued, due, in_drives


def _forms(layers: int, options: Sequence[Offload], width: int) -> tuple[Any, ...]:
    """Arrays of several options, padded to `width` options: (width, L) each."""
    every = [option_arrays(layers, option) for option in options] + [option_arrays(layers, Offload(0))] * (
        width - len(options)
    )
    return tuple(np.array(arrays) for arrays in zip(*every, strict=True))


def latency_s(costs: StepCosts, chosen: Sequence[Offload]) -> float:
    """Length of a step with the chosen options, seconds."""
    return PlacementProblem(costs, [[option] for option in chosen]).latency_s((0,) * len(chosen))


class PlacementProblem:
    """Costs and options as arrays for the solvers.

    Attributes:
        issued: Time from which an offloaded layer can be fetched: 0 is the start of the step, n the end of layer n
            (from 1). (R, options, L) int64, offloaded layers in ascending order, padded with -1.
        due: The layer that waits for the fetch, in the same order; -1 is padding.
        slower: Additional seconds of a layer that is attended in drives, (R, options, L).
        held: Blocks on the device, (R, options); unused options hold more than fits.
    """

    def __init__(self, costs: StepCosts, options: Options) -> None:
        self.costs, self.options = costs, options
        width, L = max(map(len, options)), costs.layers
        forms = {id(choices): _forms(L, choices, width) for choices in options}  # usually all requests share one list
        self.issued, self.due, in_drives = (np.stack([forms[id(choices)][k] for choices in options]) for k in range(3))
        self.slower = np.zeros(in_drives.shape)
        if in_drives.any():
            assert costs.attend is not None, "there are no drives"
            self.slower = in_drives * costs.attend[:, None, None]
        self.step = costs.compute, costs.fetch, self.issued, self.due, self.slower  # inputs of `run`
        self.held = np.full((costs.requests, width), costs.room + 1, np.int64)
        for request, choices in enumerate(options):
            self.held[request, : len(choices)] = costs.blocks[request] * np.array(
                [device_layers(L, offload) for offload in choices]
            )

    @property
    def choices(self) -> int:
        """Number of placements, including those that do not fit."""
        return math.prod(map(len, self.options))

    def latency_s(self, chosen: Sequence[int]) -> float:
        """Length of a step with option chosen[r] of each request r, seconds."""
        return float(self.ends(chosen)[-1])

    def ends(self, chosen: Sequence[int]) -> F64:
        """End times of the layers from index 1, (L + 1,) seconds; index 0 is the start of the step."""
        ends = np.zeros(self.costs.layers + 1)
        run(*self.step, np.array(chosen), ends)
        return ends

    def placement(self, chosen: Sequence[int]) -> PlacementResult:
        """Placement with option chosen[r] of each request r."""
        named = tuple(option[number] for option, number in zip(self.options, chosen, strict=True))
        return PlacementResult(named, self.latency_s(chosen))

    def local_optimum(self) -> list[int] | None:
        """Local optimum under changes of two requests, as a start for solvers; None if no placement fits."""
        chosen = self.held.argmin(axis=1)
        if self.held[np.arange(chosen.size), chosen].sum() > self.costs.room:
            return None
        _descend(*self.step, self.held, self.costs.room, chosen)
        indices: list[int] = chosen.tolist()
        return indices

    def optimum(self) -> PlacementResult | None:
        """Placement with the shortest step by branch and bound; None if no placement fits."""
        chosen = np.full(self.costs.requests, -1)
        _search(*self.step, self.held, self.costs.room, chosen)
        return None if chosen[0] < 0 else self.placement(chosen.tolist())


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})  # only maxima are reordered, which do not round
def run(compute, fetch, issued, due, slower, chosen, ends):  # type: ignore[no-untyped-def]
    """Compute the end times of layers into `ends`.

    A layer starts when the previous one has ended and all fetches due by then are complete. Fetches issued after the
    end of any layer and due by this one take their time from there.
    """
    load, at = np.zeros(ends.size), np.zeros(chosen.size, np.int64)
    for layer in range(compute.size):
        waits = False
        for request in range(chosen.size):
            now, option = at[request], chosen[request]
            if now < compute.size and due[request, option, now] == layer:
                waits = True
                for since in range(issued[request, option, now] + 1):
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
def _search(compute, fetch, issued, due, slower, held, room, best):  # type: ignore[no-untyped-def]
    """Find the best option of each request by depth-first search.

    A step is at least as long as the fetches due by any layer plus the layers from there on. Requests not yet decided
    only add to both.
    """
    R, options = held.shape
    L = compute.size
    fetched, added = np.zeros((R + 1, L)), np.zeros((R + 1, L))  # of decided requests: due by a layer, layers after it
    for layer in range(L - 1, -1, -1):
        added[0, layer] = compute[layer] + (added[0, layer + 1] if layer + 1 < L else 0.0)
    least = np.zeros(R + 1, np.int64)  # lower bound of the blocks of undecided requests
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
        run(compute, fetch, issued, due, slower, chosen, ends)
        if ends[L] < shortest:
            shortest = ends[L]
            best[:] = chosen


@njit(cache=True, nogil=True)
def _descend(compute, fetch, issued, due, slower, held, room, chosen):  # type: ignore[no-untyped-def]
    """Change the options of one request or two while the step becomes shorter."""
    R, options = held.shape
    ends = np.zeros(compute.size + 1)
    run(compute, fetch, issued, due, slower, chosen, ends)
    shortest, better = ends[-1], True
    while better:
        better = False
        for one in range(R):
            for other in range(min(one + 1, R - 1), R):  # the last request is paired with itself: a change of one
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
                        run(compute, fetch, issued, due, slower, chosen, ends)
                        if ends[-1] < shortest * (1 - 1e-12):
                            shortest, best, second_best, better = ends[-1], option, second, True
                chosen[other] = second_best
                chosen[one] = best
