"""Options of `vcsd.attach` and `vcsd run`: a field of `AttachConfig` is a keyword, and an option if it has help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from csd_link.driveset import DriveOptions, DriveSetConfig
from csd_link.replication import Redundancy
from csd_spec import AttentionConfig, Drive, SparsityBudget
from csd_spec.attention import KvDtype
from csd_spec.checked import Whole, frozen_part, frozen_value
from csd_spec.layouts import load_layouts
from csd_spec.network import NETWORKS
from csd_spec.sparf import BudgetConvention
from kv_cache.limits import TierLimits
from vcsd.options import MAX_COMPRESSION
from vcsd.transport import fleet_or_count

IN_STORAGE, METHOD = "in-storage", "sparf"  # defaults of policy and method


@frozen_part
class AttentionOptions:
    """Attention method and budget.

    Attributes:
        method: A method known to the drives, or a name of `csd_spec.NAMED`, which also sets layout and budget; None:
            sparf, or dense where a policy may move KV data out of the drives.
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

    def attention(self, default: str = METHOD) -> AttentionConfig:
        """Method, budget and layout. `default`: the method if none was chosen."""
        names = "compression", "budget_convention", "budget", "layout", "kv_dtype"
        return AttentionConfig.named(self.method or default, *(getattr(self, name) for name in names))


@frozen_value
class AttachConfig(AttentionOptions, DriveOptions):
    """Drives; how a model uses them. Further options are those of `AttentionOptions` and `DriveOptions`.

    Attributes:
        drives: Number of drives to create; `ray` or `ray://HOST:PORT` for a fleet (docs/fleet.md); or devices of the
            caller, which stay open.
        micro_batches: Micro-batches of a decode step, so that model and drives overlap; None: 2 for a model on a GPU, 1
            on the CPU, which would read its weights twice.
    """

    drives: SkipValidation[int | str | Sequence[Drive]] = 1  # checked below, in one line and not one for each type
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
        is_count = isinstance(drives, Integral) and drives is not True and int(drives) > 0
        if not is_count and not isinstance(drives, Sequence):
            raise ValueError(f"drives = {drives!r}: must be a whole number above 0, a fleet (ray), or devices")
        if self.redundancy == "none" and self.spares:
            raise ValueError(f"spares = {self.spares}: redundancy none does not use them: choose mirror or recompute")
        load_layouts(self.layouts_file)

    def drive_set(self) -> DriveSetConfig | Sequence[Drive]:
        """Drives to create or to reach, or the caller's devices."""
        drives = self.drives
        if isinstance(drives, Sequence) and not isinstance(drives, str):
            for device in drives:
                if not callable(getattr(device, "submit", None)):
                    raise ValueError(f"drives: {device!r} is not a device: it has no method submit")
            if self.spares:
                raise ValueError(f"spares = {self.spares}: only with created or served drives, not with devices")
            return drives
        count, transport = fleet_or_count(drives if isinstance(drives, str) else int(drives), self.transport)
        return DriveSetConfig.of(self, count=count, transport=transport, spares=self.spares)


def check_in_tiers(policy: Any, tiers: TierLimits | None, options: dict[str, Any]) -> None:
    """Raise ValueError for drive options combined with tiers, or for tiers of another type."""
    if tiers is not None and not isinstance(tiers, TierLimits):
        raise ValueError(f"tiers = {tiers!r}: must be a TierLimits")
    if policy == IN_STORAGE:
        raise ValueError("tiers: drives hold the whole KV cache: with tiers set a policy, such as dual-blade or auto")
    config = AttachConfig(**options)
    for field in fields(config):
        if field.name in options and getattr(config, field.name) != field.default:
            raise ValueError(
                f"{field.name} is a drive option, and policy = {policy!r} attends on the device: remove one"
            )
