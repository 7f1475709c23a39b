"""A server counts for its own reports without Prometheus's client, too."""

import sys

import pytest

from csd_spec.optional import MissingExtraError
from vcsd.counters import ServerCounts, counters_of


def test_counts_without_prometheus(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    counts = counters_of(None)
    assert type(counts) is ServerCounts
    for waited_s, longest_wait in ((0.1, 3), (0.2, 2)):
        counts.token(waited_s, first=False)
        counts.iteration(1, 1, longest_wait)
    counts.ended("length", 0)
    assert (counts.tokens, counts.longest_wait) == (2, 3)


def test_metrics_without_prometheus_name_the_extra():
    with pytest.raises(MissingExtraError, match=r"vcsd\[metrics\]"):
        ServerCounts().text()
