"""Rows of the table of verbs."""

import re
from pathlib import Path

import numpy as np
import pytest

from csd_spec.commands import Flush, KvCrop, KvFree, KvRead
from csd_spec.verbs import ROWS, VERBS, ArrayType, CommandSpec, Scalar, SequenceAccess, verb_of

DOCS = Path(__file__).parents[2] / "docs"


def test_every_row_has_its_own_opcode():
    assert len({row.opcode for row in ROWS}) == len(ROWS) == len(VERBS)
    assert all(verb_of(row.opcode) is row for row in ROWS)
    assert verb_of(0x12) is None


def test_opcode_bits_encode_transfer_direction():
    directions = {
        0: ("Flush", "SeqCreate", "SeqFork", "SeqSweep", "KvFree", "KvCrop"),
        1: ("KvAppend", "Attend", "KvName", "KvExist", "KvDrop", "KvList"),
        2: ("KvRead", "KvGather", "GetLog"),
    }
    result = {row.name: row.opcode & 3 for row in ROWS}
    assert result == {name: direction for direction, names in directions.items() for name in names}


def test_row_fields_equal_command_fields():
    with pytest.raises(ValueError, match="not its command's fields"):
        CommandSpec(command=KvFree, opcode=1)
    with pytest.raises(ValueError, match="not its command's fields"):
        CommandSpec(command=Flush, opcode=1, parameters=(Scalar("count"),))
    for opcode in (-1, 256):
        with pytest.raises(ValueError, match="Flush"):
            CommandSpec(command=Flush, opcode=opcode)
    assert {CommandSpec(command=Flush, opcode=opcode).opcode for opcode in (0, 255)} == {0, 255}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_example_has_the_shapes_of_its_row(row):
    command = row.example((5, 7), H=3, G=2, d=8)
    sizes = row.sizes(command)
    for array in row.arrays:
        value = getattr(command, array.name)
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.ndim) == (array.kind.value, len(array.symbols))
    if row.access is not SequenceAccess.NONE:
        assert (command.seqs, sizes["B"]) == ((5, 7), 2)


def test_sizes_of_replies():
    sizes = {"B": 2, "H": 3, "G": 4, "d": 8, "N": 6, "count": 5, "stored": 100, "layers": 7, "sum(tokens)": 9}
    replies = {row.name: row.reply_bytes(sizes) for row in ROWS if row.reply}
    assert replies == {
        "SeqCreate": 40,
        "SeqFork": 16,
        "SeqSweep": 8,
        "Attend": 2 * 3 * 4 * (8 * 2 + 2 * 4),
        "KvRead": 2 * 100 * 3 * 8 * 2,
        "KvGather": 2 * 7 * 9 * 3 * 8 * 2,
        "KvExist": 6 * 16,
        "KvList": 5 * 32,
        "GetLog": 0,
    }


def test_read_and_write_commands_are_marked():
    assert {row.name for row in ROWS if row.reads} == {"Attend", "KvRead", "KvGather"}
    assert {row.name for row in ROWS if row.writes} == {"Attend", "KvAppend"}
    assert [kind.modelled for kind in ArrayType] == [False, True, True, False, True, True]


def test_docs_list_every_command():
    lines = re.findall(r"\| (\w\w)h \| (\w+) \| ([^|]*)\|", (DOCS / "drives.md").read_text())
    assert {(int(opcode, 16), name) for opcode, name, _ in lines} == {(row.opcode, row.name) for row in ROWS}
    for _, name, parameters in lines:
        (row,) = (row for row in ROWS if row.name == name)
        assert len([part for part in parameters.split(" (")[0].split(",") if part.strip()]) == len(row.parameters)


def test_wide_payload_items_are_encoded_first():
    for row in ROWS:
        widths = [array.kind.value.itemsize for array in row.arrays if array.kind is not ArrayType.TEXT]
        assert widths == sorted(widths, reverse=True)
    assert KvCrop.__slots__ == ("seqs", "layer", "lengths")


def test_tokens_of_a_read_end_with_the_sequence():
    for first, tokens, wanted in ((0, 0, (0, 9)), (4, 3, (4, 7)), (4, 30, (4, 9)), (9, 1, (9, 9)), (12, 0, (9, 9))):
        found = KvRead.of(9, first, tokens)
        assert (found.start, found.stop) == wanted
