"""`vcsd.attach`: builds drives, hands them to the host driver, and puts the model back afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from csd_firmware import InProcessDevice
from csd_link.driveset import DriveSet
from csd_link.replication import COPIES, REDUNDANCIES, Redundancy
from csd_spec import Attention, Budget, Device, DriveSpec, ModelShape
from csd_spec.attention import Storage
from csd_spec.layouts import load_layouts, name_of
from csd_spec.network import Network, network_named
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.sparf import Convention
from host_driver.driver import Driver
from host_driver.hf.forward import check_free, in_drives
from host_driver.hf.shape import Placement, placement
from host_driver.sharding import share_out
from kv_cache.iteration import Iteration
from kv_cache.limits import TierLimits
from kv_cache.scheduler import Policy
from vcsd.redundancy import protected
from vcsd.redundancy_cost import Decode, Estimate, HostCompute
from vcsd.report import Report
from vcsd.room import check_drives
from vcsd.tiered import TierSetting
from vcsd.transport import check_method, fleet_or_count, methods_of

_TEXT, _NUMBER, _PATH = (str, "text"), (Integral, "a whole number"), (Path | None, "a pathlib.Path")
_KINDS: dict[str, tuple[Any, str]] = {  # of what `attach` is given
    "drives": (Integral | Sequence, "a whole number, a fleet (ray or ray://HOST:PORT), or devices"),
    "attention": _TEXT,
    "compression": (Real | None, "a number"),
    "convention": (str | None, "text"),
    "spec": (DriveSpec, "a DriveSpec"),
    "layout": (str | Integral | None, "text"),
    "embedding_bits": (Integral | None, "a whole number"),
    "storage": (str | None, "text"),
    "redundancy": _TEXT,
    "spares": _NUMBER,
    "network": (str | None, "text"),
    "mini_batches": (Integral | None, "a whole number"),
    "keep": _PATH,
    "transport": _TEXT,
    "flush_every": _NUMBER,
    "restart": (bool, "True or False"),
    "methods": _PATH,
    "layouts": _PATH,
    "tiers": (TierLimits | None, "a TierLimits"),
}
_IN_TIERS = ("model", "policy", "tiers", "residency")  # what `attach` is given for K and V in tiers


def _check_kinds(given: dict[str, Any]) -> None:
    """Raise ValueError for an argument of another kind; in Python True is a whole number."""
    for name, (kind, words) in _KINDS.items():
        value, whole = given[name], isinstance(given[name], bool)
        if not isinstance(value, kind) or (whole and kind is not bool):
            raise ValueError(f"{name} = {value!r}: must be {words}")
    if given["budget"] is not None and not callable(getattr(given["budget"], "at", None)):
        raise ValueError(f"budget = {given['budget']!r}: must be a Compression, a Fixed or another Budget")


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
        return replace(self, attention=self.attention.stored(dtype is torch.bfloat16, latent))

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

    def use(self, attention: str, budget: Budget) -> None:
        """Attend otherwise from the next decode step on; what is stored stays."""
        method = Attention.named(attention).method
        asked = replace(self.driver.attention, method=method, budget=budget)
        check_method(asked, self._known)
        budget.at(1, self.driver.shape.head_dim)
        self.driver.attention = asked

    def report(self) -> Report:
        """What has been done so far; printing it shows a table."""
        return Report.of(self.driver, self.placed)

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


def attach(
    model: PreTrainedModel,
    drives: int | str | Sequence[Device] = 1,
    attention: str = "sparf",
    compression: float | None = None,
    convention: Convention | None = None,
    budget: Budget | None = None,
    spec: DriveSpec = INSTCSD_ZYNQ7045_8CH,
    layout: str | None = None,
    mini_batches: int | None = None,
    keep: Path | None = None,
    transport: str = "inproc",
    flush_every: int = 0,
    restart: bool = True,
    methods: Path | None = None,
    policy: str | Policy | Callable[[Iteration], None] = "in-storage",
    tiers: TierLimits | None = None,
    storage: Storage | None = None,
    redundancy: Redundancy = "none",
    spares: int = 0,
    network: str | None = None,
    embedding_bits: int | None = None,
    layouts: Path | None = None,
    residency: str | Policy | Callable[[Iteration], None] | None = None,
) -> AbstractContextManager[Any]:
    """Run a decoder's attention inside virtual drives until the block ends, then put the model back as it was.

    Or, with another policy, keep its K and V in tiers, and attend on the model's device.
    drives: how many to make, each a `spec`; `ray` or `ray://HOST:PORT` for those of a fleet (docs/fleet.md); or devices
    of your own, which stay open.
    transport: where: `inproc`, `process`, `fuse`, `window:PATH` or `nvme+tcp://HOST:PORT` (docs/drives.md). Elsewhere
    a drive may die and come back; K and V that it has not acknowledged as flushed are kept here meanwhile.
    flush_every: decode steps between flushes; 0: never, and all K and V of drives that may die stay in host memory too.
    restart: whether a drive with a process of its own is restarted when it dies.
    attention: a method that the drives know, or a name of `csd_spec.NAMED` (`ours`), which says layout and budget too.
    methods: a Python file with methods of your own, for drives that are made here (docs/methods.md).
    compression, convention: see `csd_spec.Compression`, 8 and paper where nothing else is said; budget replaces both.
    layout: name of the layout of K and V in drives (docs/layouts.md), by default the method's own or fp16.
    redundancy: how a lost drive is survived (docs/fleet.md): `none`, not at all; `mirror`, KV heads are stored on two
    drives; `recompute`, they are computed again from the tokens. spares: more drives, which replace lost ones.
    network: a name of `csd_spec.network.NETWORKS`, as `100gbe`: simulated time of commands includes their way over it.
    storage: format of stored values, `fp16`, `bf16` or, in layout fp16, `fp8`; the model's by default (docs/models.md).
    keep: a folder in which the drives made here outlive the process, one folder each.
    mini_batches: parts of a decode batch, so that model and drives work at once; by default 2 for a GPU, else 1.
    policy: a name of `kv_cache.POLICIES`, FILE:NAME, or a policy of your own (docs/policies.md); `in-storage` is
    drives. With another one, only tiers may be given: how much of K and V may lie where.
    layouts: a Python file with layouts of your own, which `layout` may name (docs/layouts.md).
    embedding_bits: deprecated, use layout; the code of a layout. residency: deprecated, the former name of policy.
    Raises ValueError (Unsupported) with the reason for a model or a setting that cannot be served, before anything
    is changed; DeviceError when a drive refuses a command.
    """
    given = dict(locals())
    _check_kinds(given)
    given["policy"] = policy = _renamed(policy, residency)
    if policy != "in-storage" or tiers is not None:
        _check_in_tiers(given)
        return TierSetting(policy=policy, tiers=tiers or TierLimits()).attached(model)
    asked = {name: given[name] for name in ("mini_batches", "flush_every", "redundancy")}
    over = network_named(network) if network else None
    return attached(model, Setting(attention=_attention(given), drives=_reached(given), network=over, **asked))


def _attention(given: dict[str, Any]) -> Attention:
    """What `attach` is asked to attend with."""
    load_layouts(given["layouts"])
    layout, code = given["layout"], given["embedding_bits"]
    given = given | {"layout": layout if code is None else name_of(code, "embedding_bits")}
    names = "attention", "compression", "convention", "budget", "layout", "storage"
    return Attention.named(*(given[name] for name in names))


def _reached(given: dict[str, Any]) -> DriveSet | Sequence[Device]:
    """Drives that `attach` makes, those that are served already, or the caller's."""
    drives = given["drives"]
    if isinstance(drives, Sequence) and not isinstance(drives, str):
        if given["spares"]:
            raise ValueError(f"spares = {given['spares']}: only with drives that are made here or served, not devices")
        return drives
    count, transport = fleet_or_count(drives if isinstance(drives, str) else int(drives), given["transport"])
    names = "spec", "keep", "restart", "methods", "layouts", "spares"
    return DriveSet(count=count, transport=transport, **{name: given[name] for name in names})


def _renamed(policy: Any, residency: Any) -> Any:
    """The policy, which may be given by its former name; raises ValueError for both."""
    if residency is None:
        return policy
    if policy != "in-storage":
        raise ValueError(
            f"residency = {residency!r} and policy = {policy!r}: two names of one option, give policy alone"
        )
    warnings.warn("residency is now policy", DeprecationWarning, stacklevel=3)
    return residency


def _check_in_tiers(given: dict[str, Any]) -> None:
    """Raise ValueError for what only drives can be given."""
    if given["policy"] == "in-storage":
        raise ValueError("tiers: drives hold all of K and V: with tiers give a policy, as dual-blade or auto")
    for name, parameter in signature(attach).parameters.items():
        if name not in _IN_TIERS and parameter.default is not Parameter.empty and given[name] != parameter.default:
            raise ValueError(f"{name} is of drives, and policy = {given['policy']!r} attends on the device")


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
        mini_batches = setting.mini_batches or (1 if model.device.type == "cpu" else 2)
        undo.enter_context(in_drives(model, driver, placed, mini_batches, replay))
        host = HostCompute.assumed(model.num_parameters(), model.get_memory_footprint(), model.device.type != "cpu")
        yield Attached(driver, placed, setting, host, known)
