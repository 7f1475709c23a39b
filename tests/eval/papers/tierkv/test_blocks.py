"""Blocks: equations 1 and 2, and the cost of small and large ones."""

import pytest

from vcsd_eval.papers.profiles import Host, Model, Ssd
from vcsd_eval.papers.tierkv.blocks import best_tokens, block_bytes, efficiency, from_dram_us, from_ssd_us, lost_share

HOST, SSD = Host.load("tierkv"), Ssd.load("tierkv")
SIZES = (4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("name", "layers", "heads"), [("llama-3-8b", 32, 8), ("llama-2-13b", 40, 40), ("codellama-34b", 48, 8)]
)
def test_block_has_keys_and_values_of_all_layers(name, layers, heads):
    assert block_bytes(Model.load(name)) == 2 * layers * heads * 128 * 16 * 2
    assert block_bytes(Model.load(name), 32) == 2 * block_bytes(Model.load(name))


def test_copy_time_is_start_plus_bytes_over_rate():
    assert from_dram_us(HOST, 0) == 5
    assert from_dram_us(HOST, 50e9) == pytest.approx(1e6 + 5)
    assert from_ssd_us(SSD, 7e9) == pytest.approx(1e6 + 80)
    assert efficiency(HOST, 250e3) == pytest.approx(0.5)


def test_short_requests_are_best_with_small_blocks():
    model = Model.load("llama-3-8b")
    assert lost_share(64, 32) == pytest.approx(0.5)
    best = [best_tokens(model, HOST, mean, SIZES) for mean in (10, 70, 300, 2000)]
    assert best == sorted(best)
    assert (best[0], best[-1]) == (8, 64)
