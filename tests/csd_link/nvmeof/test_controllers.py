"""Controllers and their shares without connections: against a model, and the field that each refusal names."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_link.nvmeof import controllers as controllers_module
from csd_link.nvmeof.commands import DISCOVERY_NQN, MAX_NQN_BYTES, Code, CommandError
from csd_link.nvmeof.controllers import ConnectData, Controllers
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.nvm import NvmNamespace
from tests.nvmeof import HOST, NQN, MemoryBlocks, subsystem_of
from tests.properties import examples

ID = bytes(range(16))
LIMITS = Limits(
    controllers=4, host_controllers=3, connections=8, unnamed_connections=2, host_connections=4, io_queues=2
)
AT_CNTLID, AT_SUBNQN, AT_HOSTNQN = 0x10000 | 16, 0x10000 | 256, 0x10000 | 512
ONE, OTHER = (HOST, "10.0.0.1"), (HOST, "10.0.0.2")


class Leaving(NvmNamespace):
    """A namespace that notes the hosts that have left."""

    def __init__(self):
        super().__init__(MemoryBlocks(), bytes(16))
        self.left = []

    def host_left(self, host):
        self.left.append(host)


def controllers_of(limits=LIMITS, **fields):
    return Controllers(subsystem_of(MemoryBlocks(), **fields), limits)


def connect(controllers, host=HOST, address="a", cntlid=0xFFFF, subnqn=NQN, hang_up=lambda: None):
    return controllers.create(ConnectData(ID, cntlid, subnqn, host), address, hang_up)


def refused(action, *args, **more):
    with pytest.raises(CommandError) as error:
        action(*args, **more)
    return error.value.status, error.value.dw0


class Model:
    """Controllers in the order of their creation: owner, and connections by queue."""

    def __init__(self):
        self.found, self.hung_up = dict[int, tuple[tuple[str, str], set[int]]](), set[tuple[int, int]]()

    def admit(self, owner, held, own, most):
        """Whether one more is admitted, after the host with most has lost its newest controller."""
        if held[owner] >= own:
            return False
        if held.total() >= most:
            largest = max(held, key=held.__getitem__)
            if held[largest] <= held[owner] + 1:
                return False
            self.end([cntlid for cntlid, (other, _) in self.found.items() if other == largest][-1])
        return True

    def end(self, cntlid):
        self.hung_up |= {(cntlid, queue) for queue in self.found.pop(cntlid)[1]}

    def admit_connection(self, owner):
        held = Counter[tuple[str, str]]()
        for other, queues in self.found.values():
            held[other] += len(queues)
        return self.admit(owner, held, LIMITS.host_connections, LIMITS.connections - LIMITS.unnamed_connections)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from("ccjjjd"), st.integers(0, 9), st.integers(1, 2)), max_size=40))
def test_shares_of_hosts(steps):
    """A host that has less than another takes from it; one that has as much does not."""
    controllers, model, hung_up = controllers_of(), Model(), set()
    owners = [(HOST, "a"), (HOST, "b"), (f"{HOST}2", "a")]
    for step, number, queue in steps:
        open_ids = list(model.found)
        if step == "c":
            owner = owners[number % 3]
            line = {}
            held = Counter(other for other, _ in model.found.values())
            admitted = model.admit(owner, held, LIMITS.host_controllers, LIMITS.controllers)
            if admitted and model.admit_connection(owner):
                connection = connect(controllers, *owner, hang_up=lambda line=line: hung_up.add((line["cntlid"], 0)))
                line["cntlid"] = connection.cntlid
                connection.set_property(0x14, 1)
                model.found[connection.cntlid] = owner, {0}
            else:
                assert refused(connect, controllers, *owner)[0] == Code.CONTROLLER_BUSY
        elif open_ids and step == "j":
            cntlid = open_ids[number % len(open_ids)]
            owner, queues = model.found[cntlid]
            request, hang_up = ConnectData(ID, cntlid, NQN, owner[0]), lambda at=(cntlid, queue): hung_up.add(at)
            if queue in queues:
                assert refused(controllers.join, request, queue, hang_up) == (Code.CONNECT_PARAMETERS, 42)
            elif model.admit_connection(owner):
                assert controllers.join(request, queue, hang_up).cntlid == cntlid
                queues.add(queue)
            else:
                assert refused(controllers.join, request, queue, hang_up)[0] == Code.CONTROLLER_BUSY
        elif open_ids:
            cntlid = open_ids[number % len(open_ids)]
            queue = 0 if number % 2 else queue
            controllers.disconnect(controllers._found[cntlid], queue)
            model.found[cntlid][1].discard(queue)
            if queue == 0:
                model.end(cntlid)
        assert {cntlid: controllers._found[cntlid].owner for cntlid in controllers._found} == {
            cntlid: owner for cntlid, (owner, _) in model.found.items()
        }
        assert {cntlid: set(queues) for cntlid, queues in controllers._hang_ups.items()} == {
            cntlid: queues for cntlid, (_, queues) in model.found.items()
        }
        assert hung_up == model.hung_up and len(controllers) == len(model.found)


def test_a_joining_queue_matches_its_controller():
    controllers = controllers_of()
    connection = connect(controllers)

    def join(queue=1, **other):
        fields = {"host_id": ID, "cntlid": connection.cntlid, "subnqn": NQN, "hostnqn": HOST} | other
        return controllers.join(ConnectData(**fields), queue, lambda: None)

    assert refused(join) == (Code.SEQUENCE_ERROR, 0), "it is not enabled"
    connection.set_property(0x14, 1)
    for other, status in (
        ({"cntlid": connection.cntlid + 1}, AT_CNTLID),
        ({"cntlid": connect(controllers, subnqn=DISCOVERY_NQN).cntlid}, AT_CNTLID),
        ({"host_id": bytes(16)}, AT_HOSTNQN),
        ({"hostnqn": f"{HOST}2"}, AT_HOSTNQN),
        ({"subnqn": f"{NQN}x"}, AT_SUBNQN),
        ({"subnqn": DISCOVERY_NQN}, AT_SUBNQN),
        ({"queue": LIMITS.io_queues + 1}, 42),
    ):
        assert refused(join, **other) == (Code.CONNECT_PARAMETERS, status)
    assert join(LIMITS.io_queues) is connection


def test_a_controller_is_of_a_known_subsystem_and_an_allowed_host():
    said = list[str]()
    controllers = controllers_of(hosts=frozenset({HOST}), refuse_host=said.append)
    assert refused(connect, controllers, subnqn="nqn.x") == (Code.CONNECT_PARAMETERS, AT_SUBNQN)
    for cntlid in (0, 1, 0xFFFE):
        assert refused(connect, controllers, cntlid=cntlid) == (Code.CONNECT_PARAMETERS, AT_CNTLID)
    assert not said and refused(connect, controllers, host=f"{HOST}2") == (Code.INVALID_HOST, 0)
    assert len(said) == 1 and f"{HOST}2" in said[0]
    connection = connect(controllers, address="10.0.0.9")
    assert (connection.is_discovery, connection.host, connection.owner) == (False, (ID, HOST), (HOST, "10.0.0.9"))
    assert connection.subsystem is controllers.subsystem
    discovery = connect(controllers, subnqn=DISCOVERY_NQN)
    assert discovery.is_discovery and discovery.subsystem.discovers == controllers.subsystem.discovers


def test_numbers_of_controllers_in_use_are_not_taken_again():
    controllers = controllers_of()
    first = connect(controllers)
    assert first.cntlid == 1
    controllers._numbers = count(0xFFEE)
    assert [connect(controllers).cntlid for _ in range(2)] == [0xFFEF, 2], "the largest, then from the first on"


def test_namespaces_hear_when_the_last_controller_of_a_host_is_gone():
    namespace = Leaving()
    controllers = controllers_of(namespaces={1: namespace})
    first, second, other = connect(controllers), connect(controllers, address="b"), connect(controllers, f"{HOST}2")
    controllers.disconnect(first, 1)
    controllers.disconnect(first, 0)
    assert namespace.left == []
    controllers.disconnect(second, 0)
    assert namespace.left == [HOST]
    controllers.disconnect(other, 0)
    assert namespace.left == [HOST, f"{HOST}2"] and len(controllers) == 0


def test_bytes_in_flight_of_a_host_and_of_all(monkeypatch):
    monkeypatch.setattr(controllers_module, "ROOM_S", 0.0)
    controllers = controllers_of(Limits(in_flight_bytes=10, host_in_flight_bytes=6))
    third = (f"{HOST}3", "a")
    for owner, size in ((ONE, 5), (ONE, 1), (OTHER, 4)):
        controllers.acquire_bytes(owner, size)
    assert controllers.in_flight_bytes == 10
    for owner in (ONE, OTHER):
        assert refused(controllers.acquire_bytes, owner, 1)[0] == Code.INTERRUPTED
    controllers.acquire_bytes(third, 50)  # the first of a host, whatever its size
    controllers.release_bytes(third, 50)
    controllers.release_bytes(ONE, 5)
    with controllers.reserve_bytes(ONE, 5):
        assert controllers.in_flight_bytes == 10
        assert refused(controllers.acquire_bytes, ONE, 1)[0] == Code.INTERRUPTED
    controllers.release_bytes(OTHER, 4)
    assert refused(controllers.acquire_bytes, ONE, 6)[0] == Code.INTERRUPTED, "above its own limit"
    controllers.release_bytes(ONE, 1)
    assert (controllers.in_flight_bytes, len(controllers._in_flight)) == (0, 0)
    with pytest.raises(AssertionError):
        controllers.release_bytes(ONE, 1)


@pytest.mark.parametrize(
    ("at", "text", "valid"),
    [
        (256, b"n", True),
        (512, b"n" * MAX_NQN_BYTES, True),
        (256, b"", False),
        (512, b"n" * (MAX_NQN_BYTES + 1), False),
        (256, b"n" * 256, False),
        (512, b"nqn.\xff", False),
        (512, "nqn.\u00e4".encode(), True),
        (256, b"nqn\0\xff", True),
    ],
)
def test_names_in_connect_data(at, text, valid):
    raw = bytearray(ConnectData(ID, 0xFFEE, NQN, HOST).pack())
    assert len(raw) == 1024 and ConnectData.parse(raw) == ConnectData(ID, 0xFFEE, NQN, HOST)
    assert (raw[16:18], raw[256:].startswith(NQN.encode()), raw[512:].startswith(HOST.encode())) == (
        b"\xee\xff",
        True,
        True,
    )
    raw[at : at + 256] = text.ljust(256, b"\0")
    if valid:
        parsed = ConnectData.parse(raw)
        assert (parsed.subnqn if at == 256 else parsed.hostnqn) == text.partition(b"\0")[0].decode()
    else:
        assert refused(ConnectData.parse, raw) == (Code.CONNECT_PARAMETERS, 0x10000 | at)
