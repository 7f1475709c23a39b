"""`vcsd.attach` with tiers: configuration, session and report of a model with its KV cache in tiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from transformers import PreTrainedModel

from csd_io.cgroup import available_bytes, cgroup_of
from csd_spec import ModelShape
from host_driver.hf.forward import attached
from host_driver.hf.shape import FULL, kinds_in_tiers, unwrapped
from host_driver.kv_table import KvTable
from kv_cache.hardware import DEVICE, PAGE_CACHE
from kv_cache.limits import TierLimits
from kv_cache.policies import PolicyLike, policy_of
from kv_cache.scheduler import Policy
from vcsd.home_stack import HomeStack
from vcsd.tables import table

MAX_TOKENS = 4096  # default maximum length of a sequence


def context_of(model: PreTrainedModel) -> int:
    """Longest sequence of a model, tokens; the default if it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Configuration of `attach` with tiers.

    Attributes:
        policy: Name, `FILE:NAME`, or a policy object or function (docs/policies.md).
        tiers: Limits of the KV cache by tier.
        policies: Custom policies by name.
        record: Record all actions, for a replay in simulated time.
    """

    policy: str | PolicyLike
    tiers: TierLimits
    policies: Mapping[str, PolicyLike] | None = None
    record: bool = False

    def __post_init__(self) -> None:
        if not self.made().has_layers:
            raise ValueError(f"policy = {self.name!r}: schedules requests of a server: use it with vcsd.serve")

    def made(self) -> Policy:
        """Create an instance of the policy.

        Raises:
            ValueError: The name is unknown, or the object is not a policy.
        """
        if isinstance(self.policy, str):
            policies = self.policies or {}
            return Policy.of(policies[self.policy]) if self.policy in policies else policy_of(self.policy)
        try:
            return Policy.of(self.policy)
        except (TypeError, ValueError) as error:
            raise ValueError(f"policy = {self.policy!r}: {error}") from None

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self.policy if isinstance(self.policy, str) else self.made().name

    @contextmanager
    def attach(self, model: PreTrainedModel) -> Iterator[TierSession]:
        """Attach a model until the block ends, then restore it."""
        model = unwrapped(model)
        kinds = kinds_in_tiers(model)
        tiers, policy = self.tiers, self.made()
        max_tokens = tiers.max_tokens or min(context_of(model), MAX_TOKENS)
        if tiers.page_cache is None:
            tiers = replace(tiers, page_cache=available_bytes(cgroup_of()))
        like = next(model.parameters())
        kv = KvTable(tiers, policy, kinds.count(FULL), like, max_tokens)
        if self.record:
            kv.runner.recorded = []
        with HomeStack() as undo:
            undo.callback(kv.close)
            undo.enter_context(attached(model, kv, kinds))
            yield TierSession(kv, self.name, kinds)

    def stored(self, dtype: torch.dtype, latent: bool) -> TierConfig:
        """No effect: tiers store the model's dtype."""
        return self

    def check(self, shape: ModelShape) -> None:
        """No effect: tiers support all shapes."""

    def check_capacity(self, shape: ModelShape, rows: int, max_tokens: int) -> TierConfig:
        """Copy for sequences of at most `max_tokens` tokens."""
        return replace(self, tiers=replace(self.tiers, max_tokens=max_tokens))

    def describe(self, stored: int, head_dim: int) -> dict[str, Any]:
        """The attention is the model's own."""
        return {"attention": "the model's own"}

    def without_data_dir(self) -> AbstractContextManager[TierConfig]:
        """No effect: nothing is kept after a session."""
        return nullcontext(self)


class TierSession:
    """A model with its KV cache in tiers."""

    def __init__(self, kv: KvTable, policy: str, kinds: Sequence[str]) -> None:
        """Create a session. `kinds`: kind of each layer of the model."""
        self.kv, self.policy, self.kinds = kv, policy, kinds

    def report(self) -> TierReport:
        """Report of the work so far; printing it shows a table."""
        return TierReport.of(self.kv, self.policy, self.kinds)


@dataclass(frozen=True, slots=True)
class TierReport:
    """Traffic between tiers. Bytes are in whole blocks; stalls are wall-clock time for which the model waited.

    Attributes:
        policy: Name of the policy.
        why: Reason of a policy that selected another one.
        iterations: Number of forwards.
        layers: Layers by kind; those with full attention are in tiers, the others stay with the model.
        tiers: Limit and peak of each tier.
        routes: Copies, bytes and stalls of each route.
        page_cache: Limit, bytes read from buffered files, and bytes of these found in the page cache (None if the
            kernel does not report it).
    """

    policy: str
    why: str
    iterations: int
    layers: dict[str, list[int]]
    tiers: list[dict[str, Any]]
    routes: list[dict[str, Any]]
    page_cache: dict[str, Any]

    @classmethod
    def of(cls, kv: KvTable, policy: str, kinds: Sequence[str]) -> TierReport:
        """Build a report. `kinds`: kind of each layer of the model."""
        with kv.access.hold():
            kv.real.settle()
            return cls._of(kv, policy, kinds)

    @classmethod
    def _of(cls, kv: KvTable, policy: str, kinds: Sequence[str]) -> TierReport:
        run, files, modelled = kv.runner, kv.files, kv.simulated_bytes()
        used = {name for name, peak in run.table.peak.items() if peak} | {DEVICE}
        limits = run.machine.tiers
        return cls(
            policy=policy,
            why=kv.policy.why,
            iterations=run.iterations,
            layers={
                kind: [number for number, layer_kind in enumerate(kinds) if layer_kind == kind]
                for kind in dict.fromkeys(kinds)
            },
            tiers=[
                {"name": name, "limit_bytes": limits[name].limit_bytes, "peak_bytes": run.table.peak[name]}
                for name in limits
                if name in used
            ],
            routes=[
                {
                    "name": name,
                    "copies": counts.copies,
                    "bytes": kv.real.moved[name],
                    "simulated_bytes": None if modelled is None else modelled.get(name, 0),
                    "stall_s": kv.real.stalls_s.get(name, 0.0),
                }
                for name, counts in sorted(run.traffic.items())
            ],
            page_cache={
                "limit_bytes": limits[PAGE_CACHE].cache_bytes,
                "read_bytes": files.read_bytes,
                "hit_bytes": files.hit_bytes,
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """The report in the format of `vcsd run --policy P -o json`."""
        return {"kv_cache": asdict(self)}

    def __rich__(self) -> Group:
        return Group(self._place_table(), self._path_table())

    def __str__(self) -> str:
        console = Console(width=80, no_color=True, emoji=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def _place_table(self) -> Table:
        some, every = len(self.layers[FULL]), sum(map(len, self.layers.values()))
        of = f" of {some} of {every} layers" if some < every else ""
        title = f"KV cache{of} in tiers: {self.policy}" + (f" ({self.why})" if self.why else "")
        rows = [(tier["name"], _mib(tier["limit_bytes"]), _mib(tier["peak_bytes"])) for tier in self.tiers]
        return table(title, ("tier", "limit, MiB", "most, MiB"), rows)

    def _path_table(self) -> Table:
        rows = [
            (route["name"], str(route["copies"]), _mib(route["bytes"]), f"{route['stall_s']:.2f}")
            for route in self.routes
        ]
        read, hit = self.page_cache["read_bytes"], self.page_cache["hit_bytes"]
        cached = f", {hit / read:.1%} of what was read in files was cached" if read and hit is not None else ""
        return table(f"Moved in {self.iterations} forwards{cached}", ("route", "copies", "MiB", "waited, s"), rows)


def _mib(nbytes: float | None) -> str:
    return "any" if nbytes is None else f"{nbytes / 2**20:,.1f}"
