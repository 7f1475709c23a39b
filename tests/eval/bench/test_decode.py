"""CPU and wall-clock time of a decode step: every variant is run in turn, and all variants decode the same.

partner of: eval/baselines/caches.py
"""

from contextlib import ExitStack

import pytest
import torch
from transformers import DynamicCache

from vcsd_eval.baselines import caches, llamacpp
from vcsd_eval.bench.decode import IN_DRIVES, DecodeBench, DecodeLoad, bench_decode

WAYS = ["dynamic", "preallocated", "preallocated, repeated", "dense", "sparf", "ours"]


def test_every_variant_is_timed(monkeypatch):
    monkeypatch.setattr(llamacpp, "installed", lambda: False)
    ticks = []
    result = bench_decode(DecodeLoad("4x2x16", tokens=40, steps=1, repeats=1), ticks.append)
    assert list(result["step_cpu_ms"]) == list(result["step_wall_ms"]) == WAYS
    rival = min(result["step_cpu_ms"][name] for name in WAYS[1:3])
    for name in ("dense", "sparf", "ours"):
        assert result[f"{name}_over_preallocated"] == result["step_cpu_ms"][name] / rival > 0
    assert "vcsd[baselines]" in result["not_run"]["llama.cpp"] and "dense_over_llamacpp" not in result
    assert result["prefill_over_plain"] > 0 and result["fixed_us_per_layer"] != 0
    assert torch.get_num_threads() >= 1 and len(ticks) == 2 * (len(WAYS) + 8 + 3)


@pytest.mark.parametrize(("dtype", "same", "in_drives"), [("fp32", 1e-5, 2e-3), ("bf16", 0.02, 0.05)])
@torch.inference_mode()
def test_all_variants_decode_equal_logits(dtype, same, in_drives):
    """Logits of the step after the same KV cache: drives that attend to everything are as exact as FP16, or BF16."""
    caches.register()
    load = DecodeLoad("4x2x16", tokens=50, batch=2, dtype=dtype)
    with ExitStack() as undo:
        bench = DecodeBench(load, load.tokens, load.batch, undo)
        bench.in_memory("dynamic", DynamicCache())
        bench.in_memory("preallocated", caches.preallocated(bench.layers, 60))
        bench.in_memory("repeated", caches.preallocated(bench.layers, 60), caches.REPEATED)
        for fills, names in IN_DRIVES.items():
            bench.in_drives(fills, names[:1])
        logits = {}
        for name, way in bench.ways.items():
            way.begin()
            for token in (1, 2):
                ids = torch.full((2, 1), token)
                logits[name] = way.step(ids)
    for name, tolerance in (("preallocated", same), ("repeated", same), ("dense", in_drives), ("ours", 2e-1)):
        torch.testing.assert_close(logits[name], logits["dynamic"], atol=tolerance, rtol=0)


def test_variant_without_attention_outputs_zeros():
    query = torch.ones(1, 4, 1, 8)
    assert not caches._none(torch.nn.Identity(), query)[0].any()


@pytest.mark.parametrize("shape", ["huge", "4x2", "0x1x8", "4x3x8"])
def test_invalid_decode_shape_is_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        DecodeLoad(shape, tokens=8).model()
