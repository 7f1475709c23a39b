"""Shapes of models: bytes of a token, and shapes that no model has."""

import pytest

from csd_spec import ModelShape


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [({}, 3 * 2 * (64 + 64) * 2), ({"v_head_dim": 40}, 3 * 2 * (64 + 40) * 2), ({"latent": True}, 3 * 2 * 64 * 2)],
)
def test_bytes_of_a_token_are_those_of_the_model(fields: dict[str, int | bool], nbytes: int) -> None:
    shape = ModelShape(**{"name": "m", "layers": 3, "q_heads": 8, "kv_heads": 2, "head_dim": 64} | fields)
    assert (shape.kv_bytes_per_token, shape.group) == (nbytes, 4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"v_head_dim": 65}, "v_head_dim = 65: must be at most head_dim = 64"),
        ({"q_heads": 9}, "a multiple of kv_heads"),
    ],
)
def test_shape_that_no_model_has_is_refused(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelShape(**{"name": "m", "layers": 3, "q_heads": 8, "kv_heads": 2, "head_dim": 64} | fields)
