"""Accuracy cost of quantized pages: attention in a drive over random KV data, compared with exact attention."""

from __future__ import annotations

import numpy as np

from attention_engine import reference
from csd_firmware import InProcessDrive
from csd_spec import Attend, KvAppend, SeqCreate
from csd_spec.layouts import layout_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

TOKENS, HEADS, QUERIES, CHANNELS = 2000, 4, 4, 128


def output_error(layout: str, seed: int = 0) -> float:
    """RMS error of dense attention over the RMS of the exact output; K, V are normal, q has three times their scale.

    layout: Name of the layout.
    """
    generator = np.random.default_rng(seed)
    k, v = (generator.standard_normal((TOKENS, HEADS, CHANNELS)).astype(np.float16) for _ in range(2))
    q = (3 * generator.standard_normal((1, HEADS, QUERIES, CHANNELS))).astype(np.float16)
    device = InProcessDrive(INSTCSD_ZYNQ7045_8CH)
    try:
        created = device.submit(SeqCreate(1, 1, HEADS, CHANNELS, 2 * TOKENS, layout_named(layout).code), 0).result()
        seqs = (int(created.data[0][0]),)
        device.submit(KvAppend(seqs, 0, np.array([TOKENS - 1]), k[:-1], v[:-1]), 0).result()
        every = np.array([TOKENS])
        done = device.submit(Attend(seqs, 0, q, k[-1:], v[-1:], "dense", 1, every, every), 0).result()
    finally:
        device.close()
    q64, k64, v64 = (array.astype(np.float64) for array in (q[0], k, v))
    exact = np.stack([reference.dense(q64[head], k64[:, head], v64[:, head]) for head in range(HEADS)])
    return float(np.sqrt(np.mean((done.data[0][0] - exact) ** 2) / np.mean(exact**2)))
