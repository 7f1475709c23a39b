"""Timelines of policies: compute and waits add up to the run, and copies to its bytes."""

import itertools
import json
from collections import defaultdict

import pytest

from vcsd_eval.serving.policies import PolicyOptions, experiment


def slices(path):
    """Slices (name, begin, end, bytes), ns, by track."""
    names, tracks = {}, defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            begin = round(1000 * event["ts"])
            end = begin + round(1000 * event["dur"])
            tracks[names[event["tid"]]].append((event["name"], begin, end, event["args"].get("bytes", 0)))
    return tracks


@pytest.mark.parametrize("policy", ["flexgen-half", "orbitflow"])
def test_slices_add_up_to_the_run(tmp_path, policy):
    path = tmp_path / "run.json"
    row = experiment(PolicyOptions(policy=policy, requests=4, timeline=path)).result["rows"][0]
    tracks = slices(path)
    waits = sum(end - begin for name, begin, end, _ in tracks["device"] if name.startswith("wait"))
    assert waits / 1e9 == pytest.approx(row["stalled_s"], abs=1e-3)
    copied = sum(
        nbytes for name, track in tracks.items() if name.startswith("copy host>device") for *_, nbytes in track
    )
    assert copied == pytest.approx(row["fetched_bytes"]) and copied > 0
    assert max(end for _, _, end, _ in tracks["device"]) / 1e9 == pytest.approx(row["makespan_s"], rel=0.01)
    for track in tracks.values():
        assert all(begin >= end - 1 for (_, _, end, _), (_, begin, _, _) in itertools.pairwise(track))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"policy": "all"}, "shows one policy"),
        ({"policy": "lru"}, "policies with time slices do not have"),
        ({"policy": "orbitflow", "timeline": "run.svg"}, "must end in .json"),
        ({"policy": "orbitflow", "timeline": "nowhere/run.json"}, "no folder"),
    ],
)
def test_timeline_that_cannot_be_written_is_refused(tmp_path, given, reason):
    path = tmp_path / given.pop("timeline", "run.json")
    with pytest.raises(ValueError, match=reason):
        experiment(PolicyOptions(timeline=path, **given))
