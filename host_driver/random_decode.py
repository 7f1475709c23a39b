"""Decode of random data that is equal on every machine, to compare two transports."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from csd_spec import ModelShape
from csd_spec.arrays import F16
from host_driver.driver import Driver

SHIPPED_SHAPE = ModelShape(name="checkpoint", layers=4, q_heads=8, kv_heads=4, head_dim=64)


def random_decode(driver: Driver, prompt: int, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Store a prompt and decode `tokens` steps of all layers; returns digests of the outputs and the cost of steps."""
    shape, generator = driver.shape, np.random.default_rng(seed)

    def half(*dimensions: int) -> F16:
        return (generator.integers(-512, 512, dimensions) / 256).astype(np.float16)

    batch = driver.create(1, max(2048, prompt + tokens))
    for layer in range(shape.layers):
        rows = half(prompt, shape.kv_heads, shape.head_dim), half(prompt, shape.kv_heads, shape.head_dim)
        driver.append(batch, slice(None), layer, np.array([prompt]), lambda rows=rows: rows)  # type: ignore[misc]  # mypy cannot type the default
    driver.settle()
    digests, steps = [], []
    for _ in range(tokens):
        outputs = sha256()
        with driver.step(1) as (micro_batch,):
            for layer in range(shape.layers):
                q, k, v = (half(1, heads, shape.head_dim) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads))
                outputs.update(driver.decode(batch, slice(None), micro_batch, layer, q, k, v).tobytes())
        digests.append(outputs.hexdigest())
        steps.append(driver.traffic.steps[-1])
    driver.free(batch)
    return {
        "outputs": digests,
        "step_ns": [step.ns for step in steps],
        "link_bytes": [step.link_bytes for step in steps],
        "pages_read": [step.flash.pages_read for step in steps],
    }
