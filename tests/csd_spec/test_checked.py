"""Values that are checked when they are created, both from arguments and from text."""

import copy
import pickle
from dataclasses import asdict, replace
from typing import Annotated

import pytest
from pydantic import Field

from csd_spec import DriveSpec
from csd_spec.checked import adapter, from_json, from_values, frozen_value, lenient_value
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH


@frozen_value
class Wheel:
    """A part."""

    spokes: Annotated[int, Field(ge=3, le=99)]

    def __post_init__(self):
        if self.spokes == 13:
            raise ValueError("spokes = 13: not here")


@frozen_value
class Cart:
    """A whole."""

    wheels: tuple[Wheel, ...]
    load_kg: float = 0.0


@lenient_value
class Ticket:
    """Somebody else's."""

    to: str


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"spokes": 2}, "^spokes: must be greater than or equal to 3, got 2 .int.$"),
        ({"spokes": 8.0}, "^spokes: must be a valid integer"),
        ({"spokes": "8"}, "^spokes: must be a valid integer, got '8' .a string.$"),
        ({"spokes": True}, "^spokes: must be a valid integer, got True"),
        ({"spokes": 10**400}, r"^spokes: must be less than or equal to 99, got 10+\.\.\.0+ .int.$"),
        ({"spokes": 13}, "^spokes = 13: not here$"),
        ({"spoke": 8}, "^spoke: no such field: did you mean spokes?"),
        ({}, "^spokes: is missing$"),
    ],
)
def test_invalid_value_is_one_line_error_from_any_source(given, reason):
    with pytest.raises(ValueError, match=reason):
        Wheel(**given)
    with pytest.raises(ValueError, match=reason.replace("8.0", "8")):
        from_values(given, Wheel)


def test_json_error_names_path_of_invalid_value():
    assert from_json('{"wheels": [{"spokes": 8}], "load_kg": 5}', Cart) == Cart(wheels=(Wheel(spokes=8),), load_kg=5)
    for text, reason in (
        ('{"wheels": [{"spokes": 8}, {"spokes": 13}]}', r"^wheels\[1\]: spokes = 13: not here$"),
        ('{"wheels": [], "load_kg": NaN}', "^load_kg: must be a finite number"),
        ("[]", "^must be an object, got "),
        ("[" * 100_000, "^not JSON, or cut off: recursion limit"),
        ('{"wheels":', "^not JSON, or cut off: EOF"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            from_json(text, Cart)
        assert len(str(error.value)) < 200
    assert from_json('{"to": "Delft", "price": 5}', Ticket).to == "Delft"


@pytest.mark.parametrize("value", [Wheel(spokes=8), Ticket(to="Delft")])
def test_checked_values_are_compact_and_do_not_change(value):
    assert not hasattr(value, "__dict__")
    (name,) = value.__slots__
    with pytest.raises(AttributeError):
        setattr(value, name, getattr(value, name))
    with pytest.raises(ValueError, match=name):
        type(value)(getattr(value, name))


def test_checked_values_copy_pickle_and_compare():
    cart = Cart(wheels=(Wheel(spokes=8),))
    assert from_values(asdict(cart), Cart) == cart == pickle.loads(pickle.dumps(cart)) == copy.deepcopy(cart)
    with pytest.raises(ValueError, match="spokes: must"):
        replace(cart.wheels[0], spokes=100)


def test_json_schema_of_drive_has_ranges():
    schema = adapter(DriveSpec).json_schema()
    channels = schema["$defs"]["Geometry"]["properties"]["channels"]
    assert (channels["minimum"], channels["maximum"]) == (1, 1024)
    assert from_values(asdict(INSTCSD_ZYNQ7045_8CH), DriveSpec) == INSTCSD_ZYNQ7045_8CH
