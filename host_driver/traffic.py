"""Statistics of a driver in simulated time, summed over completions."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from threading import Lock

from csd_spec import Completion, FlashCounters

KEPT_STEPS = 256
CONTEXT_TOKENS = 128  # steps are grouped by the length of their longest sequence, in ranges of this size
WAITS = "queue", "flash_program"  # waiting times: for the engine, and for programs


@dataclass(slots=True)
class StepRecord:
    """One decode step over all layers, or the sum of several."""

    ns: int = 0
    breakdown_ns: Counter[str] = field(default_factory=Counter)  # of the slowest micro-batch
    link_bytes: int = 0
    plain_offload_bytes: int = 0
    flash: FlashCounters = FlashCounters()
    context: int = 0  # tokens of its longest sequence

    @property
    def wait_ns(self) -> int:
        """Part of `ns` spent waiting for the engine and for programs."""
        return sum(self.breakdown_ns[unit] for unit in WAITS)


@dataclass(slots=True)
class ReadBack:
    """Forwards of several tokens on a filled cache: their KV data is read back and attended on the host.

    Attributes:
        forwards: Number of forwards.
        tokens: Their new tokens, of all sequences.
        link_bytes: Bytes of their commands, the new tokens' KV data included.
    """

    forwards: int = 0
    tokens: int = 0
    link_bytes: int = 0


@dataclass(slots=True)
class Traffic:
    """Totals since the drives were attached.

    Attributes:
        steps: The last steps.
        step_count, total: Number and sum of all steps.
        by_context: Number and ns of all steps, and of steps without waiting, by range of `CONTEXT_TOKENS` tokens.
        read_back: Forwards that attended on the host to KV data read back from the drives.
        link_bytes: Bytes of all commands.
        busy_ns: Simulated time spent on commands, by drive.
    """

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    step_count: int = 0
    total: StepRecord = field(default_factory=StepRecord)
    by_context: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    current: StepRecord = field(default_factory=StepRecord)
    read_back: ReadBack = field(default_factory=ReadBack)
    prefill_ns: int = 0
    flash: FlashCounters = FlashCounters()
    link_bytes: int = 0
    busy_ns: list[int] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def begin_step(self) -> None:
        """Start a step; an unfinished earlier step is discarded."""
        self.current = StepRecord()

    def end_step(self, ns: int, breakdown_ns: Counter[str]) -> None:
        """End the current step and add it to the totals."""
        step, total = self.current, self.total
        assert ns >= 0, f"a step of {ns} ns"
        assert not step.ns, "a step ends twice"
        step.ns, step.breakdown_ns = ns, breakdown_ns
        self.steps.append(step)
        self.step_count += 1
        total.ns += ns
        total.breakdown_ns.update(breakdown_ns)
        total.link_bytes += step.link_bytes
        total.plain_offload_bytes += step.plain_offload_bytes
        total.flash += step.flash
        first = step.context // CONTEXT_TOKENS * CONTEXT_TOKENS
        steady = not step.wait_ns
        sums = self.by_context.get(first, (0, 0, 0, 0))
        self.by_context[first] = sums[0] + 1, sums[1] + ns, sums[2] + steady, sums[3] + ns * steady

    def count_read_back(self, tokens: int, link_bytes: int) -> None:
        """Add a forward that attended on the host to KV data read back from the drives."""
        assert tokens > 1 and link_bytes > 0, f"{tokens} tokens, {link_bytes} bytes read back"
        self.read_back.forwards += 1
        self.read_back.tokens += tokens
        self.read_back.link_bytes += link_bytes

    @property
    def plain_offload_bytes(self) -> int:
        """Bytes of all commands if the drives were plain SSDs: only decode steps would differ."""
        return self.link_bytes - self.total.link_bytes + self.total.plain_offload_bytes

    def count(self, done: list[Completion]) -> None:
        """Add one completion per drive."""
        with self._lock:
            for drive, c in enumerate(done):
                self.flash += c.flash
                self.link_bytes += c.link_bytes
                self.busy_ns[drive] += c.latency_ns - c.breakdown_ns.get("queue", 0)

    def count_decode(self, done: list[Completion], plain_offload_bytes: int, context: int) -> None:
        """Add one layer of a micro-batch to the current decode step. `context`: length of its longest sequence."""
        with self._lock:
            step = self.current
            step.context = max(step.context, context)
            step.plain_offload_bytes += plain_offload_bytes
            step.link_bytes += sum(c.link_bytes for c in done)
            for c in done:
                step.flash += c.flash
