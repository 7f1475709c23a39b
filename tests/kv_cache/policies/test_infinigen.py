"""InfiniGen: a fraction of the tokens crosses the link, and speculation takes time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from kv_cache import DEVICE, HOST, PolicyError
from kv_cache.block_table import BlockKey, BlockTable
from kv_cache.engine import Engine
from kv_cache.hardware import Tier
from kv_cache.limits import TierLimits
from kv_cache.policies import moves_blocks, policy_of
from kv_cache.policies.infinigen import WHOLE, InfiniGen
from kv_cache.simulation import engine_for
from kv_cache.trace import Request, Trace
from vcsd_eval.serving.machines import A5000

PROMPT, STEPS = 4000, 3
LAYERS = A5000.layers
TRACE = Trace(name="one", requests=[Request(number=0, arrival=0.0, input_tokens=PROMPT, output_tokens=STEPS + 1)])


def served(policy, host: int | None = None) -> Engine:
    limits = TierLimits(int(A5000.room_blocks * 16 * LAYERS * A5000.token_bytes), host)
    engine = engine_for(TRACE, A5000, policy, 1.0, tiers=limits, events=True)
    engine.run()
    assert engine.events is not None
    engine.events.runner.table.check()
    return engine


def fetched(engine: Engine) -> int:
    return engine.events.runner.traffic[f"{HOST}>{DEVICE}"].bytes


@pytest.mark.parametrize("share", [0.05, 0.1, 1.0])
def test_selected_share_goes_over_the_link(share):
    stored = range(PROMPT, PROMPT + STEPS)
    tokens = sum(WHOLE * length + (LAYERS - WHOLE) * ceil(share * length) for length in stored)
    assert fetched(served(InfiniGen(share=share))) == tokens * A5000.token_bytes


def test_new_tokens_are_written_to_host_memory():
    written = served(InfiniGen()).events.runner.traffic[f"{DEVICE}>{HOST}"].bytes
    assert written == (PROMPT + STEPS) * LAYERS * A5000.token_bytes


def test_step_over_a_slow_link_takes_the_share_of_all_tokens():
    slow = replace(A5000, fetch_s=0.0, fetch_token_s=1e-3)
    runs = (engine_for(TRACE, slow, policy_of(name), 1.0, events=True).run() for name in ("infinigen", "deepspeed"))
    sparse, dense = (run.sequences[0].step_s[-1] for run in runs)  # earlier ones wait for the prompt's copies
    assert sparse / dense == pytest.approx((WHOLE + 0.1 * (LAYERS - WHOLE)) / LAYERS, rel=0.1)


def test_speculation_reads_partial_keys():
    """Nothing waits where the link is fast: a step differs by the keys that speculation reads."""
    fast = replace(A5000, fetch_s=0.0, fetch_token_s=1e-9)
    free, paid = (
        engine_for(TRACE, fast, InfiniGen(partial=partial), 1.0, events=True).run().decode_s for partial in (0.0, 0.4)
    )
    tokens = STEPS * (PROMPT + (STEPS + 1) / 2)
    expected = 0.2 * (LAYERS - WHOLE) / LAYERS * tokens * A5000.compute.token_s
    assert paid - free == pytest.approx(expected, rel=0.01)


def test_layers_beyond_host_memory_are_read_from_files():
    half = int(PROMPT * LAYERS * A5000.token_bytes / 2)
    engine = served(InfiniGen(), host=half)
    assert engine.events.runner.table.peak[HOST] <= half
    assert engine.events.runner.traffic[f"direct>{DEVICE}"].bytes > 0


def test_selection_takes_device_memory_until_attended():
    block = BlockKey("r", 0)
    table = BlockTable({DEVICE: Tier(DEVICE, 100, attends=True), HOST: Tier(HOST)})
    table.add(block, 10, HOST, 20)
    with pytest.raises(PolicyError, match="host does not attend"):
        table.attend([block], HOST, 0)
    table.select(block, HOST, DEVICE, 4)
    assert table.used[DEVICE] == 40 and table.tiers_of(block) == (HOST,)
    with pytest.raises(PolicyError, match="4 of its 20 tokens: select 1 to all of them, once"):
        table.select(block, HOST, DEVICE, 4)
    table.attend([block], HOST, 0)
    table.end_attention([block])
    assert table.used[DEVICE] == 0
    table.select(block, HOST, DEVICE, 4)
    table.free("r")
    assert table.used == {DEVICE: 0, HOST: 0}


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.1}, {"partial": -1}])
def test_invalid_selection_fractions_are_refused(wrong):
    with pytest.raises(ValueError, match="share = "):
        InfiniGen(**wrong)


def test_infinigen_moves_no_real_blocks():
    """A server fetches all tokens instead."""
    assert not moves_blocks("infinigen")
