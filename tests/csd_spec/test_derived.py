"""Fields that follow from others are neither arguments, nor shown, nor compared."""

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from csd_spec._derived import derive, derived


@dataclass(frozen=True, slots=True)
class Square:
    side: int
    area: int = derived()

    def __post_init__(self) -> None:
        derive(self, area=self.side**2)


def test_derived_field_follows_from_the_others() -> None:
    square = Square(3)
    assert (square.area, replace(square, side=4).area, repr(square)) == (9, 16, "Square(side=3)")
    assert square == Square(3) and hash(square) == hash(Square(3))
    with pytest.raises(TypeError):
        Square(3, area=8)
    with pytest.raises(FrozenInstanceError):
        square.area = 8
