"""Plots: a line for each series, stacked bars for parts of a sum, and file names that no plot can have."""

import pytest

from vcsd_eval.plot import check_format, lines, save_figure, stack

ROWS = [
    {"system": "a", "batch": 4, "rate": 1.0, "kv": 0.25, "other": 0.75},
    {"system": "a", "batch": 16, "rate": 3.0, "kv": 0.5, "other": 0.5},
    {"system": "b", "batch": 4, "rate": None, "kv": 0.0, "other": 1.0},
    {"system": "b", "batch": 16, "rate": 2.0, "kv": 0.75, "other": 0.25},
]


def test_line_plot_has_a_line_per_series():
    figure = lines(ROWS, "batch", "rate", "system")
    drawn = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines}
    assert drawn == {"a": [(4, 1.0), (16, 3.0)], "b": [(16, 2.0)]}


def test_stacked_bars_add_up():
    figure = stack(ROWS, "system", ("kv", "other"))
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].containers[-1]]
    assert tops == [1, 1, 1, 1]


def test_pictures_are_written_in_the_format_of_their_name(tmp_path):
    figure = lines(ROWS, "batch", "rate", "system")
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "reason"), [("a.txt", "ends in .png, .svg, .pdf"), ("none/a.png", "there is no folder")]
)
def test_unknown_plot_format_is_refused_early(tmp_path, name, reason):
    with pytest.raises(ValueError, match=reason):
        check_format(tmp_path / name)
