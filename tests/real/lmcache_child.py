"""LMCache's engine with the plug-in of vcsd, for the Python of build/vllm: `lmcache_child.py store|load DRIVE...`.

The engine's memory is one tensor on the CPU. `store` stores the KV cache of a prompt, and waits until LMCache finds it
in the drives; `load` has a memory of zeros. Both then retrieve the KV cache and print a line of JSON.
"""

import json
import os
import sys
import time
import traceback

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, VALUES = 4, 4, 64
CHUNKS, CHUNK = 4, 64  # chunks of a prompt, tokens of a chunk
TOKENS = CHUNKS * CHUNK + 10  # the last ones fill no chunk and are not stored
PATIENCE_S = 60.0  # a guard


class CpuConnector(GPUConnectorInterface):
    """Copies between LMCache's chunks and the engine's memory: (2, layers, tokens, heads x values), BF16."""

    def __init__(self, kv):
        self.kv = kv

    def from_gpu(self, memory_obj, start, end, **_):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def to_gpu(self, memory_obj, start, end, **_):
        self.kv[:, :, start:end] = memory_obj.tensor

    def batched_from_gpu(self, memory_objs, starts, ends, **_):
        for each in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*each)

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **_):
        for each in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*each)

    def get_shape(self, num_tokens):
        return torch.Size((2, LAYERS, num_tokens, HEADS * VALUES))


def engine_of(kv, drives):
    """LMCache's engine. Its own memory caches nothing, so all hits are found in drives."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=False,
        max_local_cpu_size=0.05,
        save_unfull_chunk=False,
        storage_plugins=["vcsd"],
        extra_config={
            "storage_plugin.vcsd.module_path": "vcsd.integrations.lmcache",
            "storage_plugin.vcsd.class_name": "VcsdBackend",
            "vcsd": {"drives": drives, "identity": "m"},
        },
    )
    metadata = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK, HEADS, VALUES),
        role="worker",
    )
    engine = LMCacheEngineBuilder.get_or_create(
        "m", config, metadata, CpuConnector(kv), mock_up_broadcast_fn, mock_up_broadcast_object_fn
    )
    engine.post_init()
    return engine


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # LMCache's log
    verb, *drives = sys.argv[1:]
    tokens = torch.arange(TOKENS)
    stored = torch.randn((2, LAYERS, TOKENS, HEADS * VALUES), generator=torch.Generator().manual_seed(1)).bfloat16()
    kv = stored.clone() if verb == "store" else torch.zeros_like(stored)
    engine = engine_of(kv, drives)
    if verb == "store":
        engine.store(tokens)
    deadline = time.monotonic() + PATIENCE_S
    while engine.lookup(tokens) < CHUNKS * CHUNK and time.monotonic() < deadline:
        time.sleep(0.1)
    result = engine.lookup(tokens, pin=True, lookup_id="1")  # as vLLM's scheduler does before it loads
    loaded = int(engine.retrieve(tokens).sum())
    engine.lookup_unpin("1")
    answer = {
        "backends": list(engine.storage_manager.storage_backends),
        "found": result,
        "loaded": loaded,
        "equal": torch.equal(kv[:, :, :loaded], stored[:, :, :loaded]),
        "found_of_others": engine.lookup(tokens + 1),
    }
    print(json.dumps(answer), file=out, flush=True)
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 - printed
        traceback.print_exc()
        os._exit(1)  # threads of LMCache would go on
    os._exit(0)
