"""Tables of the documentation: their place in a page, and the CPU."""

import os

import pytest

from vcsd_eval.doc_tables import cpu_name, with_table


def test_page_keeps_its_text_and_needs_one_place():
    page = "before\n<!-- table: a -->\nold\n<!-- /table -->\nafter\n"
    assert with_table(page, "a", "new") == "before\n<!-- table: a -->\n\nnew\n\n<!-- /table -->\nafter\n"
    for wrong in ("before", page * 2):
        with pytest.raises(ValueError, match="the page needs one line `<!-- table: a -->`"):
            with_table(wrong, "a", "new")


def test_cpu_name_has_the_cores_of_this_process():
    assert cpu_name().endswith(f", {len(os.sched_getaffinity(0))} cores")
