"""Requests through hosts: tokens are conserved, more arrivals mean more work, a step is the model's.

partner of: eval/fleet/events.py, eval/fleet/machine.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec.network import network_named
from eval.fleet.drive_model import Rates
from eval.fleet.events import IDLE, serve
from eval.fleet.workload import Arrivals, backlog, hours_of


def run(machine, arrivals, hosts=2, seconds=1800.0):
    return serve(machine.requests(arrivals), machine.costs(), hosts, machine.groups, machine.slots, seconds)


def utilisation(served):
    return 1 - served.spent_s[:, IDLE].sum() / served.spent_s.sum()


@pytest.mark.parametrize("rate", (1, 20, 500))
def test_tokens_are_conserved(machine, trace, rate):
    arrivals = hours_of(trace, 0.5, rate, seed=3)
    served = run(machine, arrivals)
    ended = ~np.isnan(served.end_s)
    assert served.made.sum() == arrivals.output_tokens[ended].sum() + served.stored.sum()
    assert (served.first_s[ended] > arrivals.arrival_s[ended]).all()
    assert (served.end_s[ended] >= served.first_s[ended]).all()


def test_time_is_idle_or_spent(machine, trace):
    served = run(machine, hours_of(trace, 0.5, 5, seed=0))
    assert served.spent_s.min() >= 0
    ends_s = served.spent_s.sum(axis=1)
    assert (ends_s >= 1800).all() and (ends_s < 1810).all()


def test_double_arrivals_never_lower_utilisation(machine, trace):
    found = [utilisation(run(machine, hours_of(trace, 0.5, rate, seed=1))) for rate in (1, 2, 4, 8, 16, 64)]
    assert found == sorted(found) and found[-1] > 0.9


@pytest.mark.parametrize("drives", (1, 4, 8, 16))
def test_lone_request_takes_steps_of_model(machine, drives):
    host = machine.with_drives(drives)
    served = run(host, Arrivals(np.zeros(1), np.array([5000]), np.array([11])), hosts=1)
    rates = Rates.of(host.spec, host.model.shape, -(-8 // host.group))
    layers, slowest = host.model.layers, host.fitted.slowest(host.group)
    drive_s = sum(layers * slowest * rates.layer_s(host.fitted, [5000 + step]) for step in range(10))
    other_s = 10 * host.costs().by_batch[1].sum()
    assert served.end_s[0] - served.first_s[0] == pytest.approx(drive_s + other_s)
    assert served.first_s[0] >= host.cost.prefill_s(5000)


def test_same_seed_same_figures_other_seed_others(machine, trace):
    one, same, other = (run(machine, hours_of(trace, 2, 20, seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one.end_s, same.end_s)
    assert other.end_s.size != one.end_s.size or not np.array_equal(one.end_s, other.end_s, equal_nan=True)


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


def test_room_of_drives_is_checked(machine):
    with pytest.raises(ValueError, match="take a smaller --batch"):
        machine.with_drives(1).check_room(Arrivals(np.zeros(1), np.array([1 << 24]), np.array([1])))


def test_100_000_seconds_are_same_again(machine, trace):
    one, same = (run(machine, hours_of(trace, 100_000 / 3600, 4, seed=2), seconds=100_000) for _ in range(2))
    assert one.made.sum() == same.made.sum() > 0
    np.testing.assert_array_equal(one.spent_s, same.spent_s)
