"""Arrays that cost memory where they are written, in memory and on files."""

import numpy as np

from ftl.flash.memory import data_ranges, lazy_zeros


def test_a_large_array_costs_nothing():
    array = lazy_zeros((1 << 40,), np.uint8)
    array[1 << 39] = 3
    assert array[1 << 39] == 3 and array[0] == 0


def test_a_file_keeps_what_was_written(tmp_path):
    file = tmp_path / "array.bin"
    lazy_zeros((1 << 20,), np.uint16, file)[70_000] = 5
    assert file.stat().st_size == 2 << 20
    assert lazy_zeros((1 << 20,), np.uint16, file)[70_000] == 5
    (first, end), *others = data_ranges(file)
    assert not others and first <= 140_000 < end and end - first < 1 << 20


def test_a_private_array_leaves_the_file_alone(tmp_path):
    file = tmp_path / "array.bin"
    lazy_zeros((100,), np.uint8, file)[:] = 7
    private = lazy_zeros((100,), np.uint8, file, private=True)
    private[3] = 1
    assert lazy_zeros((100,), np.uint8, file)[3] == 7
    assert not lazy_zeros((10,), np.uint8, tmp_path / "none.bin", private=True).any()
    assert not (tmp_path / "none.bin").exists()
