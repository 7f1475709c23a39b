"""What the error of a lost page says."""

from ftl.errors import UncorrectableReadError


def test_lost_data_is_named_by_its_sequences_or_in_words():
    error = UncorrectableReadError([7, 12])
    assert error.handles == [7, 12] and "7, 12" in str(error)
    told = UncorrectableReadError([7], "pages 1 to 3", "the file is gone")
    assert str(told) == "pages 1 to 3: the file is gone"
    assert str(UncorrectableReadError([7], "pages 1 to 3")) not in (str(told), str(error))
