"""Choice of the spare drive that replaces a lost one."""

from dataclasses import dataclass

from csd_link.spares import Spares


@dataclass(eq=False)
class Drive:
    """A drive by name, which `again` replaces when it is reached again."""

    name: str
    again: "Drive | None" = None

    def reconnect(self):
        return self.again


def test_search_order_is_spare_same_drive_others():
    a, b, c, spare = (Drive(name) for name in ("a", "b", "c", "spare"))
    b.again = Drive("b again")
    spares = Spares([a, b, c], [spare])
    assert spares(a, [b]) is spare
    assert spares(a, [c]) is spare  # another group that has lost the same drive
    assert spares(b, [c]) is b.again
    assert spares(c, [spare]) is b.again  # a lost drive is never taken


def test_added_drive_is_used_if_no_spare_is_left():
    a, b, spare, added = (Drive(name) for name in ("a", "b", "spare", "added"))
    names = []

    def more(known):
        names.append(known)
        return added if len(names) == 1 else None

    spares = Spares([a, b], [spare], more)
    assert spares(a, [b]) is spare
    assert spares(b, [spare]) is added
    assert spares(spare, [added]) is None
    assert names == [["a", "b", "spare"], ["a", "b", "added", "spare"]]


def test_unreachable_drives_are_skipped():
    class HeartbeatTimeoutError(Drive):
        def reconnect(self):
            raise OSError("nobody listens")

    def more(known):
        raise OSError("no table")

    a, b, c = HeartbeatTimeoutError("a"), Drive("b"), Drive("c")
    assert Spares([a, b, c], more=more)(a, [b]) is c


def test_a_drive_that_stores_the_group_is_not_taken():
    a, b = Drive("a"), Drive("b")
    assert Spares([a, b])(a, [b]) is None


def test_groups_are_spread_over_remaining_drives():
    a, b, c, d = (Drive(name) for name in "abcd")
    spares = Spares([a, b, c, d])
    assert spares(a, [b]) is c
    assert spares(b, [c]) is d
