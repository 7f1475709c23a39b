"""The part of vLLM that its connector sees: types of its modules, and an engine that calls both sides in vLLM's order,
with a "model" whose keys and values are computed from all tokens before.
"""

import pickle
import sys
import time
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from tests.served import HANG_S

BLOCK, BLOCKS, LAYERS, HEADS, CONTENT = 8, 96, 2, 4, 32  # CONTENT: values of a head's key and value together
BASE = "vllm.distributed.kv_transfer.kv_connector.v1"


class Base:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_cache_config, self._metadata = kv_cache_config, None

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def _get_connector_metadata(self):
        return self._metadata


class Prom:
    def __init__(self, config, kinds, labels, values):
        self._counter_cls, self.per_engine_labelvalues = kinds["counter"], values


def install(monkeypatch):
    """Put modules of these names where imports find them."""
    kinds = "KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorStats"
    made = {kind: type(kind, (), {}) for kind in kinds}
    made |= {"KVConnectorBase_V1": Base, "KVConnectorPromMetrics": Prom}
    made["KVConnectorRole"] = SimpleNamespace(SCHEDULER=0, WORKER=1)
    parts = BASE.split(".")
    for name in [".".join(parts[: end + 1]) for end in range(len(parts))] + [f"{BASE}.base", f"{BASE}.metrics"]:
        module = ModuleType(name)
        module.__dict__.update(made)
        monkeypatch.setitem(sys.modules, name, module)


def config(drives, workers=1, rank=0, policy="recompute", block=BLOCK, model=None, device="cuda", **extra):
    """vLLM's configuration, with the fields that are read. model: fields that differ from the default; the model's
    identity is then computed, not given.
    """
    said = {"identity": "m"} if model is None else {}
    fields = {"model": "m", "revision": None, "quantization": None, "dtype": torch.bfloat16, "hf_config": {}}
    fields |= {"hf_text_config": {}, "max_model_len": 4096, "cache_dtype": "auto", "load_format": "auto"} | (
        model or {}
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=policy, kv_connector_extra_config={"drives": drives} | said | extra
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=workers, rank=rank),
        cache_config=SimpleNamespace(block_size=block, cache_dtype=fields.pop("cache_dtype")),
        load_config=SimpleNamespace(load_format=fields.pop("load_format"), download_dir=None),
        model_config=SimpleNamespace(**fields),
        device_config=SimpleNamespace(device_type=device),
        lora_config=None,
    )


class FullAttentionSpec(SimpleNamespace):
    """vLLM's specification of a full-attention layer's cache."""


def cache_config(groups=1, content=CONTENT * 2, block=BLOCK):
    spec = FullAttentionSpec(
        state_content_size_bytes=content, num_heads=HEADS, block_size=block, page_size_bytes=HEADS * block * CONTENT * 2
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{n}" for n in range(LAYERS)])
    return SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=BLOCKS)


class Request:
    """A request as the scheduler has it."""

    def __init__(self, name, tokens, **fields):
        self.request_id, self.all_token_ids, self.num_prompt_tokens = name, list(tokens), len(tokens)
        self.num_computed_tokens = self.num_preemptions = 0
        self.lora_request = self.cache_salt = self.prompt_embeds = None
        self.mm_features = []
        vars(self).update(fields)


def keys_and_values_of(tokens, rank):
    """Keys and values of a model for each token: (LAYERS, tokens, HEADS, CONTENT), any 16 bits."""
    states, state = [], 17 + rank
    for token in tokens:
        state = (state * 31 + token + 7) % 32_749
        states.append(state)
    steps = np.arange(LAYERS * HEADS * CONTENT).reshape(LAYERS, 1, HEADS, CONTENT)
    return (np.array(states)[:, None, None] + 3 * steps).astype(np.int16)


class Worker:
    """A connector's worker, with a cache."""

    def __init__(self, connector, rank, block):
        """rank: of the worker, among all models: its values are its own."""
        self.connector, self.rank, self.block = connector, rank, block
        self.cache = [torch.full((BLOCKS, HEADS, block, CONTENT), -1, dtype=torch.bfloat16) for _ in range(LAYERS)]
        connector.register_kv_caches({f"layer{n}": layer for n, layer in enumerate(self.cache)})

    def compute(self, request, blocks, first, end):
        """Write keys and values of some tokens, as a forward does."""
        rows = torch.from_numpy(keys_and_values_of(request.all_token_ids[:end], self.rank))
        for layer, part in zip(self.cache, rows, strict=True):
            for at in range(first, end):
                layer.view(torch.int16)[blocks[at // self.block], :, at % self.block] = part[at]

    def right(self, request, blocks, end):
        """Whether the cache has the keys and values of a request's first tokens."""
        rows = torch.from_numpy(keys_and_values_of(request.all_token_ids[:end], self.rank))
        return all(
            torch.equal(layer.view(torch.int16)[blocks[at // self.block], :, at % self.block], part[at])
            for layer, part in zip(self.cache, rows, strict=True)
            for at in range(end)
        )


class Engine:
    """Prefills requests: found blocks are loaded, failed loads are computed, all in iterations."""

    def __init__(self, connector, drives, workers=1, block=BLOCK, weights=0, **extra):
        """weights: which of several models computes."""
        form, self.block = cache_config(block=block), block
        self.scheduler = connector(config(drives, workers, block=block, **extra), 0, form)
        made = [connector(config(drives, workers, rank, block=block, **extra), 1, form) for rank in range(workers)]
        self.workers = [Worker(each, rank + 1000 * weights, block) for rank, each in enumerate(made)]
        told = {rank: each.get_handshake_metadata() for rank, each in enumerate(made)}
        self.scheduler.set_xfer_handshake_metadata(pickle.loads(pickle.dumps(told)))
        self.tables, self.free, self.failed, self.recomputed = {}, list(range(1, BLOCKS)), set(), 0
        self.ended = Counter()

    def close(self):
        for worker in self.workers:
            worker.connector.shutdown()

    def prefill(self, *requests):
        """Tokens that were found in drives, of each request; checks the cache, and lets the requests go."""
        waiting, ready, hits = set(), [], []
        for each in requests:
            self.scheduler.on_new_request(each)
            tokens, later = self.scheduler.get_num_new_matched_tokens(each, 0)
            assert later == (tokens > 0) and tokens < len(each.all_token_ids)
            self.tables[each.request_id] = [self.free.pop() for _ in range(-(-len(each.all_token_ids) // self.block))]
            self._allocate(each, tokens)
            each.num_computed_tokens = tokens
            (waiting.add(each.request_id) if later else ready.append(each))
            hits.append(tokens)
        deadline = time.monotonic() + HANG_S
        while waiting or ready:
            assert time.monotonic() < deadline, f"no end of the loads of {waiting}"
            came = self.iterate(ready)
            ready = [request for request in requests if request.request_id in came]
            waiting -= came
            for each in ready:
                self._back_to_what_came(each)
        for each in requests:
            table = self.tables.pop(each.request_id)
            assert all(worker.right(each, table, len(each.all_token_ids)) for worker in self.workers)
            self.scheduler.request_finished(each, table)
            self.free += table
        return hits

    def _allocate(self, request, tokens):
        blocks = SimpleNamespace(get_block_ids=lambda: (self.tables[request.request_id],))
        self.scheduler.update_state_after_alloc(request, blocks, tokens)

    def iterate(self, requests=()):
        """Run an iteration that computes the rest of these requests; returns requests whose loads have finished in all
        workers.
        """
        scheduled = {
            request.request_id: len(request.all_token_ids) - request.num_computed_tokens for request in requests
        }
        state = SimpleNamespace(get_block_ids=lambda name: (self.tables[name],))
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        )
        changed = None
        for worker in self.workers:
            side = worker.connector
            side.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
            for each in requests:
                table = self.tables[each.request_id]
                worker.compute(each, table, each.num_computed_tokens, len(each.all_token_ids))
            side.start_load_kv(None)
            side.wait_for_save()
            self.ended.update(side.get_finished(set())[1] or ())
            self.failed |= side.get_block_ids_with_load_errors()
            said = side.build_connector_worker_meta()
            changed = changed.aggregate(said) if changed and said else changed or said
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=changed))
        for each in requests:
            each.num_computed_tokens = len(each.all_token_ids)
        came = {name for name, count in self.ended.items() if count == len(self.workers)}
        self.ended -= Counter(dict.fromkeys(came, len(self.workers)))
        return came

    def _back_to_what_came(self, request):
        """A request whose load has failed from some block on is computed from that block."""
        table = self.tables[request.request_id]
        first = next((n for n, block in enumerate(table) if block in self.failed), len(table))
        self.failed -= set(table)
        if first * self.block < request.num_computed_tokens:
            self.recomputed += request.num_computed_tokens - first * self.block
            request.num_computed_tokens = first * self.block
            assert self.scheduler.get_num_new_matched_tokens(request, first * self.block) == (0, False), (
                "it would go on so"
            )
