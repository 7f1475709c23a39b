"""Configuration of `vcsd.attach` and `vcsd.serve`: a field is a keyword, and an option of a command if it has help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation

from csd_link.driveset import DriveOptions, DriveSetConfig
from csd_link.replication import Redundancy
from csd_spec import AttentionConfig, Drive, SparsityBudget
from csd_spec.attention import KvDtype
from csd_spec.checked import Whole, frozen_part, frozen_value
from csd_spec.layouts import load_layouts
from csd_spec.network import NETWORKS, network_named
from csd_spec.sparf import BudgetConvention
from kv_cache.cost import ServingCost
from kv_cache.hardware import CSD
from kv_cache.limits import TierLimits
from kv_cache.policies import PolicyLike, policy_of
from kv_cache.policies.time_slices import TimeSlices
from kv_cache.scheduler import Policy
from vcsd.options import MAX_COMPRESSION, ServingLimits
from vcsd.transport import fleet_or_count

IN_STORAGE, METHOD = "in-storage", "sparf"  # policy and method of an attached model by default


@frozen_part
class AttentionOptions:
    """Attention method and budget.

    Attributes:
        method: A method known to the drives, or a name of `csd_spec.NAMED`, which also sets layout and budget; None:
            sparf, or dense if there is a policy.
        budget: Budget that replaces `compression` and `budget_convention`.
    """

    method: Annotated[
        str | None, Field(description="attention method: dense, sparf or another one (see docs/methods.md)")
    ] = None
    compression: Annotated[
        float | None,
        Field(ge=1, le=MAX_COMPRESSION, description="use 1/C of the KV data (default: 8; 1: dense)"),
    ] = None
    budget_convention: Annotated[
        BudgetConvention | None, Field(description="paper: k = S/C (the default); bytes: k = S/2C")
    ] = None
    layout: Annotated[
        str | None, Field(description="KV layout in flash, see docs/layouts.md (default: the method's, or fp16)")
    ] = None
    kv_dtype: Annotated[
        KvDtype | None, Field(description="stored type; fp8 in layout fp16 (default: bf16 for a BF16 model, else fp16)")
    ] = None
    budget: SparsityBudget | None = None

    @property
    def default_method(self) -> str:
        """Attention method if none is chosen."""
        return METHOD

    def attention(self) -> AttentionConfig:
        """Method, budget and layout."""
        names = "compression", "budget_convention", "budget", "layout", "kv_dtype"
        return AttentionConfig.named(self.method or self.default_method, *(getattr(self, name) for name in names))


@frozen_part
class CacheOptions:
    """Placement of the KV cache.

    Attributes:
        policy: A name of `kv_cache.POLICIES`, FILE:NAME, or a policy object (docs/policies.md); None: all KV data is in
            drives, which attend.
        tiers: Limits of the KV cache by tier, for policies that use tiers.
        record: Record the policy's actions, for a replay in simulated time.
    """

    policy: SkipValidation[str | PolicyLike | None] = None
    tiers: TierLimits | None = None
    record: bool = False

    @property
    def in_drives(self) -> bool:
        """Whether all KV data is in drives."""
        return self.policy is None or self.policy == IN_STORAGE

    @property
    def policy_name(self) -> str:
        """Name of the policy."""
        policy = IN_STORAGE if self.policy is None else self.policy
        return policy if isinstance(policy, str) else self.new_policy().name

    def new_policy(self) -> Policy:
        """Create an instance of the policy; raises ValueError if there is no such policy."""
        return policy_of(IN_STORAGE if self.policy is None else self.policy)


@frozen_value
class AttachConfig(AttentionOptions, CacheOptions, DriveOptions):
    """Drives; how a model uses them. Further fields are those of the three base classes.

    Attributes:
        drives: Number of drives to create; `ray` or `ray://HOST:PORT` for a fleet (docs/fleet.md); or devices of the
            caller, which stay open; None: one.
        micro_batches: Micro-batches of a decode step, so that model and drives overlap; None: 2 for a model on a GPU, 1
            on the CPU, which would read its weights twice.
    """

    fewest_drives: ClassVar[int] = 1

    # Checked below, in one line and not one for each type
    drives: SkipValidation[int | str | Sequence[Drive] | None] = None
    flush_interval_steps: Annotated[
        Whole, Field(ge=0, le=1 << 20, description="decode steps between flushes; 0: never")
    ] = 0
    micro_batches: Annotated[Whole | None, Field(ge=1)] = None
    redundancy: Annotated[
        Redundancy,
        Field(
            description="protection against lost drives (docs/fleet.md): mirror stores KV heads on two drives, "
            "recompute computes lost ones again from the tokens"
        ),
    ] = "none"
    spares: Annotated[Whole, Field(ge=0, le=1024, description="spare drives, which replace lost ones")] = 0
    network: Annotated[str | None, Field(description=f"simulated network to the drives: {', '.join(NETWORKS)}")] = None

    def __post_init__(self) -> None:
        DriveOptions.__post_init__(self)  # not super(), which fails in a class with slots
        drives: Any = self.drives
        is_count = isinstance(drives, Integral) and not isinstance(drives, bool) and int(drives) >= self.fewest_drives
        if drives is not None and not is_count and not isinstance(drives, Sequence):
            raise ValueError(
                f"drives = {drives!r}: must be a whole number, at least {self.fewest_drives}, a fleet (ray), or devices"
            )
        if self.redundancy == "none" and self.spares:
            raise ValueError(f"spares = {self.spares}: redundancy none does not use them: choose mirror or recompute")
        if self.network:
            network_named(self.network)
        self._check_placement()
        load_layouts(self.layouts_file)

    def _check_placement(self) -> None:
        """Raise ValueError for a policy of a server, for tiers beside drives, and for drive options beside tiers."""
        if self.in_drives:
            if self.tiers is not None:
                raise ValueError(
                    "tiers: drives hold the whole KV cache: with tiers set a policy, such as dual-blade or auto"
                )
            return
        if not self.new_policy().has_layers:
            raise ValueError(f"policy = {self.policy_name!r}: schedules requests of a server: use it with vcsd.serve")
        if option := self.drive_option():
            raise ValueError(
                f"{option}: an option of drives, and the policy {self.policy_name} attends on the model's device: "
                "remove one"
            )

    def drive_option(self) -> str:
        """The first option of drives that is not the default, as `name = value`; empty if there is none."""
        for field in fields(self):
            value = getattr(self, field.name)
            is_none = field.name == "drives" and not value
            if field.name not in _NOT_OF_DRIVES and value != field.default and not is_none:
                return f"{field.name} = {value if isinstance(value, Path) else repr(value)}"
        return ""

    @property
    def default_method(self) -> str:
        """Attention method if none is chosen: exact where a policy is."""
        return METHOD if self.policy is None else "dense"

    def drive_set(self) -> DriveSetConfig | Sequence[Drive]:
        """Drives to create or to reach, or the caller's devices."""
        drives = 1 if self.drives is None else self.drives
        if isinstance(drives, Sequence) and not isinstance(drives, str):
            for device in drives:
                if not callable(getattr(device, "submit", None)):
                    raise ValueError(f"drives: {device!r} is not a device: it has no method submit")
            if self.spares:
                raise ValueError(f"spares = {self.spares}: only with created or served drives, not with devices")
            return drives
        count, transport = fleet_or_count(drives if isinstance(drives, str) else int(drives), self.transport)
        return DriveSetConfig.of(self, count=count, transport=transport, spares=self.spares)


@frozen_value
class ServingConfig(ServingLimits, AttachConfig):
    """Configuration of `vcsd.serve`: that of `vcsd.attach`, with the limits and the objective of a server.

    Attributes:
        drives: As of `AttachConfig`; None: one for a policy that attends in drives, none for others.
        cost: Cost model of the policy instead of an H100's; its device memory follows from the tiers.
        slo_scale: Objective, as a multiple of the step of the longest request that fits.
        replan_on_drift: Plan again if measured steps deviate from the cost model; decisions are then not reproducible.
    """

    fewest_drives: ClassVar[int] = 0

    policy: SkipValidation[str | PolicyLike | None] = "orbitflow"
    cost: ServingCost | None = None
    slo_scale: Annotated[float, Field(gt=0)] = 1.5
    replan_on_drift: bool = False

    def _check_placement(self) -> None:
        """Raise ValueError for what a server cannot do."""
        policy = self.new_policy()
        if isinstance(policy, TimeSlices) and policy.free:
            raise ValueError(f"policy = {self.policy!r}: a bound in simulated time, which cannot serve: choose another")
        if CSD in policy.tiers and not self.has_drives:
            raise ValueError(f"policy = {self.policy_name!r}: attends in drives: set drives to at least 1")
        if self.micro_batches is not None:
            raise ValueError(f"micro_batches = {self.micro_batches}: a server has none: leave it out")
        if self.redundancy == "recompute":
            raise ValueError("redundancy = 'recompute': a server does not compute lost heads again: choose mirror")
        if not self.has_drives and (option := self.drive_option()):
            raise ValueError(
                f"{option}: an option of drives, and the policy {self.policy_name} uses none: leave it out"
            )

    @property
    def has_drives(self) -> bool:
        """Whether there are drives."""
        return CSD in self.new_policy().tiers if self.drives is None else bool(self.drives)


def _names(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind)}


_NOT_OF_DRIVES = _names(CacheOptions) | (_names(ServingConfig) - _names(AttachConfig))
