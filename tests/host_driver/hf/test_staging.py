"""Rows of drives as tensors of the model.

partner of: host_driver/hf/staging.py
"""

import numpy as np
import pytest
import torch

from host_driver.hf.staging import unstage


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bf16", [False, True])
def test_rows_have_the_dtype_of_the_model(dtype, bf16):
    values = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.float16) if bf16 else values.half().numpy()
    tensor = unstage(bits, torch.empty(0, dtype=dtype), bf16)
    assert tensor.dtype is dtype and torch.equal(tensor.float(), values)
