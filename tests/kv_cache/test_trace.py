"""The generator of traces.

partner of: kv_cache/trace.py
"""

import numpy as np
import pytest

from kv_cache.trace import generate


@pytest.mark.parametrize("cv", [None, 0.5, 1.0, 4.0])
def test_generated_gaps_have_their_rate_and_spread(cv):
    trace = generate(40_000, 2.0, (16, 64), (8, 512), cv, seed=3, longest=400)
    gaps = np.diff([request.arrival for request in trace.requests])
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv or 1.0, rel=0.25)
    assert all(
        16 <= request.input_tokens <= 64 and 1 <= request.output_tokens <= 400 - 16 for request in trace.requests
    )
