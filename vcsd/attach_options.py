"""Options of `vcsd.attach`: defaults, types, and their conversion."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypedDict

from csd_link.driveset import DriveSetConfig
from csd_link.replication import Redundancy
from csd_spec import AttentionConfig, Drive, DriveSpec, SparsityBudget
from csd_spec.attention import KvDtype
from csd_spec.layouts import load_layouts
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.sparf import BudgetConvention
from kv_cache.limits import TierLimits
from vcsd.transport import fleet_or_count

IN_STORAGE, METHOD = "in-storage", "sparf"  # defaults of policy and method


class DriveOptions(TypedDict, total=False):
    """Options of `attach` with drives.

    Attributes:
        spec: Description of each created drive.
        transport: `inproc`, `process`, `fuse`, `window:PATH` or `nvme+tcp://HOST:PORT` (docs/drives.md). All but
            `inproc` drives may be lost and return; KV data that is not flushed is kept in host memory until then.
        restart_drives: Whether a drive process is restarted when it dies.
        data_dir: Folder for the files of created drives, one subfolder each; they outlive the process.
        flush_interval_steps: Decode steps between flushes; 0: never (all KV data of drives that can be lost then
            stays in host memory).
        micro_batches: Micro-batches of a decode step, so that model and drives overlap; default: 2 for a GPU, else 1.
        compression: Use 1/C of the KV data, see `csd_spec.CompressionBudget`; default: 8.
        budget_convention: How that is counted; default: paper.
        budget: Budget that replaces both.
        layout: Name of the KV layout in drives (docs/layouts.md); default: the method's own, or fp16.
        kv_dtype: Stored data type, `fp16`, `bf16` or, in layout fp16, `fp8`; default: the model's (docs/models.md).
        methods_file: Python file with custom methods, for created drives.
        layouts_file: Python file with custom layouts, for created drives.
        redundancy: Protection against lost drives (docs/fleet.md): `none`; `mirror`, KV heads are stored on two drives;
            `recompute`, they are recomputed from the tokens.
        spares: Number of spare drives, which replace lost ones.
        network: A name of `csd_spec.network.NETWORKS`, such as `100gbe`; its latency is added to simulated times.
    """

    spec: DriveSpec
    transport: str
    restart_drives: bool
    data_dir: Path | None
    flush_interval_steps: int
    micro_batches: int | None
    compression: float | None
    budget_convention: BudgetConvention | None
    budget: SparsityBudget | None
    layout: str | None
    kv_dtype: KvDtype | None
    methods_file: Path | None
    layouts_file: Path | None
    redundancy: Redundancy
    spares: int
    network: str | None


_WHOLE, _PATH, _TEXT = (Integral, "a whole number"), (Path | None, "a pathlib.Path"), (str | None, "text")
_OPTIONS: dict[str, tuple[Any, Any, str]] = {  # default, type, and its description
    "spec": (INSTCSD_ZYNQ7045_8CH, DriveSpec, "a DriveSpec"),
    "transport": ("inproc", str, "text"),
    "restart_drives": (True, bool, "True or False"),
    "data_dir": (None, *_PATH),
    "flush_interval_steps": (0, *_WHOLE),
    "micro_batches": (None, Integral | None, "a whole number"),
    "compression": (None, Real | None, "a number"),
    "budget_convention": (None, *_TEXT),
    "budget": (None, object, "a CompressionBudget, a FixedBudget or another SparsityBudget"),
    "layout": (None, *_TEXT),
    "kv_dtype": (None, *_TEXT),
    "methods_file": (None, *_PATH),
    "layouts_file": (None, *_PATH),
    "redundancy": ("none", str, "text"),
    "spares": (0, *_WHOLE),
    "network": (None, *_TEXT),
}
_DRIVES = (Integral | Sequence, "a whole number, a fleet (ray or ray://HOST:PORT), or devices")


def _check_kind(name: str, value: Any, kind: Any, words: str) -> None:
    """Raise ValueError for a value of another type; True is not accepted as a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        raise ValueError(f"{name} = {value!r}: must be {words}")


def checked(drives: Any, method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """All options by name, including defaults.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option has another type.
    """
    check_known(options)
    _check_kind("drives", drives, *_DRIVES)
    _check_kind("method", method, str, "text")
    settings = {name: options.get(name, default) for name, (default, _, _) in _OPTIONS.items()}
    for name, (_, kind, words) in _OPTIONS.items():
        _check_kind(name, settings[name], kind, words)
    budget = settings["budget"]
    if budget is not None and not callable(getattr(budget, "at", None)):
        raise ValueError(f"budget = {budget!r}: must be {_OPTIONS['budget'][2]}")
    return {**settings, "drives": drives, "method": method}


def check_known(options: dict[str, Any]) -> None:
    """Raise TypeError for an unknown option, like Python."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"attach() got an unexpected keyword argument {name!r}")


def attention_of(settings: dict[str, Any]) -> AttentionConfig:
    """Method, budget and layout of the options."""
    load_layouts(settings["layouts_file"])
    names = "method", "compression", "budget_convention", "budget", "layout", "kv_dtype"
    return AttentionConfig.named(*(settings[name] for name in names))


def drives_of(settings: dict[str, Any]) -> DriveSetConfig | Sequence[Drive]:
    """Drives to create, served drives, or the caller's devices."""
    drives = settings["drives"]
    if isinstance(drives, Sequence) and not isinstance(drives, str):
        if settings["spares"]:
            raise ValueError(f"spares = {settings['spares']}: only with created or served drives, not with devices")
        return drives
    count, transport = fleet_or_count(drives if isinstance(drives, str) else int(drives), settings["transport"])
    names = "spec", "data_dir", "restart_drives", "methods_file", "layouts_file", "spares"
    return DriveSetConfig(count=count, transport=transport, **{name: settings[name] for name in names})


def check_in_tiers(policy: Any, tiers: TierLimits | None, drives: Any, method: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for drive options combined with tiers, or for tiers of another type."""
    check_known(options)
    if tiers is not None:
        _check_kind("tiers", tiers, TierLimits, "a TierLimits")
    if policy == IN_STORAGE:
        raise ValueError("tiers: drives hold the whole KV cache: with tiers set a policy, such as dual-blade or auto")
    settings = {"drives": (drives, 1), "method": (method, METHOD)}
    for name, (value, default) in (settings | {name: (options[name], _OPTIONS[name][0]) for name in options}).items():
        if value != default:
            raise ValueError(f"{name} is a drive option, and policy = {policy!r} attends on the device: remove one")
