"""The paper's configurations and two more, each a policy on the modelled executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_cache import DIRECT, PAGE_CACHE, Iteration, IterationRunner, Machine, Policy
from kv_cache.events import Events
from kv_cache.network import LinkNetwork
from kv_cache.policies._stream import stream
from kv_cache.policies.dual_blade import CROSS, INTRA, DualBlade, first_group
from kv_cache.policies.flexgen import FlexGen
from kv_cache.policies.split import Split
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers
from vcsd_eval.papers.dual_blade.machine import COPY, EVICTED, FAULTS, EdgeSetup, SsdRates, machine

BATCH = "batch"  # one request for all sequences
READING = ("page-cache", "evicted", "direct")  # routes to the GPU
PIECE_BYTES = 16 << 20  # pieces of split copies: small compared with K or V of a layer; smaller ones gain nothing


@dataclass(frozen=True, slots=True)
class DualBladeSystem:
    """A configuration.

    policy: created for the fraction of layers, or of KV data, that uses the page cache; None: as much as fits.
    piece_bytes: size of the pieces of its copies. on_ext4: whether direct I/O goes through a file system.
    """

    policy: Callable[[float | None], Policy]
    piece_bytes: int = 0
    on_ext4: bool = False


class _Evicting(DualBlade):
    """CachePolicy-Only: Group 2 is also stored in files, whose pages are dropped after use."""

    second_home = EVICTED


class _Unpipelined(Policy):
    """Dual-Blade without P.P: keys and values of a layer at once, in both groups."""

    def __init__(self, share: float | None) -> None:
        self.share = share or 0.0

    def layers(self, it: Iteration) -> None:
        group = first_group(it.layers.start + int(self.share * len(it.layers)))
        stream(it, lambda block: PAGE_CACHE if group(block.layer) == 1 else DIRECT, 0)


def _dual_blade(share: float | None) -> Policy:
    return DualBlade(ahead=0, share=share)


SYSTEMS = {
    "baseline": DualBladeSystem(lambda share: FlexGen(ahead=0)),
    "cache-policy-only": DualBladeSystem(lambda share: _Evicting(ahead=0)),
    "nvme-direct-only": DualBladeSystem(lambda share: _dual_blade(0.0)),
    "dual-blade": DualBladeSystem(_dual_blade),
    "o-direct": DualBladeSystem(_dual_blade, on_ext4=True),
    "split": DualBladeSystem(lambda share: Split(share=share), PIECE_BYTES),
}
FED_BACK = DualBladeSystem(lambda share: Split(share=share, feedback=True), PIECE_BYTES)
SPLIT_BY_STEP = {
    "dual-blade, a layer ahead": DualBladeSystem(lambda share: DualBlade(share=share)),
    "split, layer by layer": DualBladeSystem(lambda share: Split(ahead=0, share=share)),
    "split, layer by layer, in pieces": DualBladeSystem(lambda share: Split(ahead=0, share=share), PIECE_BYTES),
    "split, a layer ahead, in pieces": SYSTEMS["split"],
}
WITHOUT_PIPELINE = DualBladeSystem(_Unpipelined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Result of an inference.

    Attributes:
        hit_share: Fraction of decode's reads of page-cached files that hit; None if it read none of them.
        cached_share: Fraction of all decode reads served by the cache.
        copying_share, faulting_share: Fractions of the decode time in which memory was copied, and files were faulted
            in.
    """

    prefill_s: float
    decode_s: float
    hit_share: float | None
    cached_share: float | None
    copying_share: float
    faulting_share: float


class _Gpu:
    """GPU time of a layer in the current iteration."""

    def __init__(self, setup: EdgeSetup) -> None:
        self.setup, self.new, self.tokens = setup, 0, 0

    def __call__(self, attention: AttendCall) -> LayerTime:
        return self.setup.work(self.new, self.tokens)


def infer(
    setup: EdgeSetup,
    system: DualBladeSystem,
    drive: SsdRates,
    limit_gib: float | None = None,
    share: float | None = None,
) -> Inferred:
    """Prefill and decode of a batch. limit_gib: limit of the cgroup; None if `share` alone decides what is cached."""
    cache_bytes = None if limit_gib is None else setup.cache_bytes(limit_gib)
    one = machine(setup, drive.behind_ext4() if system.on_ext4 else drive, cache_bytes, system.piece_bytes)
    gpu = _Gpu(setup)
    transfers = SimulatedTransfers(one, gpu)
    layers = range(setup.model.layers)
    policy = system.policy(share)
    run = IterationRunner(one, layers, policy.layers, transfers, final_tokens=setup.final_tokens)
    for gpu.new in (setup.input, *[1] * (setup.output - 1)):
        gpu.tokens += gpu.new
        run.run({BATCH: gpu.new}, {BATCH: setup.row_bytes})
    prefill_ns, *decode_ns = transfers.iterations_ns
    decode_s, busy_ns = sum(decode_ns) / 1e9, transfers.network.busy_ns()
    cache = transfers.caches.get(PAGE_CACHE)
    return Inferred(
        prefill_s=prefill_ns / 1e9,
        decode_s=decode_s,
        hit_share=cache.hit_share if cache else None,
        cached_share=cache.hit_bytes / sum(transfers.moved[name] for name in READING) if cache else None,
        copying_share=busy_ns[COPY] / 1e9 / decode_s,
        faulting_share=busy_ns[FAULTS] / 1e9 / decode_s,
    )


def trial_s(setup: EdgeSetup, drive: SsdRates, share: float) -> tuple[float, float] | None:
    """Seconds of a layer of Group 1 in Dual-Blade's trial, intra and cross; None if the group is empty."""
    policy = DualBlade(ahead=0, share=share)
    infer(setup, DualBladeSystem(lambda share: policy), drive, share=share)
    intra_ns, cross_ns = (policy.trial[step].get(1) for step in (INTRA, CROSS))
    return (intra_ns / 1e9, cross_ns / 1e9) if intra_ns and cross_ns else None


def alone_ms(one: Machine, link: str, nbytes: int) -> float:
    """Time of a copy of `nbytes` bytes on an idle link, ms."""
    events = Events()
    LinkNetwork(events, one.links).send(link, nbytes, lambda: None)
    while (next_ns := events.next_ns) is not None:
        events.run_to(next_ns)
    return events.now_ns / 1e6
