"""Requests through hosts: tokens are conserved, more arrivals mean more work, and step times are those of the model.

partner of: eval/fleet/events.py, eval/fleet/machine.py, eval/fleet/simulation.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec.network import network_named
from kv_cache.admission import AdmissionConfig
from kv_cache.cost import CostModel, DriveModel, ServingCost
from kv_cache.engine import Engine
from kv_cache.planner.problem import Offload
from kv_cache.policies.in_storage import InStorage
from kv_cache.trace import Request
from vcsd_eval.fleet.drive_model import DriveRates
from vcsd_eval.fleet.events import IDLE, KV_HEADS, NETWORK, NO_PREFIXES, TPOT, TTFT, Costs, DriveStep
from vcsd_eval.fleet.machine import PREFILL_GRID, Scheme
from vcsd_eval.fleet.simulation import _Simulation, serve
from vcsd_eval.fleet.workload import Arrivals, backlog, periods


def run(machine, arrivals, hosts=2, seconds=1800.0):
    """arrivals: periods, or one."""
    given = [arrivals] if isinstance(arrivals, Arrivals) else arrivals
    return serve(given, machine.costs(8192), hosts, machine.groups, machine.slots, seconds)


def lone(prompt, output):
    return Arrivals.without_prefixes(np.zeros(1), np.array([prompt]), np.array([output]))


def utilisation(served):
    return 1 - served.spent_s[:, IDLE].sum() / served.spent_s.sum()


@pytest.mark.parametrize("rate", (1, 20, 500))
def test_tokens_are_conserved(machine, trace, rate):
    arrivals = list(periods(trace, 0.5, rate, seed=3))
    served = run(machine, arrivals)
    outputs = np.sort(np.concatenate([arrival.output_tokens for arrival in arrivals]))
    ended = int(served.ended.sum())
    done = served.made.sum() - served.stored.sum()
    assert outputs[:ended].sum() <= done <= outputs[outputs.size - ended :].sum()
    assert served.arrived == outputs.size
    assert served.latencies[TTFT].sum() >= ended


def test_all_tokens_are_generated_if_all_requests_end(machine, trace):
    arrivals = list(periods(trace, 0.2, 1, seed=3))
    served = run(machine, arrivals, seconds=36_000)
    assert served.ended.sum() == served.arrived and served.stored.sum() == 0
    assert served.made.sum() == sum(arrival.output_tokens.sum() for arrival in arrivals)
    assert served.input_tokens == sum(arrival.input_tokens.sum() for arrival in arrivals)
    long = sum((arrival.output_tokens > 1).sum() for arrival in arrivals)
    assert served.latencies.sum(axis=1).tolist() == [served.arrived, long]


def test_time_is_split_into_idle_and_busy(machine, trace):
    served = run(machine, periods(trace, 0.5, 5, seed=0))
    assert served.spent_s.min() >= 0
    ends_s = served.spent_s.sum(axis=1)
    assert (ends_s > 1800 - 1e-6).all() and (ends_s < 1810).all()


def test_double_arrivals_never_lower_utilisation(machine, trace):
    result = [utilisation(run(machine, periods(trace, 0.5, rate, seed=1))) for rate in (1, 2, 4, 8, 16, 64, 128)]
    assert result == sorted(result) and result[-1] > 0.9


@pytest.mark.parametrize("drives", (1, 4, 8, 16))
def test_lone_request_takes_steps_of_model(machine, drives):
    host = machine.with_drives(drives)
    served = run(host, lone(5000, 11), hosts=1, seconds=100)
    rates = DriveRates.of(host.spec, host.model.shape, -(-8 // host.group))
    layers, slowest = host.model.layers, host.fitted.slowest(host.group)
    drive_s = sum(layers * slowest * rates.layer_s(host.fitted, [5000 + step]) for step in range(10))
    other_s = 10 * host.costs(8192).by_batch[1].sum()
    spent = served.spent_s[0]
    assert spent.sum() - spent[IDLE] == pytest.approx(drive_s + other_s + served.percentile_s(TTFT, 50), rel=2e-3)
    assert served.percentile_s(TPOT, 50) == pytest.approx((drive_s + other_s) / 10, rel=2e-3)
    assert served.percentile_s(TTFT, 50) >= host.cost.prefill_s(5000) * 0.998


def test_figures_depend_only_on_seed(machine, trace):
    one, same, other = (run(machine, periods(trace, 2, 20, seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one.latencies, same.latencies)
    assert not np.array_equal(one.spent_s, other.spent_s)


@pytest.mark.parametrize("name", ("25gbe", "100gbe-rdma"))
def test_tenth_of_network_gives_no_more_tokens(machine, trace, name):
    network = network_named(name)
    slow = replace(network, bytes_per_s=network.bytes_per_s // 10)
    fast_tokens, slow_tokens = (
        run(replace(machine, network=each), backlog(trace, 4000, seed=0), hosts=1, seconds=600).made.sum()
        for each in (network, slow)
    )
    assert slow_tokens < fast_tokens


def test_groups_beyond_heads_serve_more_sequences(machine, trace):
    waiting = backlog(trace, 4000, seed=0)
    tokens = [run(machine.with_drives(each), waiting, 1, 300).made.sum() for each in (1, 2, 4, 8, 16, 32)]
    assert tokens == sorted(tokens)
    assert machine.with_drives(32).groups == 4 and machine.with_drives(12).groups == 1


def test_batch_beyond_drive_capacity_is_refused(machine):
    with pytest.raises(ValueError, match="take a smaller --batch"):
        machine.with_drives(1).check_room(1 << 24)


def test_long_run_repeats_with_same_seed(machine, trace):
    one, same = (run(machine, periods(trace, 100_000 / 3600, 4, seed=2), seconds=100_000) for _ in range(2))
    assert one.made.sum() == same.made.sum() > 0
    np.testing.assert_array_equal(one.spent_s, same.spent_s)


def test_memory_is_bounded_by_two_periods(machine, trace):
    """Arrays that grow with requests: the pool of waiting requests, and the known blocks."""
    sizes, count = [], 8
    prompts = [
        replace(request, hashes=tuple(range(100 * request.number, 100 * request.number + count)))
        for request in trace.requests
    ]
    trace = replace(trace, requests=[replace(prompt, input_tokens=512 * count + 1) for prompt in prompts])
    simulation = _Simulation(machine.costs(8192), 2, machine.groups, machine.slots)
    for arrivals in periods(trace, 24, 4, seed=2):
        simulation.arrive(arrivals)
        sizes.append((simulation.pool.after.size, simulation.prefixes.blocks.size, len(simulation.prefixes.holders)))
    blocks = count * len(trace.requests)
    assert len(sizes) > 100 and sizes[-1] == sizes[len(sizes) // 2]
    assert sizes[-1][1:] == (2 * blocks, 2 * blocks)


def with_prefixes(blocks, gap_s=100.0, block_tokens=512):
    """Requests with full blocks by number, and some tokens of their own."""
    tokens = np.array([len(block) * block_tokens + 100 for block in blocks])
    return Arrivals(
        np.arange(len(blocks)) * gap_s, tokens, np.full(len(blocks), 2), np.concatenate(blocks).astype(np.int64),
        np.cumsum([len(block) for block in blocks]), block_tokens,
    )  # fmt: skip


@pytest.mark.parametrize(("prefixes", "reused"), [("none", 0), ("local", 6), ("copied", 6)])
def test_prefix_of_idle_host_is_reused(machine, prefixes, reused):
    host = replace(machine, scheme=Scheme(prefixes=prefixes))
    served = run(host, with_prefixes([[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 5], [6]]))
    assert served.reused_tokens == reused * 512 and served.copied_tokens == 0


def test_prefix_of_busy_host_is_recomputed_or_copied(machine):
    """Eight requests with the same prompt at once go to all groups of both hosts."""
    two = replace(with_prefixes([[0, 1]] * 8, gap_s=0.0), output_tokens=np.full(8, 2))
    local, copied = (run(replace(machine, scheme=Scheme(prefixes=each)), two) for each in ("local", "copied"))
    assert copied.reused_tokens >= local.reused_tokens
    assert copied.reused_tokens == 7 * 1024 and 0 < copied.copied_tokens < copied.reused_tokens


def test_prefix_is_forgotten_after_two_periods(machine):
    host = replace(machine, scheme=Scheme(prefixes="local"))
    first = with_prefixes([[0, 1, 2]])
    later = [replace(with_prefixes([[0, 1, 2]]), arrival_s=np.array([200.0 * each]), shared=2) for each in (1, 2, 3)]
    served = run(host, [replace(first, shared=2), *later])
    assert served.reused_tokens == 3 * 2 * 512  # system prompts only: own content is new in each period


def test_lone_sequence_is_not_divided(machine):
    one, two = (run(replace(machine, scheme=Scheme(each)), lone(5000, 11), 1, 100) for each in (1, 2))
    np.testing.assert_allclose(two.spent_s, one.spent_s)


def test_half_batches_hide_shorter_stage(machine):
    """Eight equal sequences in one group: a step takes its longer stage, and the first part of the shorter one."""
    host = machine.with_drives(8)
    batch = Arrivals.without_prefixes(np.zeros(8), np.full(8, 3000), np.full(8, 401))
    steps_s, stages = [], []
    for each in (1, 2):
        divided = replace(host, scheme=Scheme(each))
        steps_s.append(run(divided, batch, 1, 200).percentile_s(TPOT, 1))
        gpu_s, *rest_s = divided.costs(8192).by_batch[8]
        rates = DriveRates.of(host.spec, host.model.shape, 1)
        drive_s = host.fitted.slowest(8) * 32 * rates.layer_s(host.fitted, [3200] * 8)
        drive_s += host.fitted.slowest(8) * 32 * (each - 1) * host.fitted.command_s
        stages.append((gpu_s, sum(rest_s) + drive_s))
    assert steps_s[0] == pytest.approx(sum(stages[0]), rel=0.05)
    assert steps_s[1] == pytest.approx(max(stages[1]) + min(stages[1]) / 64, rel=0.05)
    assert steps_s[1] < steps_s[0]


def test_token_shards_shorten_step_of_few_sequences(machine):
    request = lone(8000, 101)
    one, two, both = (
        run(replace(machine, scheme=scheme), request, 1, 200)
        for scheme in (Scheme(), Scheme(token_shards=2), Scheme(token_shards=2, two_level=True))
    )
    steps_s = [each.percentile_s(TPOT, 50) for each in (one, two, both)]
    assert steps_s[1] < 0.7 * steps_s[0] and steps_s[2] <= steps_s[1]
    assert two.spent_s[0, KV_HEADS] < one.spent_s[0, KV_HEADS]


def test_late_kv_uses_less_network_time(machine):
    request = lone(8000, 101)
    each_layer, late = (run(replace(machine, scheme=Scheme(late_kv=each)), request, 1, 200) for each in (False, True))
    assert late.spent_s[0, NETWORK] < each_layer.spent_s[0, NETWORK]


class TakesTurns(InStorage):
    """A prompt, then a step of all requests, as hosts of a rack do; keeps the requests that it has seen."""

    def __init__(self):
        self.decoded, self.seen = True, {}

    def schedule(self, s):
        self.seen |= {sequence.number: sequence for sequence in (*s.sequences, *filter(None, [s.filling]))}
        in_drives = Offload(s.cost.layers, in_drives=True)
        self.decoded = not (s.filling and (self.decoded or not s.sequences))
        return s.output(s.sequences, [in_drives] * len(s.sequences)) if self.decoded else s.prefill(in_drives)


def engines_serve(cost, arrivals, hosts, slots, horizon_s):
    """The requests on an `Engine` for each host, behind the rack's router; seconds to first tokens, and tokens made."""
    engines = [Engine(TakesTurns(), cost, admission=AdmissionConfig(max_batch_size=slots)) for _ in range(hosts)]
    load, of_host = np.zeros(hosts, np.int64), {}

    def advance(host, until_s):
        engine = engines[host]
        while engine.now_s < until_s:
            running = {sequence.number: sequence for sequence in engine._admitted()}
            if not engine.step():
                engine.now_s = until_s
            load[host] -= sum(s.request.input_tokens for s in running.values() if s.finished)

    columns = zip(arrivals.arrival_s, arrivals.input_tokens, arrivals.output_tokens, strict=True)
    for number, (arrival_s, inputs, outputs) in enumerate(columns):
        for host in range(hosts):
            advance(host, arrival_s)
        host = int(np.argmin(load))
        load[host] += inputs
        of_host[number] = host
        engines[host].add(Request(number=number, arrival=0.0, input_tokens=int(inputs), output_tokens=int(outputs)))
    for host in range(hosts):
        advance(host, horizon_s)
    times = {
        number: np.concatenate([ends for ends, _ in engines[host].policy.seen[number].bursts])
        for number, host in of_host.items()
        if number in engines[host].policy.seen and engines[host].policy.seen[number].bursts
    }
    first_s = [times[number][0] - arrival_s for number, arrival_s in enumerate(arrivals.arrival_s) if number in times]
    return np.array(first_s), sum(int((ends <= horizon_s).sum()) for ends in times.values())


@pytest.mark.parametrize("gap_s", [0.2, 1.0, 4.0])
def test_a_rack_takes_the_time_of_the_serving_engine(gap_s):
    """Of four hosts under the same costs: too many requests, about as many as they can serve, and few."""
    layers, hosts, slots, generator = 32, 4, 6, np.random.default_rng(0)
    step_s, token_s, call_s, prompt_s = 4e-3, 2e-7, 2e-5, 1e-4
    compute = CostModel.fitted(layers, step_s=step_s, token_s=0.0, prefill_tokens_per_s=1 / prompt_s)
    drives = DriveModel(bytes_per_s=1e9, token_bytes=1e9 * token_s, call_s=call_s)
    cost = ServingCost(name="rack", compute=compute, fetch_s=0.0, fetch_token_s=0.0, room_blocks=1 << 20, drives=drives)
    grid = np.arange(0, 1 << 13, PREFILL_GRID)
    costs = Costs(
        by_batch=np.array([[step_s + layers * token_s * batch, 0, 0] for batch in range(slots + 1)]),  # with new tokens
        drive=DriveStep(part_s=layers * call_s, flash_s=0.0, engine_s=layers * token_s, tail_s=0.0),
        slowest=1.0,
        micro_batches=1,
        layers=layers,
        prefill_grid=PREFILL_GRID,
        new_s=prompt_s * grid,
        seen_s=np.zeros(grid.size),
        write_s=np.zeros(2),
        read_s=np.zeros(2),
        copy_s=np.zeros(2),
        prefixes=NO_PREFIXES,
    )
    count = int(200 / gap_s)
    arrivals = Arrivals.without_prefixes(
        np.cumsum(generator.exponential(gap_s, count)),
        generator.integers(200, 6000, count),
        generator.integers(2, 400, count),
    )
    horizon_s = float(arrivals.arrival_s[-1])
    served = serve([arrivals], costs, hosts, 1, slots, horizon_s)
    first_s, tokens = engines_serve(cost, arrivals, hosts, slots, horizon_s)
    assert served.made.sum() == pytest.approx(tokens, rel=0.005)
    for percent in (10, 50, 90, 99):
        wanted_s = np.percentile(first_s, percent, method="inverted_cdf")
        assert served.percentile_s(TTFT, percent) == pytest.approx(wanted_s, rel=0.005)
