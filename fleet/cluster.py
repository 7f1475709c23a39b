"""A fleet on a Ray cluster: places its drives and ends them. The only module of the fleet that calls Ray actors."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from csd_link.fleet_kv import NAMESPACE
from csd_link.fleet_table import (
    DRIVE,
    FLEET,
    ClusterAddress,
    FleetPlan,
    Member,
    missing_ray,
)
from csd_link.nvmeof.host import host_nqn
from fleet.drive import Assignment, FleetDrive, listen_host, place

RAY_NAMESPACE = "vcsd"
GROUP = "vcsd-fleet"  # name of the placement group
PLACE_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S, POLL_INTERVAL_S = 60.0, 180.0, 30.0, 0.3

Tick = Callable[[object], None]


class DriveActor:
    """A `FleetDrive` in a process that Ray places, and places again after its node is lost."""

    def __init__(self, assignment: Assignment, is_local: bool) -> None:
        import ray

        node, host = ray.get_runtime_context().get_node_id(), listen_host(ray.util.get_node_ip_address(), is_local)
        row = _Store().get(f"{DRIVE}{assignment.name}")
        before = Member(**json.loads(row)) if row else None
        self._drive = FleetDrive(assignment, place(assignment, before, node, host), publish)

    def stop(self) -> None:
        """See `FleetDrive.stop`."""
        self._drive.stop()

    def remove_files(self) -> None:
        """See `FleetDrive.remove_files`."""
        self._drive.remove_files()


class _Store:
    """Ray's key-value store, in a process that is connected to the cluster."""

    def __init__(self) -> None:
        from ray.experimental import internal_kv

        self._kv, self._namespace = internal_kv, {"namespace": NAMESPACE}

    def get(self, key: str) -> str | None:
        content = self._kv._internal_kv_get(key.encode(), **self._namespace)
        return None if content is None else str(content.decode())

    def put(self, key: str, text: str, overwrite: bool = True) -> bool:
        """Store a text; returns whether the key already existed."""
        return bool(self._kv._internal_kv_put(key.encode(), text.encode(), overwrite, **self._namespace))

    def clear(self) -> None:
        """Remove all keys of the fleet."""
        for key in self._kv._internal_kv_list(b"", **self._namespace):
            self._kv._internal_kv_del(key, **self._namespace)


def publish(member: Member) -> None:
    """Write a drive's row to the table."""
    _Store().put(f"{DRIVE}{member.name}", json.dumps(asdict(member)))


@contextmanager
def connect_ray(cluster: ClusterAddress) -> Iterator[Any]:
    """Connect Ray to a cluster for the duration of the block; an existing connection is kept.

    Raises:
        ValueError: Ray is not installed.
        ConnectionError: No cluster answers.
    """
    if missing := missing_ray():
        raise ValueError(f"a fleet needs Ray: {missing.fix}")
    if cluster.token:
        os.environ.update(cluster.environment)
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(cluster.address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = str(error).splitlines()[0].partition(". ")[0]
        raise ConnectionError(f"no Ray cluster to join at {cluster.address} ({said}): ray start starts one") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def start(cluster: ClusterAddress, plan: FleetPlan, server: Sequence[str], tick: Tick, local: str = "") -> None:
    """Place the drives of a plan, and wait until each one answers.

    Args:
        cluster: The cluster; vcsd must be installed on each node.
        plan: The fleet.
        server: Arguments of Python that start a drive's server.
        tick: Called for each drive that answers.
        local: Identifier of a local fleet, whose drives listen only on the loopback address.

    Raises:
        ValueError: A fleet is already up, or the cluster has too few CPUs.
        ConnectionError: No cluster answers, or a drive does not start; nothing is left running.
    """
    fleet, host = local or secrets.token_hex(4), host_nqn()
    with connect_ray(cluster) as ray:
        row = json.dumps({"id": fleet, "host_nqn": host, "names": plan.names})
        if _Store().put(FLEET, row, overwrite=False):
            raise ValueError(f"a fleet is already up at {cluster.address}: vcsd fleet down ends it")
        try:
            _place(ray, plan, [_assignment(plan, name, fleet, host, server) for name in plan.names], bool(local))
            _await(cluster, plan, tick)
        except BaseException:
            _end(ray, plan.names)
            raise


def _assignment(plan: FleetPlan, name: str, fleet: str, host: str, server: Sequence[str]) -> Assignment:
    return Assignment(
        fleet=fleet,
        name=name,
        host_nqn=host,
        spec=asdict(plan.spec),
        flash=str(plan.flash or ""),
        hosted=plan.overrides,
        server=tuple(server),
    )


def _place(ray: Any, plan: FleetPlan, assignments: Sequence[Assignment], is_local: bool) -> None:
    """Create the actors, spread over the nodes."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = [{"CPU": plan.cpus}] * len(assignments)
    group = placement_group(bundles, strategy="SPREAD", name=GROUP, lifetime="detached")
    if not group.wait(PLACE_TIMEOUT_S):
        have = ray.cluster_resources().get("CPU", 0)
        raise ValueError(
            f"the cluster has no room for {len(assignments)} drives of {plan.cpus:g} CPUs each (it has {have:g} in all,"
            " others may use them): ask for fewer drives, or set cpus lower"
        )
    for index, assignment in enumerate(assignments):
        actor = ray.remote(DriveActor).options(
            name=assignment.name,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=plan.cpus,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        actor.remote(assignment, is_local)


def _await(cluster: ClusterAddress, plan: FleetPlan, tick: Tick) -> None:
    """Wait until each drive has answered; raises ConnectionError if one cannot start."""
    waiting, deadline = set(plan.names), time.monotonic() + START_TIMEOUT_S
    while waiting:
        for name in sorted(waiting):
            row = _Store().get(f"{DRIVE}{name}")
            member = Member(**json.loads(row)) if row else None
            if member and member.state == "up":
                waiting.remove(name)
                tick(name)
            elif member and member.state == "lost":
                raise ConnectionError(f"drive {name} did not start on {member.host}: {member.reason}")
        if waiting and time.monotonic() > deadline:
            raise ConnectionError(f"no answer from {', '.join(sorted(waiting))} within {START_TIMEOUT_S:g} s")
        time.sleep(POLL_INTERVAL_S)


def end(cluster: ClusterAddress) -> None:
    """End the fleet of a cluster, and remove its files.

    Raises:
        ValueError: No fleet is up.
        ConnectionError: No cluster answers.
    """
    with connect_ray(cluster) as ray:
        row = _Store().get(FLEET)
        if row is None:
            raise ValueError("no fleet is up: vcsd fleet up starts one")
        _end(ray, json.loads(row)["names"])


def _end(ray: Any, names: Sequence[str]) -> None:
    """Stop all drives, then remove their files, the actors and the table. Lost drives are skipped."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    actors = []
    for name in names:
        with suppress(ValueError):  # never placed
            actors.append(ray.get_actor(name, RAY_NAMESPACE))
    for act in ("stop", "remove_files"):
        under_way = [getattr(actor, act).remote() for actor in actors]
        done, _ = ray.wait(under_way, num_returns=len(under_way), timeout=STOP_TIMEOUT_S) if under_way else ([], [])
        for call in done:
            with suppress(ray.exceptions.RayError):
                ray.get(call)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    with suppress(ValueError):
        remove_placement_group(get_placement_group(GROUP))
    _Store().clear()
