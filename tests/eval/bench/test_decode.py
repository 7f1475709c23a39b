"""Wall time of a decode step: every way has its turns."""

from eval.bench.decode import ATTENTIONS, Load, bench_decode
from vcsd.loading import CHECKPOINT, load


def test_every_way_is_timed_beside_ordinary_attention():
    model, _ = load(CHECKPOINT)
    ticks = []
    result = bench_decode(model, Load(tokens=64, steps=2, drives=2, batch=1, repeats=1), ticks.append)
    assert list(result["step_ms"]) == list(ATTENTIONS)
    assert result["wall_over_sdpa"]["sdpa"] == 1
    assert len(ticks) == 2 * len(ATTENTIONS)  # the first turn compiles and does not count
    assert model.config._attn_implementation == "sdpa"
