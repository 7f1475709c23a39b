"""Round trip of layers through a namespace with NVMe passthrough: Dual-Blade's direct group (arXiv 2604.26557).

The attention uses elementwise float64 operations and sums in a fixed order, so its bits are the same on every machine.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from csd_io.extents import Extents
from csd_io.queue import IoRequest, Queue, aligned, carry_out
from csd_spec.arrays import F16, F64

LAYERS_FILE = "layers.npz"  # in the guest VM's file system

Key = tuple[int, str]  # layer, and "k" or "v"

_LOG2_E = 1.4426950408889634
_TERMS = [math.log(2) ** n / math.factorial(n) for n in range(14)]  # Taylor coefficients of 2^x


@dataclass(frozen=True, slots=True)
class Layers:
    """Queries q (layers, H, G, d), keys and values k, v (layers, S, H, d), float16.

    H counts the KV heads of all sequences of a batch.
    """

    q: F16
    k: F16
    v: F16

    def __post_init__(self) -> None:
        if self.q.ndim != 4 or self.k.ndim != 4 or not self.k.size or not self.q.size:
            raise ValueError(f"q {self.q.shape}, k {self.k.shape}: must have four dimensions and be non-empty")
        layers, _, heads, dim = self.k.shape
        if self.v.shape != self.k.shape or self.q.shape[:2] != (layers, heads) or self.q.shape[3:] != (dim,):
            shapes = f"q {self.q.shape}, k {self.k.shape}, v {self.v.shape}"
            raise ValueError(f"{shapes}: must have the same layers and heads")
        if any(tensor.dtype != np.float16 for tensor in (self.q, self.k, self.v)):
            raise ValueError("q, k and v must be float16")

    @classmethod
    def load(cls, file: Path) -> Layers:
        """Load arrays q, k and v from an .npz file; raises ValueError if it is invalid."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return cls(arrays["q"], arrays["k"], arrays["v"])
        except (KeyError, IndexError, AttributeError, TypeError, ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{file}: not an .npz file with q, k and v: {error.args[0] if error.args else error}"
            ) from error

    def save(self, file: Path) -> None:
        """Save the arrays in the format of `load`."""
        np.savez(file, q=self.q, k=self.k, v=self.v)

    @classmethod
    def random(cls, layers: int, tokens: int, heads: int, group: int, dim: int) -> Layers:
        """Random layers, the same in every call."""
        generator = np.random.default_rng(0)
        shapes = (layers, heads, group, dim), (layers, tokens, heads, dim), (layers, tokens, heads, dim)
        return cls(*((generator.integers(-512, 512, shape) / 256).astype(np.float16) for shape in shapes))

    def tensors(self) -> dict[Key, F16]:
        """Tensors (S, H, d) in the order of use."""
        return {(layer, kind): getattr(self, kind)[layer] for layer in range(len(self.k)) for kind in "kv"}


def attend(q: F16, k: F16, v: F16) -> F64:
    """softmax(q k^T / sqrt(d)) v, (H, G, d), for q (H, G, d), k and v (S, H, d)."""
    wide_k, wide_v = (tensor.transpose(1, 2, 0).astype(np.float64)[:, None] for tensor in (k, v))  # (H, 1, d, S)
    logits = _summed(np.moveaxis(q.astype(np.float64)[..., None] * wide_k, 2, 0)) / math.sqrt(q.shape[2])
    weights = _exp(logits - logits.max(axis=-1, keepdims=True))  # (H, G, S)
    total = _summed(np.moveaxis(weights, 2, 0))[..., None]
    out: F64 = _summed(np.moveaxis(weights[:, :, None] * wide_v, 3, 0)) / total
    return out


def _summed(parts: F64) -> F64:
    """Sum over the first axis in order."""
    total: F64 = np.zeros(parts.shape[1:])
    for part in parts:
        total += part
    return total


def _exp(x: F64) -> F64:
    """e^x for x <= 0, using only multiplications and additions."""
    scaled = x * _LOG2_E
    whole = np.rint(scaled)
    rest, polynomial = scaled - whole, np.full(x.shape, _TERMS[-1])
    for term in _TERMS[-2::-1]:
        polynomial = polynomial * rest + term
    powers: F64 = np.ldexp(polynomial, np.maximum(whole, -1074).astype(np.int64))
    return powers


def digests(layers: Layers, tensors: dict[Key, F16]) -> dict[str, list[str]]:
    """SHA-256 of the bytes of tensors, and of each layer's attention output."""
    outputs = [attend(q, tensors[layer, "k"], tensors[layer, "v"]) for layer, q in enumerate(layers.q)]
    return {
        "tensors": [sha256(tensor.tobytes()).hexdigest() for tensor in tensors.values()],
        "outputs": [sha256(output.tobytes()).hexdigest() for output in outputs],
    }


def round_trip(queue: Queue, layers: Layers) -> dict[str, Any]:
    """Write all tensors to extents, read all back at full queue depth, and deallocate.

    Returns:
        Digests of the data read; requests, request_bytes (largest), depth (maximum in flight) and how (the transport);
        zeros: whether deallocated blocks read as zeros.

    Raises:
        OSError: A request failed.
    """
    extents, tensors = Extents(queue), layers.tensors()
    buffers = {key: _padded(tensor, queue.block_bytes) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        extents.bind(key, tensor.nbytes)
    reads = _requests(extents, "read", buffers)
    queue.register([request.buffer for request in reads])
    carry_out(queue, _requests(extents, "write", buffers))
    queue.sync()
    for buffer in buffers.values():
        buffer[:] = bytes(buffer.nbytes)
    carry_out(queue, reads)
    back = {
        key: np.frombuffer(buffers[key], np.float16, tensor.size).reshape(tensor.shape)
        for key, tensor in tensors.items()
    }
    data_digests = digests(layers, back)
    for key in tensors:
        extents.release(key)
    carry_out(queue, reads)
    return data_digests | {
        "requests": len(reads),
        "request_bytes": max(request.buffer.nbytes for request in reads),
        "depth": min(queue.depth, len(reads)),
        "how": queue.how,
        "zeros": not any(np.frombuffer(buffer, np.uint8).any() for buffer in buffers.values()),
    }


def _requests(extents: Extents, op: Any, buffers: dict[Key, memoryview]) -> list[IoRequest]:
    return [request for key, buffer in buffers.items() for request in extents.requests(op, key, 0, buffer)]


def _padded(tensor: F16, block_bytes: int) -> memoryview:
    """Bytes of a tensor, padded to whole blocks."""
    buffer = aligned(-(-tensor.nbytes // block_bytes) * block_bytes)
    buffer[: tensor.nbytes] = np.ascontiguousarray(tensor).view(np.uint8).reshape(-1).data
    return buffer
