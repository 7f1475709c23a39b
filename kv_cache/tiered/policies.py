"""Policies: what goes first, who decodes next, what is brought ahead; and the table of those that are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kv_cache.tiered.machine import Tier
from kv_cache.tiered.server import NOW, NothingMoves, Policy, Server
from kv_cache.tiered.store import Kv

WINDOW, FLASH_WINDOW = 4, 8  # iterations that TierKV looks ahead
HIGH_WATER = 0.8  # of a link's time, beyond which only the most urgent copies are begun
STAGING = 1 / 16  # of the device
READ_AHEAD = 8  # requests at the head of the queue that may come from flash
UNDER_WAY = 3  # copies ahead that wait for a link


def _movable(server: Server, tier: Tier) -> Iterator[Kv]:
    return (kv for kv in server.queue if kv.tier is tier and kv.move is None and not kv.pinned)


def by_last_use(server: Server, tier: Tier, cause: Kv) -> Iterable[Kv]:
    """Least recently used first. To be copied is not to be used."""
    return sorted(_movable(server, tier), key=lambda kv: kv.used)


def by_uses(server: Server, tier: Tier, cause: Kv) -> Iterable[Kv]:
    """Least often used first."""
    return sorted(_movable(server, tier), key=lambda kv: (kv.uses, kv.used))


def by_next_use(server: Server, tier: Tier, cause: Kv) -> Iterable[Kv]:
    """The last of the queue first, and nothing that is due before the request that needs the room. On the device all
    decode: those make room that have had their slice, once the link has nothing else to do."""
    if tier is Tier.DEVICE:
        if not any(Tier.HOST in move.links for move in server.store.waiting):
            yield from [kv for kv in server.active if server.is_over(kv) and server.has_stayed(kv, Tier.HOST)]
    elif server.may_fill_flash():
        yield from (
            kv for kv in reversed(server.queue[server.queue.index(cause) + 1 :]) if kv.tier is tier and not kv.move
        )


def rotate(server: Server) -> None:
    """Whoever has had its slice leaves, the next of the queue enter, and all wait until their K and V have come."""
    if server.queue:
        for kv in [each for each in server.active if server.is_over(each)]:
            server.leave(kv)
    entering = []
    while server.queue and server.fits(server.queue[0]):
        entering.append(server.queue[0])
        server.enter(entering[-1])
    began_s = server.store.now_s
    while late := [kv for kv in entering if not kv.is_here]:
        for kv in late:
            server.bring(kv, Tier.DEVICE, NOW)
        if not all(kv.is_here for kv in late) and not server.store.step():
            raise NothingMoves
    server.counts.stalled_s += server.store.now_s - began_s


def join(server: Server) -> None:
    """Whatever lies on the device decodes. A late request waits where it stands in the queue, and the others go on."""
    for kv in list(server.queue):
        if kv.is_here:
            server.enter(kv)


def never(server: Server, kv: Kv, down: Tier) -> bool:
    """All K and V are kept."""
    return False


def below_host(server: Server, kv: Kv, down: Tier) -> bool:
    """There is no flash."""
    return down is Tier.FLASH


def if_sooner(server: Server, kv: Kv, down: Tier) -> bool:
    """Where computing again is sooner done."""
    return server.computes_sooner(kv, down)


def nothing(server: Server) -> None:
    """What is needed is fetched when it is needed."""


def due(server: Server, window: int) -> Iterator[tuple[int, Kv]]:
    """Who enters in how many iterations, as the slices and the requests' ends have it."""
    room = server.limit - server.active_bytes
    waiting = iter(list(server.queue))
    kv = next(waiting, None)
    for ahead in range(1, window + 1):
        for each in server.active:
            left = min(server.slice_tokens - each.turn, each.request.output_tokens - each.made)
            room += each.room if left == ahead else 0
        while kv and kv.room <= room:
            room -= kv.room
            yield ahead, kv
            kv = next(waiting, None)


def in_windows(server: Server) -> None:
    """What enters soon is brought if it alone can be there in time: two hops, with a window each."""
    machine = server.machine
    for ahead, kv in due(server, FLASH_WINDOW):
        if kv.move or kv.tier in (None, Tier.DEVICE):
            continue
        link = Tier.FLASH if kv.tier is Tier.FLASH else Tier.HOST
        if link is Tier.HOST and ahead > WINDOW:
            continue
        in_time = machine.copy_s(link, machine.bytes_of(kv.tokens)) <= ahead * server.iteration_s
        if in_time and (ahead == 1 or server.use(link) <= HIGH_WATER):
            server.bring(kv, Tier.HOST if link is Tier.FLASH else Tier.DEVICE, ahead)


def in_queue_order(server: Server) -> None:
    """The next of the queue are brought as room allows, from flash only a few; never more than links have work for."""
    full = False
    for place, kv in enumerate(list(server.queue), 1):
        if len(server.store.waiting) >= UNDER_WAY:
            return
        if kv.move or kv.tier is Tier.DEVICE:
            continue
        if kv.tier is not None and server.computes_sooner(kv, kv.tier):
            server.give_up(kv)
        if kv.tier is not Tier.FLASH:
            full = full or not server.bring(kv, Tier.DEVICE, place)
        elif place <= READ_AHEAD:
            server.bring(kv, Tier.HOST, place)


POLICIES = {
    each.name: each
    for each in (
        Policy(name="lru", victims=by_last_use, admit=rotate, ahead=nothing, gives_up=below_host),
        Policy(name="lfu", victims=by_uses, admit=rotate, ahead=nothing, gives_up=below_host),
        Policy(name="static", victims=by_last_use, admit=rotate, ahead=nothing, gives_up=never),
        Policy(name="tierkv", victims=by_last_use, admit=rotate, ahead=in_windows, gives_up=never, staging=STAGING),
        Policy(name="mended", victims=by_next_use, admit=join, ahead=in_queue_order, gives_up=if_sooner),
        Policy(name="oracle", victims=by_last_use, admit=rotate, ahead=nothing, gives_up=never, free=True),
    )
}
