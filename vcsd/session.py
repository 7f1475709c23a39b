"""`vcsd.attach`: creates drives, connects the model to them, and restores the model afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec, overload

import torch
from transformers import PreTrainedModel

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_link.replication import COPIES
from csd_spec import AttentionConfig, Drive, ModelShape, SparsityBudget
from csd_spec.network import network_named
from host_driver.driver import Driver
from host_driver.hf.forward import attached, check_not_attached
from host_driver.hf.shape import LayerPlacement, placement, unwrapped
from host_driver.kv_table import KvTable
from host_driver.sharding import assign_heads
from kv_cache.limits import TierLimits
from kv_cache.policies import PolicyLike
from vcsd.attach_options import IN_STORAGE, METHOD, AttachConfig, check_in_tiers
from vcsd.capacity_check import check_drives
from vcsd.home_stack import HomeStack
from vcsd.redundancy import open_redundant
from vcsd.report import Report, method_statistics
from vcsd.tiered import TierConfig, TierSession, context_of
from vcsd.transport import check_method, methods_of

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class InDrives:
    """A place for the KV cache: drives.

    Attributes:
        options: Options of `attach`.
        attention: Method, budget and layout.
        drives: Drives to create or to reach; or the caller's devices, which stay open.
    """

    options: AttachConfig
    attention: AttentionConfig
    drives: DriveSetConfig | Sequence[Drive]

    def __post_init__(self) -> None:
        if self.options.redundancy == "mirror" and self.count < 2:
            raise ValueError("redundancy = mirror: at least 2 drives are needed")

    @classmethod
    def of(cls, options: AttachConfig, method: str = METHOD) -> InDrives:
        """The place of the options. `method`: the default."""
        return cls(options, options.attention(method), options.drive_set())

    @contextmanager
    def attach(self, model: PreTrainedModel) -> Iterator[DriveSession]:
        """Attach a model to the drives until the block ends."""
        model, options = unwrapped(model), self.options
        placed = placement(model)
        place = self.stored(model.dtype, placed.shape.latent)
        place.check(placed.shape)
        methods = place.known_methods()  # before connecting: drives serve one host at a time
        check_method(place.attention, methods)
        check_not_attached(model)
        network = network_named(options.network) if options.network else None
        with HomeStack() as undo:
            devices, replay = undo.enter_context(open_redundant(self.drives, options.redundancy, network))
            driver = Driver(devices, placed.shape, place.attention, options.flush_interval_steps)
            kv = KvTable.in_drives(driver, next(model.parameters()), context_of(model))
            undo.callback(kv.close)
            undo.callback(_close, kv, driver)
            if isinstance(self.drives, DriveSetConfig) and self.drives.data_dir:
                undo.callback(driver.flush)
            csd = DriveSession(kv, driver, placed, place, methods)
            undo.callback(csd.save_statistics)
            micro_batches = options.micro_batches or (1 if model.device.type == "cpu" else 2)
            undo.enter_context(attached(model, kv, placed.kinds, micro_batches, replay))
            yield csd

    def stored(self, dtype: torch.dtype, latent: bool) -> InDrives:
        """Copy with the stored data type of a model that computes in `dtype`; `latent`: V is a part of K."""
        return replace(self, attention=self.attention.for_model_dtype(dtype is torch.bfloat16, latent))

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError if the drives do not support a model."""
        assign_heads(shape, self.count)
        self.attention.at(1, shape.head_dim)

    def check_capacity(self, shape: ModelShape, rows: int, max_tokens: int) -> InDrives:
        """Raise ValueError if the KV cache of a run does not fit in the drives; returns the same place."""
        if isinstance(self.drives, DriveSetConfig):
            check_drives(self.drives, self.attention, shape, rows, max_tokens, COPIES[self.options.redundancy])
        return self

    def describe(self, stored: int, head_dim: int) -> dict[str, Any]:
        """Method and parameters at `stored` tokens, for JSON output."""
        params = self.attention.at(stored, head_dim)
        convention = getattr(self.attention.budget, "convention", "paper")
        description: dict[str, Any] = {"attention": self.attention.method, "convention": convention}
        layout = self.attention.kv_layout
        return description | {"r": params.r, "k": params.k, "l": params.l, "layout": layout.name, "lossy": layout.lossy}

    @contextmanager
    def without_data_dir(self) -> Iterator[InDrives]:
        """Copy with temporary drives; their files, if any, are created next to the kept folder."""
        drives = self.drives
        if not isinstance(drives, DriveSetConfig) or not drives.data_dir:
            yield self
        elif drives.storage.kind == "memory":
            yield replace(self, drives=replace(drives, data_dir=None))
        else:
            with TemporaryDirectory(prefix=f"{drives.data_dir.name}-", dir=drives.data_dir.absolute().parent) as folder:
                yield replace(self, drives=replace(drives, data_dir=Path(folder)))

    @property
    def count(self) -> int:
        """Number of drives."""
        return self.drives.count if isinstance(self.drives, DriveSetConfig) else len(self.drives)

    def known_methods(self) -> Collection[str] | None:
        """Methods that all drives know; None if a device would have to be asked, which takes simulated time."""
        if isinstance(self.drives, DriveSetConfig):
            return methods_of(self.drives)
        names = [device.methods for device in self.drives if isinstance(device, InProcessDrive)]
        if len(names) < len(self.drives):
            return None
        return [name for name in names[0] if all(name in others for others in names)]


def _close(kv: KvTable, driver: Driver) -> None:
    """Close a driver before its table is closed, so that sequences stay in the drives."""
    with kv.access.hold():  # a forward of another thread has ended
        driver.close()


class DriveSession:
    """A model with decode attention in drives."""

    def __init__(
        self,
        kv: KvTable,
        driver: Driver,
        placed: LayerPlacement,
        place: InDrives,
        methods: Collection[str] | None = None,
    ) -> None:
        """Create a session.

        Args:
            kv: KV data of all caches.
            driver: Ships attention to the drives.
            placed: Placement of the model's layers.
            place: Place of the KV cache.
            methods: Methods of the drives; None if unknown (drives refuse unknown methods).
        """
        self.kv, self.driver, self.placed, self.place, self._methods = kv, driver, placed, place, methods
        self._attended: dict[str, float] | None = None

    def set_method(self, method: str, budget: SparsityBudget) -> None:
        """Change method and budget from the next decode step on; stored data is kept."""
        method = AttentionConfig.named(method).method
        attention = replace(self.driver.attention, method=method, budget=budget)
        check_method(attention, self._methods)
        budget.at(1, self.driver.shape.head_dim)
        self.driver.attention = attention

    def report(self) -> Report:
        """Report of the work so far; printing it shows a table."""
        return Report.of(self.driver, self.placed, self._attended)

    def save_statistics(self) -> None:
        """Save the drives' own counters for later reports, before the drives are closed."""
        self._attended = method_statistics(self.driver)


def _options_of(
    config: Callable[_P, AttachConfig],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[PreTrainedModel, _P], AbstractContextManager[DriveSession]]]:
    """Let a type checker know the keywords of `attach`: those of a configuration."""
    return lambda function: function


@overload
@_options_of(AttachConfig)
def attach(model: PreTrainedModel, **options: Any) -> AbstractContextManager[DriveSession]: ...


@overload
def attach(
    model: PreTrainedModel, *, policy: str | PolicyLike, tiers: TierLimits | None = None
) -> AbstractContextManager[TierSession]: ...


def attach(
    model: PreTrainedModel,
    *,
    policy: str | PolicyLike = IN_STORAGE,
    tiers: TierLimits | None = None,
    **options: Any,
) -> AbstractContextManager[DriveSession] | AbstractContextManager[TierSession]:
    """Run a decoder's attention in emulated drives until the block ends, then restore the model.

    With another policy, keep its KV cache in tiers and attend on the model's device.

    Args:
        model: A transformers decoder; it is modified in place until the block ends.
        policy: A name of `kv_cache.POLICIES`, FILE:NAME, or a policy object (docs/policies.md); `in-storage` uses
            drives.
        tiers: Limits of tiers, with another policy than `in-storage`.
        options: Options with drives, such as `drives=2` and `method="sparf"`: the fields of `AttachConfig`.

    Raises:
        ValueError: (UnsupportedModelError) The model or an option is not supported; nothing has been changed.
        DriveError: A drive refuses a command.
    """
    if policy != IN_STORAGE or tiers is not None:
        check_in_tiers(policy, tiers, options)
        return TierConfig(policy=policy, tiers=tiers or TierLimits()).attach(model)
    return InDrives.of(AttachConfig(**options)).attach(model)
