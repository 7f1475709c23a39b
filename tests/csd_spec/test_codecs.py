"""Codecs: encoded values decode to the stored values, and encode to the same bytes again.

partner of: csd_spec/codecs/codec.py, csd_spec/codecs/verbatim.py, csd_spec/codecs/fp8.py
"""

import numpy as np
import pytest

from csd_spec.codecs import BF16, FP8, FP16


@pytest.mark.parametrize("codec", [FP16, BF16, FP8])
def test_codec_round_trip_is_idempotent(codec):
    values = np.random.default_rng(0).standard_normal((3, 5, 24)).astype(np.float32)
    bits = values.astype(np.float16).view(np.uint16) if codec.value == "fp16" else (values.view(np.uint32) >> 16)
    vectors = codec.encode(bits.astype(np.uint16))
    assert vectors.dtype == np.uint8 and vectors.shape == (3, 5, codec.row_bytes(24))
    decoded = codec.decode(vectors, 24)
    assert decoded.shape == bits.shape and codec.exact == bool((decoded == bits).all())
    np.testing.assert_array_equal(codec.encode(decoded), vectors)


def test_codec_tags_are_distinct():
    assert len({codec.tag for codec in (FP16, BF16, FP8)}) == 3
