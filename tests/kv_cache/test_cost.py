"""The cost model: each term of the roofline, fitted terms, and the changes of a paper's overlay."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.cost import BASE, CostModel, DenseDecoder, Overlay, ServingCost
from kv_cache.hardware import H100
from vcsd_eval.papers.machines import machine_of, overlay, papers
from vcsd_eval.papers.profiles import Gpu, Model

LLAMA, SPARSE, WINDOWED = (Model.load(name) for name in ("llama-3-8b", "deepseek-v3", "gemma-3-27b"))
F = 384e12  # operations/s that the base reaches on an H100
COST = CostModel.of(LLAMA, H100)


def test_prefill_time_is_matmul_plus_causal_attention():
    tokens, stored = 4096, 8192
    attention = 4 * 32 * 32 * 128 * tokens * (stored + tokens / 2) / F
    assert COST.prefill_s(stored + tokens, stored) == pytest.approx(8e-3 + 2 * LLAMA.active * tokens / F + attention)


def test_a_prefill_of_one_token_reads_the_weights_once():
    cost = CostModel.of(LLAMA, H100, replace(BASE, start_s=0))
    assert cost.prefill_s(1) == pytest.approx(LLAMA.weight_bytes / H100.bytes_per_s, rel=1e-4)
    assert cost.prefill_s(7, 7) == 0


def test_decode_step_is_bound_by_weights_then_compute():
    one, many = COST.linear_s(1), COST.linear_s(1024)
    assert one == LLAMA.weight_bytes / H100.bytes_per_s
    assert many == pytest.approx(2 * LLAMA.active * 1024 / F)
    assert COST.decode_s(4, 8000) - COST.linear_s(4) == pytest.approx(8000 * LLAMA.shape.kv_bytes_per_token / 3350e9)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 64))
def test_chunks_of_a_prompt_take_as_long_as_the_prompt(first, second, batch):
    cost = CostModel.of(LLAMA, H100, Overlay(start_s=0))
    whole, parts = (
        cost.prefill_s(first + second, batch=batch),
        cost.prefill_s(first, batch=batch) + cost.prefill_s(first + second, first, batch),
    )
    weights_s = LLAMA.weight_bytes / H100.bytes_per_s
    assert whole * (1 - 1e-12) <= parts <= whole + weights_s  # a short chunk waits for the weights


def test_windows_limit_attention_and_reads_of_layers():
    cost = CostModel.of(WINDOWED, H100)
    full = replace(WINDOWED, window_layers=0, window=0)
    assert cost.prefill_s(100_000) < CostModel.of(full, H100).prefill_s(100_000)
    short, long = cost.linear_s(8, WINDOWED.window / 2), cost.linear_s(8)
    assert long - short == pytest.approx(4 * WINDOWED.window_bytes(WINDOWED.window) / H100.bytes_per_s)


def test_prefill_attends_to_a_window_of_earlier_tokens():
    """In a layer with a window: to all of a short prompt, to the window's number in a long one."""
    cost, full = CostModel.of(WINDOWED, H100), CostModel.of(replace(WINDOWED, window_layers=0, window=0), H100)
    window, of_a_layer = WINDOWED.window, cost.pair_s / WINDOWED.shape.layers
    assert cost.prefill_attention_s(window) == pytest.approx(full.prefill_attention_s(window))
    long = 10 * window
    saved_s = full.prefill_attention_s(long + 64, long) - cost.prefill_attention_s(long + 64, long)
    assert saved_s == pytest.approx(WINDOWED.window_layers * of_a_layer * 64 * (long + 32 - window))


def test_step_reads_only_selected_experts():
    cost = CostModel.of(SPARSE, H100)
    assert cost.linear_s(1) == pytest.approx(SPARSE.active * SPARSE.weight_bits / 8 / H100.bytes_per_s)
    assert cost.linear_s(1) < cost.linear_s(8) < SPARSE.weight_bytes / H100.bytes_per_s


def test_fitted_terms_replace_roofline():
    fitted = CostModel.fitted(32, step_s=0.05, token_s=1e-6, prefill_tokens_per_s=5000)
    assert fitted.decode_s(3, 1000) == pytest.approx(0.051)
    assert fitted.prefill_s(5000) == pytest.approx(1)
    assert replace(fitted, slowdown=2.0).decode_s(3, 1000) == pytest.approx(0.102)
    half = CostModel.of(LLAMA, H100, Overlay(step_s=0.05))
    assert half.decode_s(1, 100) == pytest.approx(0.05 + 100 * COST.token_s)
    with pytest.raises(ValueError, match="a model and an accelerator"):
        CostModel(32, Overlay(step_s=0.05))


def test_dense_decoder_needs_only_shape_and_parameters():
    dense = CostModel.of(DenseDecoder(LLAMA.shape, LLAMA.active), H100)
    assert dense.prefill_s(1000) == COST.prefill_s(1000)
    assert dense.decode_s(2, 500) == COST.decode_s(2, 500)


def test_base_model_equals_printed_prefill_time():
    assert overlay("tutti") == BASE


def test_every_overlay_uses_same_cost_function():
    assert set(papers()) == {"instinfer", "dual_blade", "tierkv", "orbitflow", "tutti", "hilos"}
    for paper in papers():
        for name, entries in machine_of(paper).overlays.items():
            cost = CostModel.of(LLAMA, Gpu.load("h100").accelerator, overlay(paper, name))
            assert cost.prefill_s(16384) > 0 and all(entry.why for entry in entries.values())


def test_serving_cost_out_of_range_is_refused():
    good = {"name": "x", "compute": COST, "fetch_s": 0.0, "fetch_token_s": 1e-6, "room_blocks": 3}
    assert ServingCost(**good).layers == 32
    for more in ({"fetch_s": -1.0}, {"fetch_token_s": -1e-9}, {"room_blocks": 0}, {"token_bytes": 0}):
        with pytest.raises(ValueError, match="x: seconds must be at least 0"):
            ServingCost(**(good | more))
