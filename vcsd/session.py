"""`vcsd.attach`: creates drives, connects the model to them, and restores the model afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack, overload

import torch
from transformers import PreTrainedModel

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_link.replication import COPIES, REDUNDANCIES, Redundancy
from csd_spec import AttentionConfig, Drive, ModelShape, SparsityBudget
from csd_spec.network import Network, network_named
from host_driver.driver import Driver
from host_driver.hf.forward import check_not_attached, in_drives
from host_driver.hf.shape import LayerPlacement, placement, unwrapped
from host_driver.sharding import assign_heads
from kv_cache.limits import TierLimits
from kv_cache.policies import PolicyLike
from vcsd.attach_options import (
    IN_STORAGE,
    METHOD,
    DriveOptions,
    attention_of,
    check_in_tiers,
    checked,
    drives_of,
)
from vcsd.capacity_check import check_drives
from vcsd.home_stack import HomeStack
from vcsd.redundancy import open_redundant
from vcsd.report import Report, method_statistics
from vcsd.tiered import TierConfig, TierSession
from vcsd.transport import check_method, methods_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachConfig:
    """Configuration of `attach` with drives.

    Attributes:
        attention: Method, budget and layout.
        drives: Drives to create or connect to; or the caller's devices, which stay open.
        micro_batches: Micro-batches of a decode step, so that model and drives overlap; None: 2 for a model on a GPU, 1
            on the CPU, which would read its weights twice.
        flush_interval_steps: Decode steps between flushes; 0: never.
        redundancy: Protection against lost drives, see `vcsd.redundancy`.
        network: Network between host and drives in simulated time; None: none.
    """

    attention: AttentionConfig = AttentionConfig()
    drives: DriveSetConfig | Sequence[Drive] = DriveSetConfig()
    micro_batches: int | None = None
    flush_interval_steps: int = 0
    redundancy: Redundancy = "none"
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches = {self.micro_batches}: must be at least 1")
        if self.flush_interval_steps < 0:
            raise ValueError(f"flush_interval_steps = {self.flush_interval_steps}: must be at least 0")
        if self.redundancy not in REDUNDANCIES:
            raise ValueError(f"redundancy = {self.redundancy!r}: must be one of {', '.join(REDUNDANCIES)}")
        if self.redundancy == "mirror" and self.count < 2:
            raise ValueError("redundancy = mirror: at least 2 drives are needed")
        if self.redundancy == "none" and isinstance(self.drives, DriveSetConfig) and self.drives.spares:
            raise ValueError("spares: redundancy = none does not use them: set redundancy to mirror or recompute")
        if not isinstance(self.drives, DriveSetConfig):
            for device in self.drives:
                if not callable(getattr(device, "submit", None)):
                    raise ValueError(f"drives: {device!r} is not a device: it has no method submit")

    def attach(self, model: PreTrainedModel) -> AbstractContextManager[DriveSession]:
        """Attach a model to the drives until the block ends."""
        return attach_with(model, self)

    def stored(self, dtype: torch.dtype, latent: bool) -> AttachConfig:
        """Copy with the stored data type of a model that computes in `dtype`; `latent`: V is a part of K."""
        return replace(self, attention=self.attention.for_model_dtype(dtype is torch.bfloat16, latent))

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError if the drives do not support a model."""
        assign_heads(shape, self.count)
        self.attention.at(1, shape.head_dim)

    def check_capacity(self, shape: ModelShape, rows: int, max_tokens: int) -> AttachConfig:
        """Raise ValueError if the KV cache of a run does not fit in the drives; returns the same configuration."""
        if isinstance(self.drives, DriveSetConfig):
            check_drives(self.drives, self.attention, shape, rows, max_tokens, COPIES[self.redundancy])
        return self

    def describe(self, stored: int, head_dim: int) -> dict[str, Any]:
        """Method and parameters at `stored` tokens, for JSON output."""
        params = self.attention.at(stored, head_dim)
        convention = getattr(self.attention.budget, "convention", "paper")
        description: dict[str, Any] = {"attention": self.attention.method, "convention": convention}
        layout = self.attention.kv_layout
        return description | {"r": params.r, "k": params.k, "l": params.l, "layout": layout.name, "lossy": layout.lossy}

    @contextmanager
    def without_data_dir(self) -> Iterator[AttachConfig]:
        """Copy with temporary drives; their files, if any, are created next to the kept folder."""
        drives = self.drives
        if not isinstance(drives, DriveSetConfig) or not drives.data_dir:
            yield self
        elif drives.medium.kind == "memory":
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


class DriveSession:
    """A model with decode attention in drives."""

    def __init__(
        self,
        driver: Driver,
        placed: LayerPlacement,
        config: AttachConfig,
        methods: Collection[str] | None = None,
    ) -> None:
        """Create a session.

        Args:
            driver: Ships attention to the drives.
            placed: Placement of the model's layers.
            config: Configuration.
            methods: Methods of the drives; None if unknown (drives refuse unknown methods).
        """
        self.driver, self.placed, self.config, self._methods = driver, placed, config, methods
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


@overload
def attach(
    model: PreTrainedModel,
    drives: int | str | Sequence[Drive] = 1,
    method: str = METHOD,
    *,
    policy: Literal["in-storage"] = "in-storage",
    **options: Unpack[DriveOptions],
) -> AbstractContextManager[DriveSession]: ...


@overload
def attach(
    model: PreTrainedModel, *, policy: str | PolicyLike, tiers: TierLimits | None = None
) -> AbstractContextManager[TierSession]: ...


def attach(
    model: PreTrainedModel,
    drives: int | str | Sequence[Drive] = 1,
    method: str = METHOD,
    *,
    policy: str | PolicyLike = IN_STORAGE,
    tiers: TierLimits | None = None,
    **options: Any,
) -> AbstractContextManager[DriveSession] | AbstractContextManager[TierSession]:
    """Run a decoder's attention in emulated drives until the block ends, then restore the model.

    With another policy, keep its KV cache in tiers and attend on the model's device.

    Args:
        model: A transformers decoder; it is modified in place until the block ends.
        drives: Number of drives to create; `ray` or `ray://HOST:PORT` for a fleet (docs/fleet.md); or devices of the
            caller, which stay open.
        method: A method known to the drives, or a name of `csd_spec.NAMED` (such as `ours`), which also sets layout
            and budget.
        policy: A name of `kv_cache.POLICIES`, FILE:NAME, or a policy object (docs/policies.md); `in-storage` uses
            drives.
        tiers: Limits of tiers, with another policy than `in-storage`.
        options: Options with drives, see `DriveOptions`.

    Raises:
        ValueError: (UnsupportedModelError) The model or an option is not supported; nothing has been changed.
        DriveError: A drive refuses a command.
    """
    if policy != IN_STORAGE or tiers is not None:
        check_in_tiers(policy, tiers, drives, method, options)
        return TierConfig(policy=policy, tiers=tiers or TierLimits()).attach(model)
    settings = checked(drives, method, options)
    direct = {name: settings[name] for name in ("micro_batches", "flush_interval_steps", "redundancy")}
    over = network_named(settings["network"]) if settings["network"] else None
    return attach_with(
        model, AttachConfig(attention=attention_of(settings), drives=drives_of(settings), network=over, **direct)
    )


@contextmanager
def attach_with(model: PreTrainedModel, config: AttachConfig) -> Iterator[DriveSession]:
    """Like `attach`, with all options in one value."""
    model = unwrapped(model)
    placed = placement(model)
    config = config.stored(model.dtype, placed.shape.latent)
    what = config.attention
    config.check(placed.shape)
    methods = config.known_methods()  # before connecting: drives serve one host at a time
    check_method(what, methods)
    check_not_attached(model)
    with HomeStack() as undo:
        drives = config.drives
        devices, replay = undo.enter_context(open_redundant(drives, config.redundancy, config.network))
        driver = Driver(devices, placed.shape, what, config.flush_interval_steps)
        undo.callback(driver.close)
        if isinstance(drives, DriveSetConfig) and drives.data_dir:
            undo.callback(driver.flush)
        csd = DriveSession(driver, placed, config, methods)
        undo.callback(csd.save_statistics)
        micro_batches = config.micro_batches or (1 if model.device.type == "cpu" else 2)
        undo.enter_context(in_drives(model, driver, placed, micro_batches, replay))
        yield csd
