"""What attends, as one value."""

import pytest

from csd_spec import Attention, Compression, Fixed, SparFParams


def test_a_method_within_a_budget():
    assert Attention() == Attention("sparf", Compression(8), 16)
    assert Attention("mine", Fixed(SparFParams(4, 32, 8))).at(20, 64) == SparFParams(4, 20, 8)


@pytest.mark.parametrize("bits", [0, -4])
def test_a_copy_of_no_bits_is_refused(bits):
    with pytest.raises(ValueError, match=f"embedding_bits = {bits}"):
        Attention(embedding_bits=bits)
