"""Configurations on a small model: targets of their reads, and effects of pipelining and memory limits."""

from itertools import pairwise

import pytest

from tests.eval.papers.dual_blade.setups import small_setup
from vcsd_eval.papers.dual_blade.machine import DMA, GIB, READ, drives, machine
from vcsd_eval.papers.dual_blade.systems import SYSTEMS, alone_ms, infer, trial_s

A = drives()["A"]


def limit_for(setup, layers):
    """A limit under which `layers` layers stay in the page cache, with room for half of another one."""
    bytes_ = (layers + 0.5) * setup.layer_bytes(setup.final_tokens)
    return 1 + (bytes_ + setup.layer_bytes(setup.final_tokens)) / GIB


@pytest.mark.parametrize(
    ("name", "share"),
    [("baseline", 0), ("cache-policy-only", 0.5), ("nvme-direct-only", 0), ("dual-blade", 0.5), ("o-direct", 0.5)],
)
def test_cached_fraction_equals_expected(name, share):
    setup = small_setup()
    assert infer(setup, SYSTEMS[name], A, limit_for(setup, 4)).cached_share == pytest.approx(share, abs=0.05)


def test_split_pairs_hit_their_half_for_any_piece_size():
    """Tensors that are larger than two pieces: 39 MB."""
    setup = small_setup(batch=16, input=300)
    assert setup.layer_bytes(setup.input) / 2 > 2 * SYSTEMS["split"].piece_bytes
    assert infer(setup, SYSTEMS["split"], A, limit_for(setup, 4)).cached_share == pytest.approx(0.5)


@pytest.mark.parametrize("ssd", ["A", "B"])
def test_more_memory_never_makes_split_slower(ssd):
    setup = small_setup(batch=16, input=300)
    limits = [limit_for(setup, layers) for layers in range(setup.model.layers + 1)]
    seconds = [infer(setup, SYSTEMS["split"], drives()[ssd], limit).decode_s for limit in limits]
    assert all(later <= 1.001 * earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < 0.8 * seconds[0]


def test_trial_of_group_1_has_only_group_1():
    setup = small_setup()
    assert trial_s(setup, A, share=0.0) is None
    intra, cross = trial_s(setup, A, share=0.5)
    assert cross < intra


def test_direct_file_is_slightly_slower_than_raw_lbas():
    setup = small_setup(batch=32)
    direct, file = (infer(setup, SYSTEMS[name], A, share=0.0).decode_s for name in ("dual-blade", "o-direct"))
    assert direct < file < 1.03 * direct


def test_single_transfer_gets_the_whole_link():
    one = machine(small_setup(), A, None)
    assert alone_ms(one, DMA, 28_000_000) == pytest.approx(1)
    assert alone_ms(one, READ, 10**9) == pytest.approx(1e12 / A.read)
