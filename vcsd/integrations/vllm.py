"""vLLM KV connector: loads prefixes of prompts from drives, and stores them as they are computed.

    vllm serve MODEL --disable-hybrid-kv-cache-manager --kv-transfer-config '{"kv_connector": "VcsdConnector",
        "kv_connector_module_path": "vcsd.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"drives": ["csd0", "csd1"]}}'

The other keys of `kv_connector_extra_config` are those of `vcsd.integrations.settings.Settings`. Workers own the
drives. They report stored keys to the scheduler in the handshake at startup and with the result of each iteration.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from csd_spec.checked import from_values
from csd_spec.model import FP16_BYTES
from host_driver.prefixes.async_store import COUNTS, AsyncPrefixStore, connected
from host_driver.prefixes.cache_keys import AdmissionFilter, PrefixNames
from vcsd.integrations.model import Adapters, identity_of
from vcsd.integrations.paged import PagedCache, shape_of
from vcsd.integrations.plan import PrefixPlan, PrefixScheduler
from vcsd.integrations.settings import Settings
from vcsd.integrations.working import WorkerCache

BLOCK_TOKENS = 16  # default block size in drives: shared by all engines whose block size is a multiple
APART_SPECS = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
APART_DTYPES = "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"


@dataclass
class WorkerMessage(KVConnectorMetadata):
    """Message from the scheduler to its workers."""

    plan: PrefixPlan


@dataclass
class KeyChanges(KVConnectorWorkerMetadata):
    """Message from workers to the scheduler: keys added (True) or removed, by worker."""

    changes: dict[int, dict[bytes, bool]]

    def aggregate(self, other: KeyChanges) -> KeyChanges:
        return KeyChanges(self.changes | other.changes)


@dataclass
class StoredKeys(KVConnectorHandshakeMetadata):
    """Keys in a worker's drives at startup, and the digest of its model."""

    worker: int
    keys: list[bytes]
    model: str


@dataclass
class IntervalCounts(KVConnectorStats):
    """`host_driver.prefixes.async_store.COUNTS` of an interval."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: IntervalCounts) -> IntervalCounts:
        return IntervalCounts(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int]:
        return self.data

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Prometheus(KVConnectorPromMetrics):
    """A counter for each of `COUNTS`, `vllm:vcsd_NAME`."""

    def __init__(self, config: Any, kinds: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, kinds, labels, values)
        self._counters = {
            name: self._counter_cls(name=f"vllm:vcsd_{name}", documentation=meaning, labelnames=labels)
            for name, meaning in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)


class VcsdConnector(KVConnectorBase_V1):
    """Scheduler and worker sides of the connector; vLLM creates one of each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ValueError for an unsupported setting or model, ConnectionError if no drive answers."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('kv_load_failure_policy: must be "recompute", for tokens that fail to load')
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("pipeline_parallel_size: must be 1, since other layers would need other prefixes")
        settings = from_values(transfer.kv_connector_extra_config, Settings)
        self._workers, self._block_tokens = parallel.tensor_parallel_size, vllm_config.cache_config.block_size
        names = _names(vllm_config, kv_cache_config, settings)
        self._shape, self._model = names.shape, names.model.digest
        self._worker: WorkerCache | None = None
        self._scheduler: PrefixScheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            admission = AdmissionFilter(settings.admit_after)
            adapters = Adapters(settings.weights)
            self._scheduler = PrefixScheduler(names, self._block_tokens, self._workers, admission, adapters.identity)
        else:
            self._rank = parallel.rank
            connects = settings.connects(self._rank, self._workers)
            store = partial(connected, connects, replace(names, rank=self._rank), settings.max_blocks or None)
            self._worker = WorkerCache(AsyncPrefixStore(store, settings.stores_in_flight), self._block_tokens)

    # Worker side

    @property
    def _worker_cache(self) -> WorkerCache:
        assert self._worker is not None, "the scheduler's side has no drives"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = [kv_caches[name] for name in _group(self._kv_cache_config).layer_names]
        cache = PagedCache(layers, self._kv_cache_config.num_blocks, self._block_tokens)
        if cache.shape() != self._shape:
            raise ValueError(f"the registered cache has {cache.shape()}, the configuration announced {self._shape}")
        self._worker_cache.cache = cache

    def get_handshake_metadata(self) -> StoredKeys:
        changes = self._worker_cache.keeper.take_changes()
        return StoredKeys(self._rank, [key for key, there in changes.items() if there], self._model)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker_cache.start(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No effect: a request is computed after all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No effect: all layers are stored after the last one."""

    def wait_for_save(self) -> None:
        self._worker_cache.save(self._get_connector_metadata().plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker_cache.finish() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_cache.take_failed()

    def build_connector_worker_meta(self) -> KeyChanges | None:
        changes = self._worker_cache.keeper.take_changes()
        return KeyChanges({self._rank: changes}) if changes else None

    def get_kv_connector_stats(self) -> IntervalCounts | None:
        counts = self._worker.keeper.take_counts() if self._worker else {}
        return IntervalCounts(counts) if counts else None

    def shutdown(self) -> None:
        if self._worker:
            self._worker.keeper.close()

    # Scheduler side

    @property
    def _scheduling(self) -> PrefixScheduler:
        assert self._scheduler is not None, "workers schedule nothing"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, StoredKeys]) -> None:
        """Raises ValueError if a worker's model has another identity than the scheduler's."""
        if others := [stored.worker for stored in metadata.values() if stored.model != self._model]:
            raise ValueError(
                f"worker {others[0]}: its model differs from the scheduler's; if they are copies of one model,"
                ' set "weights" to "content"'
            )
        self._scheduling.apply_changes(
            {stored.worker: dict.fromkeys(stored.keys, True) for stored in metadata.values()}
        )

    def on_new_request(self, request: Any) -> None:
        self._scheduling.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._scheduling.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.add_load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> WorkerMessage:
        blocks_of = scheduler_output.kv_connector_block_state.get_block_ids
        return WorkerMessage(self._scheduling.plan(scheduler_output.num_scheduled_tokens, lambda r: blocks_of(r)[0]))

    def update_connector_output(self, connector_output: Any) -> None:
        if changed := connector_output.kv_connector_worker_meta:
            self._scheduling.apply_changes(changed.changes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.end(request.request_id)
        return False, None

    # Metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> IntervalCounts:
        return IntervalCounts(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> Prometheus:
        return Prometheus(vllm_config, metric_types, labelnames, values)


def _group(kv_cache_config: Any) -> Any:
    """The model's only group of layers; raises ValueError if there are several."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"{len(groups)} groups of layers: only one is supported, try --disable-hybrid-kv-cache-manager"
        )
    return groups[0]


def _names(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> PrefixNames:
    """Keys of a model's prefixes; raises ValueError for layers without keys and values per token."""
    group, cache = _group(kv_cache_config), vllm_config.cache_config
    spec, workers = group.kv_cache_spec, vllm_config.parallel_config.tensor_parallel_size
    device = vllm_config.device_config.device_type
    content = getattr(spec, "state_content_size_bytes", 0)
    if not content or content % (2 * FP16_BYTES) or spec.page_size_bytes != spec.num_heads * spec.block_size * content:
        raise ValueError(f"{type(spec).__name__}: unsupported, its layers do not hold keys and values of each token")
    apart = _separates_tokens(spec, cache.cache_dtype, device)
    form = {"device": device} | ({} if apart else {"engine_block_tokens": str(cache.block_size)})
    return PrefixNames(
        shape=shape_of(len(group.layer_names), spec.num_heads, content // (2 * FP16_BYTES)),
        model=identity_of(vllm_config, settings, **form),
        drives=len(settings.share(0, workers)),
        salt=settings.salt,
        seed=settings.seed,
        block_tokens=_block_tokens(settings.block_tokens, cache.block_size, apart),
    )


def _separates_tokens(spec: Any, cache_dtype: str, device: str) -> bool:
    """Whether tokens of a block are stored separately, so that blocks can be converted to another size.

    True only for known formats: attention backends for CPUs and some for ROCm interleave the tokens of a block, and so
    do formats with scales of several tokens.
    """
    is_known = type(spec).__name__ in APART_SPECS and cache_dtype in APART_DTYPES
    return is_known and device == "cuda" and torch.version.hip is None


def _block_tokens(configured: int, engine: int, apart: bool) -> int:
    """Tokens per block in drives, by the operator's setting and the engine's block size; raises ValueError."""
    if not configured:
        return BLOCK_TOKENS if apart and engine % BLOCK_TOKENS == 0 else engine
    if configured % engine and (not apart or engine % configured):
        allowed = "a multiple or a divisor" if apart else "a multiple"
        raise ValueError(f"block_tokens = {configured}: must be {allowed} of the engine's {engine}")
    return configured
