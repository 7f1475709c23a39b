"""`vcsd.attach`: builds drives, hands them to the host driver, and puts the model back afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack, overload

import torch
from transformers import PreTrainedModel

from csd_firmware import InProcessDevice
from csd_link.driveset import DriveSet
from csd_link.replication import COPIES, REDUNDANCIES, Redundancy
from csd_spec import Attention, Budget, Device, ModelShape
from csd_spec.network import Network, network_named
from host_driver.driver import Driver
from host_driver.hf.forward import check_free, in_drives
from host_driver.hf.shape import Placement, placement
from host_driver.sharding import share_out
from kv_cache.limits import TierLimits
from kv_cache.policies import PolicyLike
from vcsd.attach_options import (
    IN_STORAGE,
    DriveOptions,
    attention_of,
    check_in_tiers,
    checked,
    drives_of,
    renamed,
)
from vcsd.redundancy import protected
from vcsd.redundancy_cost import Decode, Estimate, HostCompute
from vcsd.report import Report, attended_by
from vcsd.room import check_drives
from vcsd.tiered import Tiered, TierSetting
from vcsd.transport import check_method, methods_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What attends, on what, and how the host goes about it.

    drives: those to make or to reach; or devices of your own, which stay open.
    mini_batches: parts that a decode batch is split into, so that model and drives work at the same time; None is 2 for
    a model on a GPU, and 1 for one on the CPU, which would read its weights twice.
    flush_every: decode steps after which drives are flushed; 0 is never.
    redundancy: how lost drives are survived, see `vcsd.redundancy`.
    network: between the host and the drives, in simulated time; None is none.
    """

    attention: Attention = Attention()
    drives: DriveSet | Sequence[Device] = DriveSet()
    mini_batches: int | None = None
    flush_every: int = 0
    redundancy: Redundancy = "none"
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.mini_batches is not None and self.mini_batches < 1:
            raise ValueError(f"mini_batches = {self.mini_batches}: at least 1 is needed")
        if self.flush_every < 0:
            raise ValueError(f"flush_every = {self.flush_every}: must be at least 0")
        if self.redundancy not in REDUNDANCIES:
            raise ValueError(f"redundancy = {self.redundancy!r}: must be one of {', '.join(REDUNDANCIES)}")
        if self.redundancy == "mirror" and self.count < 2:
            raise ValueError("redundancy = mirror: at least 2 drives are needed")
        if self.redundancy == "none" and isinstance(self.drives, DriveSet) and self.drives.spares:
            raise ValueError("spares: with redundancy = none nothing would use them, use mirror or recompute")
        if not isinstance(self.drives, DriveSet):
            for device in self.drives:
                if not callable(getattr(device, "submit", None)):
                    raise ValueError(f"drives: {device!r} is no device, it takes no commands")

    def attached(self, model: PreTrainedModel) -> AbstractContextManager[Attached]:
        """The model attached to the drives until the block ends."""
        return attached(model, self)

    def stored(self, dtype: torch.dtype, latent: bool) -> Setting:
        """The same, with values stored as a model that computes in `dtype` has them. latent: V is a part of K."""
        return replace(self, attention=self.attention.for_model_dtype(dtype is torch.bfloat16, latent))

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError for a model that these drives cannot serve."""
        share_out(shape, self.count)
        self.attention.at(1, shape.head_dim)

    def sized(self, shape: ModelShape, rows: int, max_tokens: int) -> Setting:
        """Drives take what comes, where they have room; raises ValueError where they have not."""
        if isinstance(self.drives, DriveSet):
            check_drives(self.drives, self.attention, shape, rows, max_tokens, COPIES[self.redundancy])
        return self

    def asked(self, stored: int, head_dim: int) -> dict[str, Any]:
        """The method, and its parameters when so many tokens are stored."""
        params = self.attention.at(stored, head_dim)
        convention = getattr(self.attention.budget, "convention", "paper")
        asked: dict[str, Any] = {"attention": self.attention.method, "convention": convention}
        layout = self.attention.kv_layout
        return asked | {"r": params.r, "k": params.k, "l": params.l, "layout": layout.name, "lossy": layout.lossy}

    @contextmanager
    def unkept(self) -> Iterator[Setting]:
        """The same on drives that are gone after the block; what is read from files lies beside those that are kept."""
        drives = self.drives
        if not isinstance(drives, DriveSet) or not drives.keep:
            yield self
        elif drives.medium.kind == "memory":
            yield replace(self, drives=replace(drives, keep=None))
        else:
            with TemporaryDirectory(prefix=f"{drives.keep.name}-", dir=drives.keep.absolute().parent) as folder:
                yield replace(self, drives=replace(drives, keep=Path(folder)))

    @property
    def count(self) -> int:
        """Number of drives."""
        return self.drives.count if isinstance(self.drives, DriveSet) else len(self.drives)

    def known_methods(self) -> Collection[str] | None:
        """Methods that all drives know; None for devices elsewhere, which would take modelled time to answer."""
        if isinstance(self.drives, DriveSet):
            return methods_of(self.drives)
        names = [device.methods for device in self.drives if isinstance(device, InProcessDevice)]
        if len(names) < len(self.drives):
            return None
        return [name for name in names[0] if all(name in others for others in names)]


class Attached:
    """A model whose decode attention runs in drives."""

    def __init__(
        self,
        driver: Driver,
        placed: Placement,
        setting: Setting,
        host: HostCompute,
        known: Collection[str] | None = None,
    ) -> None:
        """Create it.

        Args:
            driver: Ships attention to the drives.
            placed: Which layers are in drives.
            setting: What was asked for.
            host: The model's device.
            known: Methods of the drives; None if only the drives know, which refuse others.
        """
        self.driver, self.placed, self.setting, self._host, self._known = driver, placed, setting, host, known
        self._attended: dict[str, float] | None = None

    def use(self, attention: str, budget: Budget) -> None:
        """Attend otherwise from the next decode step on; what is stored stays."""
        method = Attention.named(attention).method
        asked = replace(self.driver.attention, method=method, budget=budget)
        check_method(asked, self._known)
        budget.at(1, self.driver.shape.head_dim)
        self.driver.attention = asked

    def report(self) -> Report:
        """What has been done so far; printing it shows a table."""
        return Report.of(self.driver, self.placed, self._attended)

    def keep(self) -> None:
        """Keep for later reports what only drives know, which are about to end."""
        self._attended = attended_by(self.driver)

    def redundancy_estimate(self, rows: int, tokens: int, new_tokens: int) -> Estimate:
        """Modelled cost of each redundancy, if a drive is lost at the end of a decode; may be called before it.

        Args:
            rows: Sequences.
            tokens: Tokens stored of each at the end.
            new_tokens: Tokens of these that are decoded.
        """
        shape, spec = self.driver.shape, self.driver.devices[0].spec
        decode = Decode.of(shape, len(self.driver.devices), rows, tokens, new_tokens)
        layout = self.driver.attention.layout
        return Estimate.on(spec, self.setting.network, layout, shape, decode, self._host)


@overload
def attach(
    model: PreTrainedModel,
    drives: int | str | Sequence[Device] = 1,
    attention: str = "sparf",
    *,
    policy: Literal["in-storage"] = "in-storage",
    **options: Unpack[DriveOptions],
) -> AbstractContextManager[Attached]: ...


@overload
def attach(
    model: PreTrainedModel, *, policy: str | PolicyLike, tiers: TierLimits | None = None
) -> AbstractContextManager[Tiered]: ...


def attach(
    model: PreTrainedModel,
    drives: int | str | Sequence[Device] = 1,
    attention: str = "sparf",
    *,
    policy: str | PolicyLike = IN_STORAGE,
    tiers: TierLimits | None = None,
    **options: Any,
) -> AbstractContextManager[Attached] | AbstractContextManager[Tiered]:
    """Run a decoder's attention inside virtual drives until the block ends, then put the model back as it was.

    Or, with another policy, keep its K and V in tiers, and attend on the model's device.

    Args:
        model: A decoder of transformers; it is changed in place until the block ends.
        drives: How many to make; `ray` or `ray://HOST:PORT` for those of a fleet (docs/fleet.md); or devices of the
            caller's, which stay open.
        attention: A method that the drives know, or a name of `csd_spec.NAMED` (`ours`), which says layout and budget
            too.
        policy: A name of `kv_cache.POLICIES`, FILE:NAME, or a policy of the caller's (docs/policies.md); `in-storage`
            is drives.
        tiers: With another policy: how much of K and V may lie where.
        options: With drives: see `DriveOptions`.

    Raises:
        ValueError: (Unsupported) with the reason for a model or a setting that cannot be served, before anything is
            changed.
        DeviceError: A drive refuses a command.
    """
    policy = renamed(policy, options.pop("residency", None))  # its former name, for one release
    if policy != IN_STORAGE or tiers is not None:
        check_in_tiers(policy, tiers, drives, attention, options)
        return TierSetting(policy=policy, tiers=tiers or TierLimits()).attached(model)
    given = checked(drives, attention, options)
    asked = {name: given[name] for name in ("mini_batches", "flush_every", "redundancy")}
    over = network_named(given["network"]) if given["network"] else None
    return attached(model, Setting(attention=attention_of(given), drives=drives_of(given), network=over, **asked))


@contextmanager
def attached(model: PreTrainedModel, setting: Setting) -> Iterator[Attached]:
    """The same as `attach`, from values."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    placed = placement(model)
    setting = setting.stored(model.dtype, placed.shape.latent)
    what = setting.attention
    setting.check(placed.shape)
    known = setting.known_methods()  # it may ask drives, which take one host at a time
    check_method(what, known)
    check_free(model)
    with ExitStack() as undo:
        drives = setting.drives
        devices, replay = undo.enter_context(protected(drives, setting.redundancy, setting.network))
        driver = Driver(devices, placed.shape, what, setting.flush_every)
        undo.callback(driver.close)
        if isinstance(drives, DriveSet) and drives.keep:
            undo.callback(driver.flush)
        host = HostCompute.assumed(model.num_parameters(), model.get_memory_footprint(), model.device.type != "cpu")
        csd = Attached(driver, placed, setting, host, known)
        undo.callback(csd.keep)
        mini_batches = setting.mini_batches or (1 if model.device.type == "cpu" else 2)
        undo.enter_context(in_drives(model, driver, placed, mini_batches, replay))
        yield csd
