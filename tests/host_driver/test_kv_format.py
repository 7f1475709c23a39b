"""A row of KV data: its bytes, its keys and values as views, and its stored values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from csd_spec import AttentionConfig, ModelShape
from host_driver.kv_format import KVFormat

PLAIN = ModelShape(name="plain", layers=2, q_heads=4, kv_heads=2, head_dim=16)
NARROW = ModelShape(name="narrow", layers=2, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=8)
LATENT = ModelShape(name="latent", layers=2, q_heads=4, kv_heads=1, head_dim=48, latent=True)


@pytest.mark.parametrize(("shape", "values"), [(PLAIN, 2 * 32), (NARROW, 2 * 24), (LATENT, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_format_row_bytes_and_views(shape, values, dtype) -> None:
    form = KVFormat.of(shape, dtype)
    assert form.row_bytes == values * dtype.itemsize
    for rows in (torch.zeros(5 * values, dtype=dtype), np.zeros(5 * values, np.float16)):
        k, v = form.split(rows)
        assert k.shape == (5, form.kv_heads, form.k_channels) and v.shape == (5, form.kv_heads, form.v_channels)
        k[:], v[:] = 1, 2
        flat = rows.reshape(5, values)  # written through
        assert (flat[:, : k[0].size if isinstance(k, np.ndarray) else k[0].numel()] == 1).all()
        assert flat.sum() == 5 * (form.kv_heads * form.k_channels + 2 * form.kv_heads * form.v_channels)


@pytest.mark.parametrize(
    ("storage", "bf16", "dtype"),
    [
        (None, False, torch.float16),
        (None, True, torch.bfloat16),
        ("fp16", True, torch.float16),
        ("bf16", False, torch.bfloat16),
        ("fp8", False, torch.bfloat16),
    ],
)
def test_kv_format_with_drives_has_their_values(storage, bf16, dtype) -> None:
    attention = AttentionConfig.named("dense", kv_dtype=storage).for_model_dtype(bf16)
    assert KVFormat.of(PLAIN, torch.bfloat16 if bf16 else torch.float32, attention).value_dtype is dtype


def test_kv_format_beyond_fp16_is_refused() -> None:
    fp16 = KVFormat.of(PLAIN, torch.float32, AttentionConfig.named("dense"))
    assert fp16.stored(torch.tensor([65_504.0])).item() == 65_504
    with pytest.raises(ValueError, match="70,000, beyond FP16's 65,504: use kv_dtype='bf16'"):
        fp16.stored(torch.tensor([1.0, -70_000.0]))
    bf16 = KVFormat.of(PLAIN, torch.float32, AttentionConfig.named("dense", kv_dtype="bf16").for_model_dtype(False))
    assert bf16.stored(torch.tensor([-70_000.0])).item() == -70_144


def test_kv_format_rounds_new_values_once() -> None:
    """FP8 values are what drives make of them, and stay the same when they are stored again."""
    attention = AttentionConfig.named("dense", kv_dtype="fp8").for_model_dtype(False)
    fp8 = KVFormat.of(PLAIN, torch.float32, attention)
    states = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(0))
    once = fp8.stored(states)
    assert once.dtype is torch.bfloat16 and once.shape == states.shape
    assert torch.equal(fp8.stored(once), once) and not torch.equal(once, states.bfloat16())
    assert ((once.float() - states).abs() <= states.abs() / 15 + 1e-4).all()
    assert torch.equal(fp8.rounded(states), states.bfloat16())  # queries are not rounded further
