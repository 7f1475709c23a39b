"""Placements within a time limit: they fit, are near the optimum, and are reproducible.

partner of: kv_cache/planner/local_search.py
"""

from dataclasses import replace

import numpy as np
import pytest

from kv_cache.planner.local_search import local_search
from kv_cache.planner.problem import BLOCK_TOKENS, Offload, PlacementProblem, blocks_on_device, strides
from kv_cache.policies.orbitflow import EXACT
from vcsd_eval.serving.machines import A5000

ROOM = 0.4, 1.1  # fractions of a batch's KV cache that the device holds


def instance(generator, layers, requests):
    """A batch of random lengths at random progress, on a device that holds a part of it."""
    lengths = [int(generator.integers(96, 145)) << int(generator.integers(0, 7)) for _ in range(2 * requests)]
    pairs = zip(lengths[::2], lengths[1::2], strict=True)
    tokens = [prompt + int(generator.random() * answer) for prompt, answer in pairs]
    blocks = sum(-(-count // BLOCK_TOKENS) for count in tokens)
    compute = replace(A5000.compute, layers=layers)
    cost = replace(A5000, compute=compute, room_blocks=max(1, int(blocks * generator.uniform(*ROOM))))
    return PlacementProblem(cost.costs(tokens), [[Offload(count) for count in strides(layers)]] * requests)


def problems(count, layers, requests, seed=0):
    generator = np.random.default_rng(seed)
    return [instance(generator, layers, requests) for _ in range(count)]


@pytest.mark.parametrize(("layers", "requests"), [(32, 1), (32, 3), (32, 6), (80, 4)])
def test_local_search_is_near_the_optimum(layers, requests):
    longer = []
    for problem in problems(30, layers, requests):
        assert problem.choices <= EXACT
        local, best = local_search(problem), problem.optimum()
        assert (local is None) == (best is None)
        if local and best:
            assert blocks_on_device(problem.costs, local.chosen) <= problem.costs.room
            longer.append(local.latency_s / best.latency_s - 1)
    assert min(longer) > -1e-12 and np.mean(longer) < 0.03 and np.median(longer) < 1e-3


def test_local_search_is_near_the_integer_program():
    pytest.importorskip("highspy")
    from kv_cache.planner.ilp import solve

    longer = []
    for problem in problems(8, 32, 10):
        assert problem.choices > EXACT
        local, best = local_search(problem), solve(problem, 0.01, 5.0)
        assert (local is None) == (best is None)
        if local and best:
            longer.append(local.latency_s / best.latency_s - 1)
    assert np.mean(longer) < 0.05


def test_more_effort_is_not_worse_and_is_deterministic():
    none, some, all_of_it = [], [], []
    for problem in problems(6, 40, 16):
        results = [local_search(problem, effort) for effort in (0, 3_000, 30_000)]
        if results[0]:
            for steps, result in zip((none, some, all_of_it), results, strict=True):
                steps.append(result.latency_s)
            assert local_search(problem, 30_000) == results[2]
    assert sum(none) > sum(some) > sum(all_of_it)


def test_lower_bound_is_below_every_placement():
    for requests in (1, 2, 4):
        for problem in problems(20, 32, requests, seed=requests):
            best = problem.optimum()
            if best:
                assert problem.costs.min_latency_s <= best.latency_s * (1 + 1e-9)
