"""vcsd: attention inside emulated computational storage drives.

with vcsd.attach(model, drives=2, attention="sparf", compression=8) as csd:
    out = model.generate(**inputs, max_new_tokens=64)
    print(csd.report())

The public API is `__all__` and that of `kv_cache`; everything else may change. Each name is imported at its first use,
and with it torch and transformers if it needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # isort: off
    from attention_engine import (
        METHODS as METHODS,
        Method as Method,
        Step as Step,
        load_methods as load_methods,
    )
    from csd_link.driveset import DriveSet as DriveSet
    from csd_spec import (
        LAYOUTS as LAYOUTS,
        Attention as Attention,
        Budget as Budget,
        Compression as Compression,
        Device as Device,
        DeviceError as DeviceError,
        DriveSpec as DriveSpec,
        Fixed as Fixed,
        KvView as KvView,
        Layout as Layout,
        PageForm as PageForm,
        SparFParams as SparFParams,
        load_layouts as load_layouts,
        presets as presets,
    )
    from host_driver.hf.shape import Unsupported as Unsupported
    from kv_cache.limits import TierLimits as TierLimits
    from vcsd.attached import (
        Attached as Attached,
        Setting as Setting,
        attach as attach,
        attached as attached,
    )
    from vcsd.report import Report as Report
    from vcsd.sampling import Sampling as Sampling
    from vcsd.server import (
        Rejected as Rejected,
        Server as Server,
        Stream as Stream,
    )
    from vcsd.serving import (
        Serving as Serving,
        serve as serve,
    )
    from vcsd.tiered import (
        Tiered as Tiered,
        TierReport as TierReport,
        TierSetting as TierSetting,
    )

_PLACES = {
    "vcsd.attached": ("Attached", "Setting", "attach", "attached"),
    "vcsd.report": ("Report",),
    "vcsd.tiered": ("TierReport", "TierSetting", "Tiered"),
    "vcsd.serving": ("Serving", "serve"),
    "vcsd.server": ("Rejected", "Server", "Stream"),
    "vcsd.sampling": ("Sampling",),
    "kv_cache.limits": ("TierLimits",),
    "host_driver.hf.shape": ("Unsupported",),
    "csd_link.driveset": ("DriveSet",),
    "csd_spec": (
        "Attention",
        "Budget",
        "Compression",
        "Device",
        "DeviceError",
        "DriveSpec",
        "Fixed",
        "LAYOUTS",
        "Layout",
        "KvView",
        "PageForm",
        "SparFParams",
        "load_layouts",
        "presets",
    ),
    "attention_engine": ("METHODS", "Method", "Step", "load_methods"),
}
_OLD = {"Tiers": "TierLimits"}  # deprecated names, removed in the next release
_PLACE = {name: place for place, names in _PLACES.items() for name in names}

__all__ = ["Attached", "attach", *(name for name in _PLACE if name not in ("Attached", "attach"))]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("vcsd")
    if name in _OLD:
        import_module("warnings").warn(f"vcsd.{name} is now vcsd.{_OLD[name]}", DeprecationWarning, stacklevel=2)
        name = _OLD[name]
    if name not in _PLACE:
        raise AttributeError(f"module 'vcsd' has no attribute {name!r}")
    if name == "presets":
        return import_module("csd_spec.presets")
    return getattr(import_module(_PLACE[name]), name)
