"""Ranks: like is compared with like, within a limit of bytes, and uncertain differences are ties."""

from tests.eval.accuracy.leaderboard.submissions import row, submission
from vcsd_eval.accuracy.errors import TOLERANCE as MEASURED_TOLERANCE
from vcsd_eval.accuracy.leaderboard.ranking import TOLERANCE, board_entries, rank_groups


def ranks(rows, limit, others=()):
    """(label, rank, tied) of the first group within a limit, in order."""
    group = rank_groups(board_entries([submission(*rows)], others))[0]
    return [(each.entry.row.label, each.rank, each.is_tied) for each in group.by_limit[limit]]


def test_overlapping_intervals_are_ties():
    rows = [row("c", score=0.3), row("a", score=0.100), row("b", score=0.105)]
    assert ranks(rows, 0.25) == [("a", 1, True), ("b", 1, True), ("c", 3, False)]


def test_different_ranks_may_overlap():
    rows = [row("a", score=0.100), row("b", score=0.115), row("c", score=0.130)]  # only a and c do not
    assert ranks(rows, 0.25) == [("a", 1, True), ("b", 1, True), ("c", 2, False)]


def test_higher_recall_is_first():
    rows = [
        row(name, task="niah-single", score=score, low=score, high=score, worst=0.0)
        for name, score in (("a", 0.2), ("b", 0.9), ("c", 0.9))
    ]
    assert ranks(rows, 0.25) == [("b", 1, True), ("c", 1, True), ("a", 3, False)]


def test_only_rows_within_the_bytes_are_ranked():
    rows = [
        row("a", bytes_fetched_share=0.12, score=0.4),
        row("b", bytes_fetched_share=0.254, score=0.2),
        row("c", bytes_fetched_share=0.9, score=0.1),
    ]
    (group,) = rank_groups(board_entries([submission(*rows)], []))
    shown = {limit: [each.entry.row.method for each in entries] for limit, entries in group.by_limit.items()}
    assert shown == {1 / 8: ["a"], 1 / 4: ["b", "a"], 1.0: ["c", "b", "a"]}
    assert TOLERANCE == MEASURED_TOLERANCE


def test_row_with_most_bytes_stands_for_its_method():
    """Also where a smaller budget has the better score by chance."""
    rows = [row("a", bytes_fetched_share=0.1, score=0.1), row("a", bytes_fetched_share=0.2, score=0.2, budget=0.2)]
    (group,) = rank_groups(board_entries([submission(*rows)], []))
    assert [each.entry.row.score for each in group.by_limit[1 / 4]] == [0.2]
    assert [each.entry.row.score for each in group.by_limit[1 / 8]] == [0.1]


def test_unlike_rows_are_in_groups_of_their_own():
    changes = ({"context_tokens": 2048}, {"data": "other"}, {"counted_by": "element"}, {"task": "perplexity"})
    rows = [row("a"), *(row("a", **each) for each in changes)]
    groups = rank_groups(board_entries([submission(*rows)], [submission(row("b"), model="large")]))
    assert len(groups) == 6
    assert all(sum(map(len, group.by_limit.values())) == 1 for group in groups)
    assert [group.key.model for group in groups] == ["large"] + ["tiny"] * 5
    assert [group.key.counted_by for group in groups[1:4]] == ["page", "page", "element"]


def test_caveats_say_what_is_unequal():
    rows = [row("a"), row("b"), row("c", samples=4, bytes_fetched_share=0.1)]
    sent = submission(row("a"), submitter="Bob", machine="a phone")
    (group,) = rank_groups(board_entries([submission(*rows)], [sent]))
    caveats = {(each.entry.row.method, each.entry.origin): each.caveats for each in group.by_limit[1 / 4]}
    assert caveats == {
        ("a", "measured"): "",
        ("b", "measured"): "",
        ("c", "measured"): "reads 0.40 of the limit; 4 samples, others 8; 4 samples give too narrow an interval",
        ("a", "submitted by Bob"): "not measured here: a phone, vcsd 0.2.0",
    }


def test_convention_of_a_budget_has_its_own_line():
    rows = [row("sparf"), row("sparf", convention="paper", score=0.2)]
    assert [each[0] for each in ranks(rows, 0.25)] == ["sparf", "sparf (paper)"]


def test_dense_reference_is_a_measured_row():
    dense = row("dense", score=0.01, bytes_fetched_share=0.99)
    elements = row("a", counted_by="element")
    groups = rank_groups(board_entries([submission(dense, elements)], []))
    assert [group.dense for group in groups] == [dense, dense]
    (group,) = rank_groups(board_entries([submission(row("a"))], [submission(dense)]))
    assert group.dense is None
