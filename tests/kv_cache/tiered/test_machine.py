"""What copies and iterations take, and what is refused."""

import pytest

from kv_cache.tiered.machine import Tier
from tests.kv_cache.tiered.small import machine


def test_whole_blocks_are_stored():
    assert [machine().bytes_of(tokens) for tokens in (0, 1, 10, 11)] == [0, 10_000, 10_000, 20_000]


def test_a_copy_has_a_start_and_a_rate():
    one = machine(host_start_s=0.5, flash_start_s=0.25)
    assert one.copy_s(Tier.HOST, 10**7) == pytest.approx(1.5)
    assert one.copy_s(Tier.FLASH, 10**6) == pytest.approx(1.25)
    free = one.without_copies()
    assert free.copy_s(Tier.HOST, 10**12) < 1e-9
    assert free.rooms() == one.rooms()


def test_an_iteration_reads_weights_and_k_and_v_and_prefills():
    assert machine().iteration_s([], []) == pytest.approx(0.01)
    assert machine().iteration_s([400, 600], []) == pytest.approx(0.011)
    assert machine().iteration_s([], [40, 60]) == pytest.approx(0.02)


def test_what_is_off_is_named():
    with pytest.raises(ValueError, match="host_bytes = 0: must be at least 1"):
        machine(host_bytes=0)
