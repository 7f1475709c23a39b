"""Times of the victim tenant are measured without a limit; refusals of its commands are checked.

partner of: eval/bench/tenants.py, eval/bench/tenants_child.py
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from csd_spec import Command, Completion, Status
from vcsd_eval.bench.tenants import CHUNK, TenantLoad, Victim, experiment


@pytest.mark.usefixtures("own_run_dir")
def test_hostile_tenant_leaves_quota_of_victim() -> None:
    found = experiment(TenantLoad(seconds=2, rounds=1, tokens=300, layers=2))
    assert not found.failed and found.result["refused_within_quota"] == 0
    assert found.result["steps"] > 0 and found.result["steps_alone"] > 0
    assert found.result["p99_over_alone"] == pytest.approx(found.result["p99_ms"] / found.result["p99_ms_alone"])
    assert found.result["p50_ms"] <= found.result["p99_ms"] <= found.result["longest_ms"]
    assert found.result["hostile_SeqFork"] > 0


def test_refusals_of_victim_are_counted_with_reason() -> None:
    victim = Victim(Refusing(), TenantLoad(seconds=0, tokens=CHUNK, layers=1))  # type: ignore[arg-type]  # what it uses of one
    victim.fill()
    assert victim.refused == ["SeqCreate: full", "KvAppend: full"]
    victim.device.lost = True  # type: ignore[assignment]  # an attribute of Refusing, not of a drive
    with pytest.raises(OSError, match="full"):
        victim.decode(0)


class Refusing:
    """A device that refuses everything."""

    lost = False

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        done: Future[Completion] = Future()
        done.set_result(Completion(status=Status.PATH_LOST if self.lost else Status.CAPACITY_EXCEEDED, reason="full"))
        return done
