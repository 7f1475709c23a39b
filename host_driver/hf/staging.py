"""Copies tensors to FP16 host arrays and back; from a GPU through pinned buffers on a side stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from csd_spec.arrays import F16

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A GPU's side stream, used for copies only."""
    return _side_streams.setdefault(device, torch.cuda.Stream(device))


def stage(*tensors: torch.Tensor, bf16: bool = False) -> Callable[[], tuple[F16, ...]]:
    """Start copying tensors to the host as float16, or (`bf16`) as BF16 bits in float16 arrays.

    Returns:
        A function that waits for the copies and returns the arrays.
    """
    kind = torch.bfloat16 if bf16 else torch.float16
    if not tensors[0].is_cuda:
        return lambda: tuple(t.detach().to(kind).contiguous().view(torch.float16).numpy() for t in tensors)
    device = tensors[0].device
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    arrived = torch.cuda.Event()
    with torch.cuda.stream(side):
        pinned = []
        for tensor in tensors:
            half = tensor.detach().to(kind).contiguous().view(torch.float16)
            tensor.record_stream(side)
            buffer = torch.empty(half.shape, dtype=torch.float16, device="cpu", pin_memory=True)
            pinned.append(buffer.copy_(half, non_blocking=True))
        arrived.record(side)

    def wait() -> tuple[F16, ...]:
        arrived.synchronize()
        return tuple(buffer.numpy() for buffer in pinned)

    return wait


def unstage(rows: F16, like: torch.Tensor, bf16: bool = False) -> torch.Tensor:
    """Rows as a tensor with the device and dtype of `like`; `bf16`: the rows hold BF16 bits."""
    if bf16:
        return torch.from_numpy(rows).view(torch.bfloat16).to(like.device, like.dtype)
    if like.dtype is torch.float32 and like.device.type == "cpu":
        return torch.from_numpy(rows.astype(np.float32))  # numpy converts in half the time
    return torch.from_numpy(rows).to(like.device, like.dtype)
