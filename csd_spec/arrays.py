"""Array type names, by element type."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Keys = NDArray[np.void]  # dtype KEY

KEY = np.dtype("V16")


def key_list(keys: Keys) -> list[bytes]:
    """Convert keys to byte strings."""
    raw = keys.tobytes()
    return [raw[at : at + KEY.itemsize] for at in range(0, len(raw), KEY.itemsize)]


def keys_of(keys: Iterable[bytes]) -> Keys:
    """Convert byte strings to keys."""
    return np.frombuffer(b"".join(keys), KEY)
