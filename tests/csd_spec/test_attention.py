"""The attention setting (method and compression) as one value."""

import pytest

from csd_spec import NAMED, AttentionConfig, CompressionBudget, FixedBudget, SparFParams


def test_attention_combines_method_and_budget():
    assert AttentionConfig() == AttentionConfig("sparf", CompressionBudget(8), "fp16")
    assert AttentionConfig("mine", FixedBudget(SparFParams(4, 32, 8))).at(20, 64) == SparFParams(4, 20, 8)


@pytest.mark.parametrize("layout", [0, 37, -4, "int5"])
def test_layout_unknown_is_refused(layout):
    with pytest.raises(ValueError, match=f"layout = {layout!r}: must be one of"):
        AttentionConfig(layout=layout)


def test_ours_is_the_progressive_method_within_a_fifth():
    for name in ("ours", "progressive"):
        assert NAMED[name] == AttentionConfig("progressive", CompressionBudget(5, "bytes"), "progressive")
