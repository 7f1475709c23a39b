"""What `./dev synth` has measured of the units for pages of progressive precision; it takes minutes."""

from __future__ import annotations

from vcsd_eval.rtl.synth import Measured

MEASURED = {
    "digit_dots": Measured(1668, 888, 0.0, 0, 236.4, "g_row[2].terms to g_row[2].fours"),
    "digit_scores": Measured(4602, 3192, 2.5, 4, 113.3, "got to widths"),
    "value_sums": Measured(2809, 2718, 4.0, 0, 148.2, "totals to read_8"),
    "hadamard": Measured(1995, 670, 0.0, 0, 111.8, "g_stage[2].in_at to g_stage[0].store"),
    "page_gains": Measured(341, 609, 0.0, 1, 186.3, "w_1 to square_2"),
    "value_weights": Measured(316, 407, 0.5, 1, 134.3, "products to down_2"),
}
