"""vLLM's KV connector on drives: prefixes of prompts are loaded from them, and stored as they are computed.

    vllm serve MODEL --disable-hybrid-kv-cache-manager --kv-transfer-config '{"kv_connector": "VcsdConnector",
        "kv_connector_module_path": "vcsd.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"drives": ["csd0", "csd1"]}}'

The other keys of `kv_connector_extra_config`: `vcsd.integrations.settings.Settings`. The worker has the drives; the
scheduler hears from it which keys are stored, with the handshake at the start and with what each iteration returns.
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
from host_driver.prefixes.keeper import COUNTS, Keeper, connected
from host_driver.prefixes.names import Admission, PrefixNames
from vcsd.integrations.model import Adapters, identity_of
from vcsd.integrations.paged import PagedCache, shape_of
from vcsd.integrations.plan import Plan, Scheduling
from vcsd.integrations.settings import Settings
from vcsd.integrations.working import Working

BLOCK_TOKENS = 16  # of a block in drives: every engine whose blocks are multiples finds what another has stored
APART_SPECS = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
APART_DTYPES = "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"


@dataclass
class Iteration(KVConnectorMetadata):
    """From the scheduler to its workers."""

    plan: Plan


@dataclass
class Changed(KVConnectorWorkerMetadata):
    """From workers to the scheduler: keys that came (True) and went, by worker."""

    changes: dict[int, dict[bytes, bool]]

    def aggregate(self, other: Changed) -> Changed:
        return Changed(self.changes | other.changes)


@dataclass
class Stored(KVConnectorHandshakeMetadata):
    """What a worker finds in its drives when it begins, and the model that it serves, as a digest."""

    worker: int
    keys: list[bytes]
    model: str


@dataclass
class Counts(KVConnectorStats):
    """`host_driver.prefixes.keeper.COUNTS` of an interval."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Counts) -> Counts:
        return Counts(dict(Counter(self.data) + Counter(other.data)))

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
    """Both sides of the connector; vLLM makes one of each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ValueError for a setting or a model that is not served, ConnectionError where no drive answers."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('kv_load_failure_policy: set it to "recompute", as what cannot be loaded can be computed')
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("pipeline_parallel_size: must be 1, workers with other layers have other prefixes")
        settings = from_values(transfer.kv_connector_extra_config, Settings)
        self._workers, self._block_tokens = parallel.tensor_parallel_size, vllm_config.cache_config.block_size
        names = _names(vllm_config, kv_cache_config, settings)
        self._shape, self._model = names.shape, names.model.digest
        self._worker: Working | None = None
        self._scheduler: Scheduling | None = None
        if role == KVConnectorRole.SCHEDULER:
            admission = Admission(settings.admit_after)
            adapters = Adapters(settings.weights)
            self._scheduler = Scheduling(names, self._block_tokens, self._workers, admission, adapters.identity)
        else:
            self._rank = parallel.rank
            connects = settings.connects(self._rank, self._workers)
            store = partial(connected, connects, replace(names, rank=self._rank), settings.max_blocks or None)
            self._worker = Working(Keeper(store, settings.stores_in_flight), self._block_tokens)

    # Workers

    @property
    def _working(self) -> Working:
        assert self._worker is not None, "the scheduler's side has no drives"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = [kv_caches[name] for name in _group(self._kv_cache_config).layer_names]
        cache = PagedCache(layers, self._kv_cache_config.num_blocks, self._block_tokens)
        if cache.shape() != self._shape:
            raise ValueError(f"a cache of {cache.shape()}: {self._shape} was announced")
        self._working.cache = cache

    def get_handshake_metadata(self) -> Stored:
        changes = self._working.keeper.take_changes()
        return Stored(self._rank, [key for key, there in changes.items() if there], self._model)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.start(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are computed when all their layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are stored when the last one is computed."""

    def wait_for_save(self) -> None:
        self._working.save(self._get_connector_metadata().plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._working.finish() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_failed()

    def build_connector_worker_meta(self) -> Changed | None:
        changes = self._working.keeper.take_changes()
        return Changed({self._rank: changes}) if changes else None

    def get_kv_connector_stats(self) -> Counts | None:
        counts = self._worker.keeper.take_counts() if self._worker else {}
        return Counts(counts) if counts else None

    def shutdown(self) -> None:
        if self._worker:
            self._worker.keeper.close()

    # The scheduler

    @property
    def _scheduling(self) -> Scheduling:
        assert self._scheduler is not None, "workers schedule nothing"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Stored]) -> None:
        """Raises ValueError for a worker whose model has another identity than the scheduler's."""
        if others := [each.worker for each in metadata.values() if each.model != self._model]:
            raise ValueError(
                f"worker {others[0]}: its model is not the scheduler's; if machines have copies of the same model,"
                ' set "weights" to "content"'
            )
        self._scheduling.heard({each.worker: dict.fromkeys(each.keys, True) for each in metadata.values()})

    def on_new_request(self, request: Any) -> None:
        self._scheduling.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._scheduling.matched(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Iteration:
        blocks_of = scheduler_output.kv_connector_block_state.get_block_ids
        return Iteration(self._scheduling.plan(scheduler_output.num_scheduled_tokens, lambda r: blocks_of(r)[0]))

    def update_connector_output(self, connector_output: Any) -> None:
        if changed := connector_output.kv_connector_worker_meta:
            self._scheduling.heard(changed.changes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.end(request.request_id)
        return False, None

    # What is measured

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Counts:
        return Counts(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> Prometheus:
        return Prometheus(vllm_config, metric_types, labelnames, values)


def _group(kv_cache_config: Any) -> Any:
    """The model's only group of layers; raises ValueError where there are several."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"{len(groups)} groups of layers: run with --disable-hybrid-kv-cache-manager, if the model can"
        )
    return groups[0]


def _names(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> PrefixNames:
    """Keys of a model's prefixes; raises ValueError for layers without keys and values of single tokens."""
    group, cache = _group(kv_cache_config), vllm_config.cache_config
    spec, workers = group.kv_cache_spec, vllm_config.parallel_config.tensor_parallel_size
    device = vllm_config.device_config.device_type
    content = getattr(spec, "state_content_size_bytes", 0)
    if not content or content % (2 * FP16_BYTES) or spec.page_size_bytes != spec.num_heads * spec.block_size * content:
        raise ValueError(f"{type(spec).__name__}: its layers hold something else than K and V of each token")
    apart = _keeps_tokens_apart(spec, cache.cache_dtype, device)
    form = {"device": device} | ({} if apart else {"engine_block_tokens": str(cache.block_size)})
    return PrefixNames(
        shape=shape_of(len(group.layer_names), spec.num_heads, content // (2 * FP16_BYTES)),
        model=identity_of(vllm_config, settings, **form),
        drives=len(settings.share(0, workers)),
        salt=settings.salt,
        seed=settings.seed,
        block_tokens=_block_tokens(settings.block_tokens, cache.block_size, apart),
    )


def _keeps_tokens_apart(spec: Any, cache_dtype: str, device: str) -> bool:
    """Whether a token's values in a block are its own, so that blocks of another size can be made of them.

    True for what is known to do so: attention backends for CPUs and some for ROCm mix the tokens of a block, and so do
    formats with scales of several tokens.
    """
    known = type(spec).__name__ in APART_SPECS and cache_dtype in APART_DTYPES
    return known and device == "cuda" and torch.version.hip is None


def _block_tokens(asked: int, engine: int, apart: bool) -> int:
    """Tokens of a block in drives, by the operator's wish and the engine's blocks; raises ValueError."""
    if not asked:
        return BLOCK_TOKENS if apart and engine % BLOCK_TOKENS == 0 else engine
    if asked % engine and (not apart or engine % asked):
        allowed = "a multiple or a divisor" if apart else "a multiple"
        raise ValueError(f"block_tokens = {asked}: must be {allowed} of the engine's {engine}")
    return asked
