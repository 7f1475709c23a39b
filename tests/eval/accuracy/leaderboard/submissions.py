"""Submissions and rows for tests, made by hand."""

from vcsd_eval.accuracy.leaderboard.submission import LeaderboardRow, Submission, SubmittedMethod


def row(method="fast", **changes):
    """A row of output-error; its interval is 10 % wide on each side unless it is given."""
    score = changes.get("score", 0.1)
    fields = {
        "task": "output-error",
        "method": method,
        "context_tokens": 1024,
        "samples": 8,
        "seed": 0,
        "data": "text.txt",
        "budget": 0.25,
        "convention": "bytes",
        "counted_by": "page",
        "bytes_used_share": 0.1,
        "bytes_fetched_share": 0.2,
        "bytes_read": 1000,
        "score": score,
        "low": 0.9 * score,
        "high": 1.1 * score,
        "worst": 2 * score,
    }
    return LeaderboardRow(**fields | changes)


def submission(*rows, **changes):
    """A submission of rows, whose methods have a link each."""
    names = dict.fromkeys(each.method for each in rows)
    fields = {
        "version": 1,
        "submitter": "Ann",
        "date": "2026-11-26",
        "command": "vcsd eval leaderboard",
        "vcsd_version": "0.2.0",
        "model": "tiny",
        "machine": "two cores",
        "methods": tuple(SubmittedMethod(name=name, source=f"https://example.com/{name}") for name in names),
        "rows": rows,
    }
    return Submission(**fields | changes)
