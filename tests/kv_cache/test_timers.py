"""An iteration's time by one sum, by the compiled chain and by events, which have to agree.

partner of: kv_cache/event_timer.py, kv_cache/transfer/chain.py
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kv_cache import Offload, Policy, SchedulerOutput
from kv_cache.block_table import BlockKey
from kv_cache.cost import CostModel, ServingCost
from kv_cache.event_timer import PART, EventTimer, machine_of
from kv_cache.transfer.chain import decode_s
from vcsd_eval.serving.machines import COSTS, drives

STEPS = 4
SAME = 1e-6


def costs(draw: random.Random) -> ServingCost:
    """A machine: one of the profiles, or a random variant of it, most with drives."""
    cost = COSTS[draw.choice(sorted(COSTS))]
    if draw.random() < 0.5:
        lines = CostModel.fitted(
            draw.randint(2, 48), step_s=draw.uniform(0.01, 0.1), token_s=draw.uniform(0, 1e-5), prefill_tokens_per_s=6e3
        )
        cost = replace(cost, compute=lines, fetch_s=draw.uniform(0, 0.05), fetch_token_s=draw.uniform(1e-6, 1e-4))
    cost = replace(cost, room_blocks=1 << 30)
    return replace(cost, drives=drives(draw.randint(1, 4))) if draw.random() < 0.7 else cost


def by_events(cost: ServingCost, tokens: list[int], options: list[Offload], steps: int) -> list[float]:
    """Seconds of each step by events. tokens: attended in the first one, of each request."""
    machine = machine_of(cost)
    at_once = replace(machine.links["down"], bytes_per_s=1e18)  # the chain's new rows are at home when they are made
    timer = EventTimer(Policy(), cost, replace(machine, links={**machine.links, "down": at_once}))
    rows = range(len(tokens))
    output = SchedulerOutput(num_scheduled_tokens=dict.fromkeys(rows, 1), placement=dict(enumerate(options)))
    for row, held in enumerate(tokens):
        for layer, (tier,) in enumerate(output.tiers(row, cost.layers)):
            timer.runner.table.add(BlockKey(row, layer, PART), round(cost.token_bytes), tier, held - 1)
    now_s, took = 0.0, []
    for _ in range(steps):
        took.append(timer.run(now_s, output.num_scheduled_tokens, {}, output))
        now_s += took[-1]
    return took


@pytest.mark.parametrize("seed", [*range(50), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(50, 500))])
def test_chain_and_events_agree(seed: int) -> None:
    draw = random.Random(seed)
    cost = costs(draw)
    tokens = [draw.randint(2, 20_000) for _ in range(draw.randint(1, 4))]
    options = []
    for _ in tokens:
        count = draw.randint(0, cost.layers)
        options.append(Offload(count, draw.random() < 0.4 and cost.drives is not None, draw.choice((1, 1, 2))))
    expected = decode_s(cost, tokens, options, STEPS)
    assert by_events(cost, tokens, options, STEPS) == pytest.approx(list(expected), rel=SAME)


@pytest.mark.parametrize("seed", range(20))
def test_jump_equals_chain_if_all_layers_are_on_device(seed: int) -> None:
    draw = random.Random(seed)
    cost = costs(draw)
    tokens = [draw.randint(2, 20_000) for _ in range(draw.randint(1, 8))]
    stay = [Offload(0)] * len(tokens)
    jump = cost.compute.decode_s(len(tokens), sum(tokens))
    assert decode_s(cost, tokens, stay, 1)[0] == pytest.approx(jump, rel=1e-12)
    assert by_events(cost, tokens, stay, 1) == pytest.approx([jump], rel=SAME)
