"""vcsd: attention inside emulated computational storage drives.

with vcsd.attach(model, drives=2, method="sparf", compression=8) as csd:
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
        AttentionMethod as AttentionMethod,
        DecodeStep as DecodeStep,
        load_methods as load_methods,
    )
    from csd_spec import (
        LAYOUTS as LAYOUTS,
        AttentionConfig as AttentionConfig,
        SparsityBudget as SparsityBudget,
        CompressionBudget as CompressionBudget,
        Drive as Drive,
        DriveError as DriveError,
        DriveSpec as DriveSpec,
        FixedBudget as FixedBudget,
        KvSlotView as KvSlotView,
        KvLayout as KvLayout,
        PageFormat as PageFormat,
        SparFParams as SparFParams,
        load_layouts as load_layouts,
        presets as presets,
    )
    from host_driver.hf.shape import UnsupportedModelError as UnsupportedModelError
    from kv_cache.limits import TierLimits as TierLimits
    from vcsd.config import (
        AttachConfig as AttachConfig,
        ServingConfig as ServingConfig,
    )
    from vcsd.drive_report import DriveReport as DriveReport
    from vcsd.session import (
        Session as Session,
        attach as attach,
    )
    from vcsd.report import Report as Report
    from vcsd.sampling import SamplingParams as SamplingParams
    from vcsd.server import (
        RequestRejectedError as RequestRejectedError,
        Server as Server,
        RequestHandle as RequestHandle,
    )
    from vcsd.serving import serve as serve
    from vcsd.timeline import StepRecorder as StepRecorder

_PLACES = {
    "vcsd.session": ("Session", "attach"),
    "vcsd.config": ("AttachConfig", "ServingConfig"),
    "vcsd.drive_report": ("DriveReport",),
    "vcsd.report": ("Report",),
    "vcsd.serving": ("serve",),
    "vcsd.server": ("RequestRejectedError", "Server", "RequestHandle"),
    "vcsd.timeline": ("StepRecorder",),
    "vcsd.sampling": ("SamplingParams",),
    "kv_cache.limits": ("TierLimits",),
    "host_driver.hf.shape": ("UnsupportedModelError",),
    "csd_spec": (
        "AttentionConfig",
        "SparsityBudget",
        "CompressionBudget",
        "Drive",
        "DriveError",
        "DriveSpec",
        "FixedBudget",
        "LAYOUTS",
        "KvLayout",
        "KvSlotView",
        "PageFormat",
        "SparFParams",
        "load_layouts",
        "presets",
    ),
    "attention_engine": ("METHODS", "AttentionMethod", "DecodeStep", "load_methods"),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}

__all__ = list(_PLACE)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("vcsd")
    if name not in _PLACE:
        raise AttributeError(f"module 'vcsd' has no attribute {name!r}")
    if name == "presets":
        return import_module("csd_spec.presets")
    return getattr(import_module(_PLACE[name]), name)
