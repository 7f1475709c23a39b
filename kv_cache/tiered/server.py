"""A server: requests that wait in a queue or decode together, and copies that make room for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kv_cache.tiered.machine import Machine, Tier
from kv_cache.tiered.store import Kv, Store

NOW = 0  # the urgency of what is waited for
EMA = 0.1  # of the newest iteration
STAY = 20  # times as long as its copies take that a request decodes before it makes room
ON_FLASH = 8  # requests, beyond which others rather stay on the device
LATE = 16  # iterations over which the use of links is watched


class NothingMoves(RuntimeError):
    """Everybody waits for room that nobody leaves."""

    def __init__(self) -> None:
        super().__init__("nothing moves: K and V wait for each other's room")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is brought and displaced when, and who decodes.

    victims: what of a tier may make room for a request, the first to go first. admit: who decodes in the next
    iteration. ahead: what is copied meanwhile. gives_up: whether K and V are computed again rather than copied down to
    a tier. staging: the share of the device kept for what comes ahead. free: copies take no time.
    """

    name: str
    victims: Callable[[Server, Tier, Kv], Iterable[Kv]]
    admit: Callable[[Server], None]
    ahead: Callable[[Server], None]
    gives_up: Callable[[Server, Kv, Tier], bool]
    staging: float = 0.0
    free: bool = False


@dataclass(slots=True)
class Counts:
    """What has happened: entries of requests that had K and V, those that found them on the device, bytes that were
    brought in vain, tokens of which K and V were computed again, seconds that nothing was computed."""

    entries: int = 0
    hits: int = 0
    wasted_bytes: int = 0
    recomputed_tokens: int = 0
    stalled_s: float = 0.0
    longest_wait_s: float = 0.0
    stays: int = 0


@dataclass(slots=True)
class Server:
    """Requests under a policy. slice_tokens: how many a request may make while others wait. limit: of the device, for
    those that decode. iteration_s: of late ones, a moving average."""

    machine: Machine
    policy: Policy
    slice_tokens: int
    limit: int
    store: Store
    queue: list[Kv] = field(default_factory=list)
    active: list[Kv] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    iteration: int = 0
    iteration_s: float = 0.0
    active_bytes: int = 0
    busy: deque[tuple[float, dict[Tier, float]]] = field(default_factory=lambda: deque(maxlen=LATE))

    def fits(self, kv: Kv) -> bool:
        """Whether a request may decode with the others."""
        return self.active_bytes + kv.room <= self.limit

    def enter(self, kv: Kv) -> None:
        """A request decodes from now on; its K and V must be on the device when the iteration begins."""
        self.queue.remove(kv)
        self.active.append(kv)
        self.active_bytes += kv.room
        self.counts.stays += 1
        if kv.uses:
            self.counts.entries += 1
            self.counts.hits += kv.is_here and not kv.absent
        self.counts.longest_wait_s = max(self.counts.longest_wait_s, self.store.now_s - kv.left_s)
        kv.pinned, kv.turn, kv.staged, kv.entered_s = True, 0, False, self.store.now_s
        kv.uses += 1

    def leave(self, kv: Kv) -> None:
        """A request waits again, behind all others."""
        self.active.remove(kv)
        self.active_bytes -= kv.room
        kv.pinned, kv.left_s, kv.used = False, self.store.now_s, self.iteration
        self.queue.append(kv)

    def withdraw(self, kv: Kv) -> None:
        """A request has made its last token, or is not wanted any more."""
        if kv in self.active:
            self.active.remove(kv)
            self.active_bytes -= kv.room
        else:
            self.queue.remove(kv)
        self.store.withdraw(kv)

    def iterated(self, takes_s: float) -> None:
        """An iteration goes by, and copies under it."""
        self.iteration += 1
        self.iteration_s += EMA * (takes_s - self.iteration_s)
        self.store.run_until(self.store.now_s + takes_s)
        self.busy.append((self.store.now_s, {link: each.busy_s for link, each in self.store.carried.items()}))

    def use(self, link: Tier) -> float:
        """The share of its time that a link had work lately."""
        if len(self.busy) < 2:
            return 0.0
        (began_s, before), (end_s, after) = self.busy[0], self.busy[-1]
        return (after[link] - before[link]) / (end_s - began_s)

    def is_over(self, kv: Kv) -> bool:
        """Whether a request has had its slice."""
        return kv.turn >= self.slice_tokens

    def bring(self, kv: Kv, to: Tier, urgency: int) -> bool:
        """Ask for the next copy on the way up; False where there is no room for it and none can be made."""
        if kv.move:
            self.store.hurry(kv.move, urgency)
            return True
        if kv.tier is not None and kv.tier <= to:
            return True
        step = Tier.HOST if kv.tier is Tier.FLASH else to
        if not self.make_room(step, kv, urgency, kv):
            if step is to or urgency > NOW or not self.make_room(to, kv, urgency, kv):
                return False
            step = to
        kv.staged = urgency > NOW and not kv.absent
        self.store.move(kv, step, urgency)
        return True

    def make_room(self, tier: Tier, kv: Kv, urgency: int, cause: Kv) -> bool:
        """Have what may go from a tier go, until there is room for K and V. cause: for whose sake."""
        lacking = self.store.size(kv, tier) - self.store.room(tier)
        if lacking <= 0:
            return True
        chosen = []
        for victim in self.policy.victims(self, tier, cause):
            if victim not in (kv, cause):
                chosen.append(victim)
                lacking -= self.store.size(victim, tier)
            if lacking <= 0:
                return all(self._displace(each, urgency, cause) for each in chosen)
        return False

    def _displace(self, kv: Kv, urgency: int, cause: Kv) -> bool:
        """Have K and V go down a tier, or be given up; False if they have to wait for room there."""
        down = Tier.HOST if kv.tier is Tier.DEVICE else Tier.FLASH
        if down is Tier.HOST and not self._is_given_up(kv, down):
            if not self.make_room(down, kv, urgency, cause):
                if not self._may_pass_host(kv, urgency):
                    return False
                down = Tier.FLASH
            elif kv.pinned and self.store.free[down] < self.store.size(kv, down):
                return False  # it decodes until there is room
        if self._is_given_up(kv, down):
            self.give_up(kv)
            return True
        if self.store.room(down) < self.store.size(kv, down):
            raise ValueError(f"flash is full: {self.machine.flash_bytes / 1e9:,.0f} GB do not hold what waits")
        if kv.pinned:
            self.leave(kv)
        if kv.staged:
            self.counts.wasted_bytes += self.machine.bytes_of(kv.tokens)
            kv.staged = False
        self.store.move(kv, down, urgency)
        return True

    def _is_given_up(self, kv: Kv, down: Tier) -> bool:
        return kv.absent or self.policy.gives_up(self, kv, down)

    def _may_pass_host(self, kv: Kv, urgency: int) -> bool:
        """Whether K and V may go from the device to flash at once, which occupies both links: what is waited for may,
        and else where nothing is under way that would make room, for a request that has stayed as long as that is
        worth."""
        if urgency == NOW:
            return True
        idle = not (self.store.running or self.store.waiting)
        return idle and (not kv.pinned or (self.has_stayed(kv, Tier.FLASH) and self.may_fill_flash()))

    def may_fill_flash(self) -> bool:
        """Whether more may go to flash: what is there has to be read again, over the slowest link, in the end."""
        return sum(Tier.FLASH in (kv.tier, kv.move.to if kv.move else None) for kv in self.queue) < ON_FLASH

    def has_stayed(self, kv: Kv, by: Tier) -> bool:
        """Whether a request has decoded so long that copies out and in again, or the iteration that the room is not
        used for, are little."""
        copies_s = 2 * self.machine.copy_s(by, self.machine.bytes_of(kv.tokens))
        return self.store.now_s - kv.entered_s >= STAY * max(copies_s, self.iteration_s)

    def computes_sooner(self, kv: Kv, by: Tier) -> bool:
        """Whether all who decode lose less by computing K and V again than one does by copies over a link."""
        computed_s = self.machine.cost.prefill_s(kv.tokens) * max(1, len(self.active))
        return computed_s < self.machine.copy_s(by, self.machine.bytes_of(kv.tokens))

    def give_up(self, kv: Kv) -> None:
        """Have K and V computed again when the request comes back."""
        if kv.pinned:
            self.leave(kv)
        self.store.drop(kv)
        kv.absent = True
