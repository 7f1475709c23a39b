"""Event-driven timing of iterations: the policy's program runs on a block table and simulated links, without bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from kv_cache.cost import ServingCost
from kv_cache.hardware import CSD, DEVICE, Machine
from kv_cache.iteration import IterationRunner
from kv_cache.limits import TierLimits
from kv_cache.scheduler import Policy, SchedulerOutput
from kv_cache.transfer.engine import AttendCall
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

PART = "kv"  # keys and values of a token move together


def machine_of(cost: ServingCost, limits: TierLimits = TierLimits(), cache_bytes: int = 0) -> Machine:
    """Tiers and links of a serving machine: fitted link to host memory, assumed files and SSD.

    The fitted line of a fetch includes the token that a step adds, which host memory does not have yet. Its time is
    part of the link's overhead here.
    Args:
        cost: Costs of the machine.
        limits: Bytes of each tier.
            cache_bytes: Size of the kernel's page cache for files, bytes.
    """
    base, L = limits.machine(cache_bytes, drives=cost.drives is not None), cost.layers
    rate = cost.token_bytes * L / max(cost.fetch_token_s, 1e-15)
    links = dict(base.links)
    links["up"] = replace(links["up"], bytes_per_s=rate, overhead_ns=1e9 * (cost.fetch_s + cost.fetch_token_s) / L)
    links["down"] = replace(links["down"], bytes_per_s=rate)
    return replace(base, links=links)


class EventTimer:
    """Runs a policy's program for each iteration of an engine.

    Attributes:
        runner: Runs the program; has the block table and the traffic by route.
        transfers: Simulated links, and the time the model waited for each route.
    """

    def __init__(self, policy: Policy, cost: ServingCost, machine: Machine, final_tokens: int = 0) -> None:
        """Create the block table and links.

        Args:
            policy: Its `layers` method is the program.
            cost: Costs of compute and of drives.
            machine: Tiers and links.
            final_tokens: Final length of the longest request, tokens; 0: unknown.
        """
        self.cost = cost
        self.transfers = SimulatedTransfers(machine, self._layer_time)
        self.runner = IterationRunner(
            machine, range(cost.layers), policy.layers, self.transfers, parts=(PART,), final_tokens=final_tokens
        )
        self._prefill_s: Mapping[Hashable, float] = {}
        self._decoding = 1

    def run(
        self, now_s: float, new: Mapping[int, int], prefill_s: Mapping[int, float], output: SchedulerOutput
    ) -> float:
        """Run an iteration.

        Args:
            now_s: Simulated time at which the iteration starts, seconds.
            new: New tokens of each request.
            prefill_s: Compute time of each prompt or its chunk, seconds.
            output: The policy's decision.

        Returns:
            Time of the iteration, seconds.

        Raises:
            PolicyError: The policy requests something that the block table forbids.
        """
        events = self.transfers.events
        events.run_to(max(events.now_ns, now_s * 1e9))
        for number in output.preempted:
            self.forget(number)
        self._prefill_s, self._decoding = dict(prefill_s.items()), len(new) - len(prefill_s)
        began_ns, tokens = events.now_ns, dict[Hashable, int](new.items())
        row_bytes = dict.fromkeys(tokens, round(self.cost.token_bytes))
        self.runner.run(tokens, row_bytes, output.assignment(self.cost.layers))
        return (events.now_ns - began_ns) / 1e9

    @property
    def fetched_bytes(self) -> int:
        """Bytes copied to the device."""
        return sum(counts.bytes for name, counts in self.runner.traffic.items() if name.endswith(f">{DEVICE}"))

    def forget(self, number: int) -> None:
        """Free the blocks of a request."""
        self.runner.free(number)

    def _layer_time(self, call: AttendCall) -> LayerTime:
        """Time of a layer for the rows of a call; the batch waits for its drives."""
        L, batch = self.cost.layers, self._decoding
        line = self.cost.line(max(1, batch))
        decoding = [row for row in call.rows if row not in self._prefill_s]
        seconds = sum(self._prefill_s.get(row, 0.0) for row in call.rows) / L
        if decoding:
            seconds += len(decoding) / batch * (line.step_s / L + (line.call_s if CSD in call.tiers else 0.0))
        for block in call.blocks:
            if block.request not in self._prefill_s:
                tokens = self.runner.table[block].tokens * call.read
                seconds += tokens * (line.drive_token_s if call.tiers[block.index] == CSD else line.token_s / L)
        return LayerTime(1e9 * seconds)
