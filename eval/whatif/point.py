"""One combination of a what-if sweep: a decode step of equal sequences in simulated time, and its energy."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attention_engine import METHODS
from csd_spec import AttentionConfig, DriveSpec, ModelShape
from csd_spec.layouts import resolve
from csd_spec.model import FP16_BYTES
from csd_spec.network import network_named
from ftl import OutOfSpaceError
from vcsd.progress import Tick, no_tick
from vcsd_eval.lifetime.energy import BOUNDS, constants
from vcsd_eval.papers.instinfer.constants import PAGES
from vcsd_eval.papers.instinfer.simulate import SimulatedDrive
from vcsd_eval.papers.profiles import Model

SUMS_BYTES = 8  # m and l of a query head
Row = dict[str, Any]


@dataclass(frozen=True)
class DesignPoint:
    """A combination.

    Attributes:
        spec: The drive.
        model: Profile of the model.
        method: Attention method, or a name of `csd_spec.NAMED`.
        layout: Layout in the drives; empty: the method's own.
        network: Network between host and drives; empty: none, the link alone.
        drives: Drives that share the KV heads.
        compression: Fraction 1/C of the KV data that the method may use; 0: the method's own.
        context: Stored tokens of each sequence.
        batch: Sequences.
        page_share: Fraction of the token pages that a selection touches, 0 to 1.
        sampled_layers: Layers that are simulated; the step has all of them, in proportion.
    """

    spec: DriveSpec
    model: Model
    method: str = "sparf"
    layout: str = ""
    network: str = ""
    drives: int = 1
    compression: float = 0
    context: int = 8192
    batch: int = 8
    page_share: float = PAGES.value
    sampled_layers: int = 2

    def __post_init__(self) -> None:
        if self.attention.method not in METHODS:
            raise ValueError(f"method = {self.method!r}: must be one of {', '.join(METHODS)}")
        for name, most in (("drives", self.model.kv_heads), ("context", 1 << 20), ("batch", 4096)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)}: must be from 1 to {most:,}")
        if self.model.kv_heads % self.drives:
            heads = f"{self.model.kv_heads} KV heads of {self.model.name}"
            raise ValueError(f"drives = {self.drives}: must divide the {heads}")
        if self.network:
            network_named(self.network)

    @cached_property
    def attention(self) -> AttentionConfig:
        """Method, budget and layout."""
        attention = AttentionConfig.named(self.method, self.compression or None, layout=self.layout or None)
        return replace(attention, layout=resolve(attention.layout, None, False, self.model.latent).name)

    @property
    def shape(self) -> ModelShape:
        """The heads of one drive, and the layers that are simulated."""
        whole = self.model.shape
        layers = min(self.sampled_layers, whole.layers)
        return replace(
            whole, layers=layers, kv_heads=whole.kv_heads // self.drives, q_heads=whole.q_heads // self.drives
        )

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Bytes of a layer to one drive, queries and new keys and values, and back, the output."""
        shape = self.shape
        rows = self.batch * shape.head_dim * FP16_BYTES
        return rows * (shape.q_heads + 2 * shape.kv_heads), shape.q_heads * (rows + self.batch * SUMS_BYTES)

    @property
    def transfer_s(self) -> float:
        """Seconds of a layer's messages."""
        link, (sent, back) = self.spec.link, self.message_bytes
        ns = link.command_ns + link.transfer_ns(sent) + link.transfer_ns(back)
        if self.network:  # all drives share the host's port
            network = network_named(self.network)
            ns += 2 * network.message_ns + sum(network.transfer_ns(self.drives * nbytes) for nbytes in (sent, back))
        return ns / 1e9


def simulate(point: DesignPoint, tick: Tick = no_tick) -> Row:
    """Simulate a step; returns its figures, or `error` if the drives do not hold the sequences.

    Returns:
        `step_ms` and its parts `flash_ms`, `engine_ms`, `transfer_ms`; `tokens_per_s`, `pages` of each drive,
        `joules_per_token` {low, value, high}, `error`.
    """
    shape, attention, layers = point.shape, point.attention, point.model.shape.layers
    scale = layers / shape.layers
    params = attention.at(point.context, shape.head_dim)
    share = 1.0 if attention.method == "dense" else point.page_share
    try:
        with closing(SimulatedDrive(point.spec, shape, point.batch, point.context + 1, attention.layout)) as drive:
            drive.grow(point.context)
            seconds = drive.step(attention.method, params, share, point.spec.engine.schedule)
    except OutOfSpaceError as error:
        tick(None)
        return {"step_ms": None, "error": f"drives do not hold the sequences: {error}"}
    flash_s = scale * sum(took for unit, took in seconds.items() if unit.startswith("flash"))
    step_s = scale * sum(seconds.values()) + layers * point.transfer_s
    tick(None)
    return {
        "step_ms": 1e3 * step_s,
        "flash_ms": 1e3 * flash_s,
        "engine_ms": 1e3 * (scale * sum(seconds.values()) - flash_s),
        "transfer_ms": 1e3 * layers * point.transfer_s,
        "tokens_per_s": point.batch / step_s,
        "pages": round(scale * drive.pages),
        "joules_per_token": _joules(point, drive, scale),
        "error": "",
    }


def _joules(point: DesignPoint, drive: SimulatedDrive, scale: float) -> dict[str, float]:
    """Energy of a token in all drives and over the link, without the GPU, by bound of the constants."""
    energy, per_token = dict[str, float](), scale * point.drives / point.batch
    moved = point.model.shape.layers * point.drives * sum(point.message_bytes) / point.batch
    for bound in BOUNDS:
        at = constants().at(bound)
        flash = drive.pages * point.spec.timing.read_ns * 1e-9 * at["sense_w"] + drive.nbytes * at["channel_pj"] * 1e-12
        energy[bound] = per_token * (flash + drive.macs * at["mac_pj"] * 1e-12) + moved * at["link_pj"] * 1e-12
    return energy
