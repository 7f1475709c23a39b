"""A model whose K and V lie in tiers, where a policy wants them: the setting, the block, the report."""

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
from host_driver.hf.shape import FULL, kinds_in_tiers
from host_driver.hf.tiers import in_tiers
from host_driver.tiers import TieredKv
from kv_cache.hardware import DEVICE, PAGE_CACHE
from kv_cache.limits import TierLimits
from kv_cache.policies import PolicyLike, policy_of
from kv_cache.scheduler import Policy
from vcsd.tables import table

MAX_TOKENS = 4096  # of a sequence, where neither the user nor the model says less


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSetting:
    """Which policy, and what it has.

    Attributes:
        policy: Name, `FILE:NAME`, or a policy of the user's: an object or a function (docs/policies.md).
        tiers: Bytes for KV data by tier.
        policies: More policies by name.
        record: Keep the choices, to replay them.
    """

    policy: str | PolicyLike
    tiers: TierLimits
    policies: Mapping[str, PolicyLike] | None = None
    record: bool = False

    def __post_init__(self) -> None:
        if not self.made().has_layers:
            raise ValueError(f"policy = {self.name!r}: it decides about requests of a server (vcsd.serve)")

    def made(self) -> Policy:
        """A policy of its own.

        Raises:
            ValueError: There is no such policy, or the object is none.
        """
        if isinstance(self.policy, str):
            known = self.policies or {}
            return Policy.of(known[self.policy]) if self.policy in known else policy_of(self.policy)
        try:
            return Policy.of(self.policy)
        except (TypeError, ValueError) as error:
            raise ValueError(f"policy = {self.policy!r}: {error}") from None

    @property
    def name(self) -> str:
        """What the policy is called."""
        return self.policy if isinstance(self.policy, str) else self.made().name

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[Tiered]:
        """The model with its K and V in tiers until the block ends; then it is as it was."""
        model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
        kinds = kinds_in_tiers(model)
        tiers, policy = self.tiers, self.made()
        config = model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
        max_tokens = tiers.max_tokens or min(context, MAX_TOKENS)
        cache_bytes = available_bytes(cgroup_of()) if tiers.page_cache is None else tiers.page_cache
        kv = TieredKv(tiers, policy, cache_bytes, kinds.count(FULL), model, max_tokens, self.record)
        try:
            with in_tiers(model, kv, kinds):
                yield Tiered(kv, self.name, kinds)
        finally:
            kv.close()

    def stored(self, dtype: torch.dtype, latent: bool) -> TierSetting:
        """Tiers keep values as they are."""
        return self

    def check(self, shape: ModelShape) -> None:
        """Tiers take K and V of any shape."""

    def sized(self, shape: ModelShape, rows: int, max_tokens: int) -> TierSetting:
        """The same for sequences of at most so many tokens."""
        return replace(self, tiers=replace(self.tiers, max_tokens=max_tokens))

    def asked(self, stored: int, head_dim: int) -> dict[str, Any]:
        """The model attends itself."""
        return {"attention": "the model's own"}

    def unkept(self) -> AbstractContextManager[TierSetting]:
        """Nothing of it is kept."""
        return nullcontext(self)


class Tiered:
    """A model whose K and V lie in tiers."""

    def __init__(self, kv: TieredKv, policy: str, kinds: Sequence[str]) -> None:
        """kinds: of the model's layers."""
        self.kv, self.policy, self.kinds = kv, policy, kinds

    def report(self) -> TierReport:
        """What has been done so far; printing it shows a table."""
        return TierReport.of(self.kv, self.policy, self.kinds)


@dataclass(frozen=True, slots=True)
class TierReport:
    """Traffic in tiers. Bytes in whole blocks; stalls are wall time for which the model waited.

    why: of a policy that chose another. layers: by kind; those of full attention are in tiers, the others stay with the
    model. hit_bytes: of those read in files behind the page cache, which it held; None
    where the kernel does not say.
    """

    policy: str
    why: str
    iterations: int
    layers: dict[str, list[int]]
    tiers: list[dict[str, Any]]
    routes: list[dict[str, Any]]
    page_cache: dict[str, Any]

    @classmethod
    def of(cls, kv: TieredKv, policy: str, kinds: Sequence[str]) -> TierReport:
        """Sum up. kinds: of the model's layers."""
        with kv.alone():
            kv.real.settle()
            return cls._of(kv, policy, kinds)

    @classmethod
    def _of(cls, kv: TieredKv, policy: str, kinds: Sequence[str]) -> TierReport:
        run, files, modelled = kv.runner, kv.files, kv.modelled_bytes()
        used = {name for name, peak in run.table.peak.items() if peak} | {DEVICE}
        limits = kv.machine.tiers
        return cls(
            policy=policy,
            why=run.memory.get("why", ""),
            iterations=run.iterations,
            layers={
                kind: [number for number, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)
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
                    "modelled_bytes": None if modelled is None else modelled.get(name, 0),
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
        """The report as `vcsd run --residency P -o json` prints it."""
        return {"residency": asdict(self)}

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
        title = f"K and V{of} in tiers: {self.policy}" + (f" ({self.why})" if self.why else "")
        rows = [(each["name"], _mib(each["limit_bytes"]), _mib(each["peak_bytes"])) for each in self.tiers]
        return table(title, ("tier", "limit, MiB", "most, MiB"), rows)

    def _path_table(self) -> Table:
        rows = [
            (each["name"], str(each["copies"]), _mib(each["bytes"]), f"{each['stall_s']:.2f}") for each in self.routes
        ]
        read, hit = self.page_cache["read_bytes"], self.page_cache["hit_bytes"]
        found = f", {hit / read:.1%} of what was read in files was cached" if read and hit is not None else ""
        return table(f"Moved in {self.iterations} forwards{found}", ("route", "copies", "MiB", "waited, s"), rows)


def _mib(nbytes: float | None) -> str:
    return "any" if nbytes is None else f"{nbytes / 2**20:,.1f}"
