"""Memory budgets from control groups of both versions, read from their files."""

import pytest

from csd_io.cgroup import Cgroup, available_bytes, cgroup_of

MIB = 1 << 20
V1 = "cgroup-v1"
V2 = "cgroup-v2"


class Machine:
    """Files under /proc and hierarchies, made up."""

    def __init__(self, folder):
        self.proc, self.memory, self.unified = folder / "proc", folder / "memory", folder / "unified"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 8388608 kB\n")
        self.memory.mkdir()
        self.unified.mkdir()
        self.mounts, self.names = [], []

    def mount(self, line, name):
        self.mounts.append(line)
        self.names.append(name)
        (self.proc / "self" / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        (self.proc / "self" / "cgroup").write_text("\n".join(self.names) + "\n")

    def v1(self, inside, limit, stat):
        folder = self.memory / inside
        folder.mkdir(parents=True, exist_ok=True)
        (self.memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text(stat)
        self.mount(f"30 25 0:26 / {self.memory} rw - cgroup cgroup rw,memory", f"4:memory:/{inside}")

    def v2(self, inside, limits, stat, controllers="cpu memory"):
        for depth, limit in enumerate(limits):
            folder = self.unified.joinpath(*inside.split("/")[: depth + 1])
            folder.mkdir()
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "cgroup.controllers").write_text(f"{controllers}\n")
        (folder / "memory.stat").write_text(stat)
        self.mount(f"31 25 0:27 / {self.unified} rw shared:9 - cgroup2 cgroup2 rw", f"0::/{inside}")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_cgroup_v1_budget_is_limit_minus_non_cache(machine):
    machine.v1("jobs", 100 * MIB, f"cache 7\nrss 5\ntotal_rss {30 * MIB}\ntotal_shmem {6 * MIB}\ntotal_cache 9\n")
    group = cgroup_of(proc=machine.proc)
    assert group == Cgroup(V1, machine.memory / "jobs", machine.memory)
    assert (group.limit_bytes, group.unreclaimable_bytes) == (100 * MIB, 36 * MIB)
    assert available_bytes(group, machine.proc) == 64 * MIB


def test_cgroup_v2_budget_is_lowest_ancestor_limit(machine):
    machine.v2("a/b/c", ["max", 80 * MIB, 100 * MIB], f"anon {10 * MIB}\nfile 99\nshmem {MIB}\n")
    (machine.unified / "a" / "memory.high").write_text(f"{90 * MIB}\n")
    group = cgroup_of(proc=machine.proc)
    assert group.how == V2
    assert (group.limit_bytes, group.unreclaimable_bytes) == (80 * MIB, 11 * MIB)
    (machine.unified / "a" / "memory.high").write_text(f"{60 * MIB}\n")
    assert available_bytes(group, machine.proc) == 49 * MIB


def test_memory_controller_hierarchy_is_used(machine):
    machine.v2("x", ["max"], "anon 1\n", controllers="cpu")
    machine.v1("x", 50 * MIB, "rss 5\nshmem 2\n")
    group = cgroup_of(proc=machine.proc)
    assert (group.how, group.unreclaimable_bytes) == (V1, 7)


@pytest.mark.parametrize("limit", ["9223372036854771712", str(1 << 62)])
def test_cgroup_without_limit_uses_machine_memory(machine, limit):
    machine.v1("jobs", limit, "total_rss 5\n")
    group = cgroup_of(proc=machine.proc)
    assert group.limit_bytes is None
    assert available_bytes(group, machine.proc) == 8 << 30


def test_limit_above_machine_memory_is_capped(machine):
    machine.v1("jobs", 100 << 30, "total_rss 5\n")
    assert available_bytes(cgroup_of(proc=machine.proc), machine.proc) == 8 << 30


def test_no_memory_controller_uses_machine_memory(machine):
    machine.v2("x", ["max"], "anon 1\n", controllers="cpu io")
    assert cgroup_of(proc=machine.proc) is None
    assert available_bytes(None, machine.proc) == 8 << 30


def test_hierarchy_mounted_from_subgroup_is_found(machine):
    """As in a container, whose own group is the root of the mount."""
    (machine.memory / "memory.limit_in_bytes").write_text(f"{40 * MIB}\n")
    (machine.memory / "memory.stat").write_text("total_rss 1\n")
    machine.mount(f"30 25 0:26 /docker/1 {machine.memory} rw - cgroup cgroup rw,memory", "4:memory:/docker/1")
    group = cgroup_of(proc=machine.proc)
    assert group.folder == machine.memory and group.limit_bytes == 40 * MIB
