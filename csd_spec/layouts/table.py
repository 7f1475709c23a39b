"""Registry of layouts: built-in ones, plug-ins and files; selects the layout that stores a model's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from csd_spec.codecs import BF16, FP8, FP16, Codec
from csd_spec.layouts.layout import Group, KvLayout
from csd_spec.tables import Tables

_K, _V, _COPY = Group("k", "k", "rows"), Group("v", "v", "rows"), Group("embedding_k", "k", "channels")
_DUAL = _K, _V, _COPY
_8_BITS = "8 bits: a value within 1/127 of its channel's largest in its page"


def _coded(bits: int) -> tuple[Group, ...]:
    return _K, _V, Group("embedding_k", "k", "channels", bits)


_COARSE = {"progressive": (2.5, 2), "progressive4": (4.0, 4)}  # bits per value of K and of V, for all tokens


def _progressive() -> list[KvLayout]:
    """Build the progressive-precision layouts; the codes of a kind are consecutive."""
    staged = Group("k", "k", "staged"), Group("v", "v", "staged")
    lossy: dict[str, Any] = {"lossy": _8_BITS}
    kinds: tuple[tuple[int, Codec, str, str, tuple[Group, ...], dict[str, Any]], ...] = (
        # first code, codec, suffix of the name, suffix of the family, row groups, other fields
        (37, FP16, "", "", staged, lossy),
        (101, BF16, "-bf16", "", staged, lossy),
        (53, FP16, "-exact", "-exact", (_K, _V), {}),
        (117, BF16, "-bf16-exact", "-exact", (_K, _V), {}),
        (165, FP16, "-latent", "", staged[:1], lossy | {"latent": True}),
        (229, BF16, "-bf16-latent", "", staged[:1], lossy | {"latent": True}),
    )
    progressive = []
    for code, rows, suffix, family, stored, other in kinds:
        source = "".join(group.source for group in stored)
        pages = (
            Group("refined", source, "refined"),
            Group("scores", "k", "scores"),
            Group("values", source[-1], "values"),
        )
        for number, (name, coarse) in enumerate(_COARSE.items()):
            what = dict(rows=rows, groups=(*stored, *pages), family=f"{name}{family}", coarse=coarse, **other)
            progressive.append(KvLayout(name=f"{name}{suffix}", code=code + number, **what))
    return progressive


_OURS = (
    KvLayout(name="fp16", code=16, rows=FP16, groups=_DUAL, family="fp16"),
    KvLayout(name="bf16", code=3, rows=BF16, groups=_DUAL, family="fp16"),
    KvLayout(name="fp8", code=6, rows=FP8, groups=_DUAL, family="fp16", lossy="4 significant bits, one scale per row"),
    KvLayout(name="int8", code=8, rows=FP16, groups=_coded(8), family="int8"),
    KvLayout(name="int4", code=4, rows=FP16, groups=_coded(4), family="int4"),
    KvLayout(name="int8-bf16", code=72, rows=BF16, groups=_coded(8), family="int8"),
    KvLayout(name="int4-bf16", code=68, rows=BF16, groups=_coded(4), family="int4"),
    *_progressive(),
    KvLayout(name="plain", code=1, rows=FP16, groups=(_K, _V)),
    KvLayout(name="opaque", code=2, rows=FP16, groups=(_K, _V), attended=False),
    KvLayout(name="latent", code=5, rows=FP16, groups=(_K, _COPY), family="fp16", latent=True),
    KvLayout(name="latent-bf16", code=7, rows=BF16, groups=(_K, _COPY), family="fp16", latent=True),
)
LAYOUTS: dict[str, KvLayout] = {layout.name: layout for layout in _OURS}
"""Built-in layouts, by name."""

_OF_FILES: dict[str, KvLayout] = {}


def _checked(source: str, name: object, layout: Any) -> KvLayout:
    """Return a layout of a plug-in or a file; raises ValueError if it conflicts with another one."""
    if not isinstance(layout, KvLayout) or layout.name != name:
        raise ValueError(f"{source}: layout {name!r}: {layout!r} must be a csd_spec.KvLayout of that name")
    codec = layout.rows
    if codec not in (FP16, BF16, FP8) and (codec.exact or codec.tag is not None):
        raise ValueError(f"{source}: layout {name}: codec {codec.name}: exact and tag are for FP16, BF16 and FP8 only")
    taken = next((other for other in LAYOUTS.values() if other.code == layout.code and other is not layout), None)
    if taken or (name in LAYOUTS and LAYOUTS[layout.name] is not layout):
        raise ValueError(
            f"{source}: layout {name}, code {layout.code}: is taken, use another name and code (240 to 255)"
        )
    return layout


_TABLES = Tables(LAYOUTS, "LAYOUTS", "vcsd.layouts", _checked, "docs/layouts.md")


def load_layouts(file: Path | None) -> None:
    """Register the layouts of a Python file in this process; None does nothing.

    The file is executed; its global LAYOUTS maps names to `KvLayout`.

    Raises:
        ValueError: The file fails, or a name or a code of its layouts is taken.
    """
    if file:
        loaded = {name: layout for name, layout in _TABLES.load(file).items() if name not in LAYOUTS}
        codes = {layout.code: name for name, layout in layouts().items()}
        for name, layout in loaded.items():
            if codes.get(layout.code, name) != name:
                raise ValueError(f"{file}: layout {name}, code {layout.code}: is taken by layout {codes[layout.code]}")
        _OF_FILES.update(loaded)


def layouts() -> dict[str, KvLayout]:
    """All layouts known in this process, by name."""
    return LAYOUTS | _TABLES.plugged_in() | _OF_FILES


def layout_named(name: str) -> KvLayout:
    """Return the layout with a name; raises ValueError, listing all names, if it is unknown."""
    by_name = layouts()
    if name not in by_name:
        raise ValueError(f"layout = {name!r}: must be one of {', '.join(by_name)}")
    return by_name[name]


def layout_of(code: int) -> KvLayout:
    """Return the layout with a code; raises ValueError, listing all codes, if it is unknown."""
    by_code = {layout.code: layout for layout in layouts().values()}
    if code not in by_code:
        raise ValueError(f"layout = {code}: must be one of {', '.join(map(str, by_code))}; is its plug-in installed?")
    return by_code[code]


def resolve(name: str, storage: str | None, bf16: bool, latent: bool) -> KvLayout:
    """Select the layout that stores a model's values: the member of a family with their format.

    A layout requested by the name of a format other than FP16 is returned unchanged.

    Args:
        name: Requested layout.
        storage: Requested format; None uses the model's.
        bf16: The model computes in BF16.
        latent: V is a part of K in the model.

    Raises:
        ValueError: The family has no such member.
    """
    requested = layout_named(name)
    if requested.latent and not latent:
        raise ValueError(f"layout = {name!r}: V is not a part of K in this model: use {requested.family}")
    family = [
        layout
        for layout in layouts().values()
        if layout is requested or (requested.family and layout.family == requested.family)
    ]
    formats = {
        member.rows.name: member
        for member in family
        if member.latent == latent and requested.rows in (FP16, member.rows)
    }
    if not formats:
        families = ", ".join(layout.family for layout in layouts().values() if layout.latent and layout.rows is FP16)
        raise ValueError(f"layout = {name!r}: V is a part of K in this model: use {families}")
    if storage and storage not in formats:
        raise ValueError(f"kv_dtype = {storage!r}: layout {name} stores {', '.join(formats)}: use one of these")
    return formats.get(storage or ("bf16" if bf16 else "fp16")) or next(iter(formats.values()))
