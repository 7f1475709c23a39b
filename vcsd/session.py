"""`vcsd.attach`: keeps a model's KV cache in drives or tiers, and restores the model afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, overload

import torch
from transformers import PreTrainedModel

from csd_firmware import InProcessDrive
from csd_io.cgroup import available_bytes, cgroup_of
from csd_link.driveset import DriveSetConfig
from csd_spec import AttentionConfig, Drive, ModelShape, SparsityBudget
from csd_spec.network import network_named
from host_driver.driver import Driver
from host_driver.hf.forward import attached, check_not_attached
from host_driver.hf.replay import Replay
from host_driver.hf.shape import FULL, MAX_TOKENS, LayerPlacement, context_of, kinds_in_tiers, placement, unwrapped
from host_driver.kv_table import KvTable
from host_driver.sharding import assign_heads
from kv_cache.limits import TierLimits
from vcsd.config import AttachConfig
from vcsd.drive_report import DriveReport, method_statistics
from vcsd.home_stack import HomeStack
from vcsd.redundancy import open_redundant
from vcsd.report import Report
from vcsd.transport import check_method, methods_of

_P = ParamSpec("_P")


class Session:
    """A model whose KV cache is in drives or tiers.

    Attributes:
        kv: The KV data.
        policy: Name of the policy that places it.
        kinds: Kind of each layer of the model.
    """

    def __init__(
        self,
        kv: KvTable,
        policy: str,
        kinds: Sequence[str],
        placed: LayerPlacement | None = None,
        methods: Collection[str] | None = None,
    ) -> None:
        """Create a session.

        Args:
            kv: The KV data.
            policy: Name of the policy that places it.
            kinds: Kind of each layer of the model.
            placed: Placement of its layers, if there are drives.
            methods: Methods of the drives; None if unknown (drives refuse unknown methods).
        """
        self.kv, self.policy, self.kinds, self._placed, self._methods = kv, policy, kinds, placed, methods
        self._attended: dict[str, float] | None = None

    @property
    def driver(self) -> Driver:
        """Driver of the drives; raises ValueError if there are none."""
        if self.kv.drives is None:
            raise ValueError(f"policy = {self.policy!r}: this session has no drives")
        return self.kv.drives.driver

    @property
    def placed(self) -> LayerPlacement:
        """Placement of the model's layers; raises ValueError if there are no drives."""
        assert self.driver and self._placed
        return self._placed

    def set_method(self, method: str, budget: SparsityBudget) -> None:
        """Change method and budget of the drives from the next decode step on; stored data is kept."""
        method = AttentionConfig.named(method).method
        attention = replace(self.driver.attention, method=method, budget=budget)
        check_method(attention, self._methods)
        budget.at(1, self.driver.shape.head_dim)
        self.driver.attention = attention

    def report(self) -> Report:
        """Report of the work so far; printing it shows tables."""
        drives = DriveReport.of(self.driver, self.placed, self._attended) if self.kv.drives else None
        return Report.of(self.kv, self.policy, self.kinds, drives)

    def save_statistics(self) -> None:
        """Save the drives' own counters for later reports, before the drives are closed."""
        self._attended = method_statistics(self.driver)


def _options_of(
    config: Callable[_P, AttachConfig],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[PreTrainedModel, _P], AbstractContextManager[Session]]]:
    """Let a type checker know the keywords of `attach`: those of a configuration."""
    return lambda function: function


@overload
@_options_of(AttachConfig)
def attach(model: PreTrainedModel, **options: Any) -> AbstractContextManager[Session]: ...


@overload
def attach(model: PreTrainedModel, config: AttachConfig, **options: Any) -> AbstractContextManager[Session]: ...


def attach(
    model: PreTrainedModel, config: AttachConfig | None = None, **options: Any
) -> AbstractContextManager[Session]:
    """Keep a decoder's KV cache in emulated drives, which attend, until the block ends; then restore the model.

    With a policy that moves KV data between tiers, the model attends on its own device.

    Args:
        model: A transformers decoder; it is modified in place until the block ends.
        config: Configuration.
        options: Fields of a configuration, such as `drives=2` and `method="sparf"`; they go before those of `config`.

    Raises:
        ValueError: (UnsupportedModelError) The model or an option is not supported; nothing has been changed.
        DriveError: A drive refuses a command.
    """
    config = replace(config, **options) if config else AttachConfig(**options)
    config.attention()  # an error of it is one of this call
    return _in_drives(unwrapped(model), config) if config.in_drives else _in_tiers(unwrapped(model), config)


@contextmanager
def _in_tiers(model: PreTrainedModel, config: AttachConfig) -> Iterator[Session]:
    kinds = kinds_in_tiers(model)
    tiers = with_page_cache(config.tiers or TierLimits())
    max_tokens = tiers.max_tokens or min(context_of(model), MAX_TOKENS)
    kv = KvTable(tiers, config.new_policy(), kinds.count(FULL), next(model.parameters()), max_tokens)
    if config.record:
        kv.runner.recorded = []
    with HomeStack() as undo:
        undo.callback(kv.close)
        undo.enter_context(attached(model, kv, kinds))
        yield Session(kv, config.policy_name, kinds)


@contextmanager
def _in_drives(model: PreTrainedModel, config: AttachConfig) -> Iterator[Session]:
    placed = placement(model)
    check_not_attached(model)
    drives = config.drive_set()
    with HomeStack() as undo:
        driver, replay, methods = undo.enter_context(open_driver(model, placed.shape, drives, config))
        kv = KvTable.in_drives(driver, next(model.parameters()), context_of(model))
        undo.callback(kv.close)
        undo.callback(_close, kv, driver)
        if isinstance(drives, DriveSetConfig) and drives.data_dir:
            undo.callback(driver.flush)
        session = Session(kv, config.policy_name, placed.kinds, placed, methods)
        undo.callback(session.save_statistics)
        micro_batches = config.micro_batches or (1 if model.device.type == "cpu" else 2)
        undo.enter_context(attached(model, kv, placed.kinds, micro_batches, replay))
        yield session


@contextmanager
def open_driver(
    model: PreTrainedModel, shape: ModelShape, drives: DriveSetConfig | Sequence[Drive], config: AttachConfig
) -> Iterator[tuple[Driver, Replay | None, Collection[str] | None]]:
    """Open drives, with a driver for a model, until the block ends.

    Yields:
        The driver, which the caller closes; the log from which lost heads are recomputed, if they are; and the methods
        that all drives know, None if a device would have to be asked, which takes simulated time.
    """
    attention = attention_of(config, model, shape)
    assign_heads(shape, drives.count if isinstance(drives, DriveSetConfig) else len(drives))
    attention.at(1, shape.head_dim)
    methods = _methods(drives)  # before connecting: drives serve one host at a time
    check_method(attention, methods)
    network = network_named(config.network) if config.network else None
    with open_redundant(drives, config.redundancy, network) as (devices, replay):
        yield Driver(devices, shape, attention, config.flush_interval_steps), replay, methods


def attention_of(config: AttachConfig, model: PreTrainedModel, shape: ModelShape) -> AttentionConfig:
    """Method, budget and layout of the drives for a model, whose data type they store."""
    return config.attention().for_model_dtype(model.dtype is torch.bfloat16, shape.latent)


def _methods(drives: DriveSetConfig | Sequence[Drive]) -> Collection[str] | None:
    if isinstance(drives, DriveSetConfig):
        return methods_of(drives)
    names = [device.methods for device in drives if isinstance(device, InProcessDrive)]
    if len(names) < len(drives):
        return None
    return [name for name in names[0] if all(name in others for others in names)]


def _close(kv: KvTable, driver: Driver) -> None:
    """Close a driver before its table is closed, so that sequences stay in the drives."""
    with kv.access.hold():  # a forward of another thread has ended
        driver.close()


def with_page_cache(tiers: TierLimits) -> TierLimits:
    """Limits with the size of the page cache: free memory, if none is given."""
    return tiers if tiers.page_cache is not None else replace(tiers, page_cache=available_bytes(cgroup_of()))
