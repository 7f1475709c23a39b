"""NVMe/TCP with TLS: the same commands, and peers without the right certificate are refused and change nothing."""

import random
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from csd_link.host_end import DriveLostError
from csd_link.nvmeof.commands import DISCOVERY_NQN, Sqe
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import ENTRIES, NvmeHost, discover
from csd_link.nvmeof.host_queue import HostQueue, StatusError
from csd_link.nvmeof.pdu import Digests
from csd_link.nvmeof.sequences import EncodedCommand, Op, SequenceNamespace, decode_attach
from csd_link.nvmeof.subsystem import DiscoveryRecord
from csd_link.nvmeof.target import Target
from csd_link.nvmeof.tls import Credentials, TlsError, words
from csd_spec import Flush, KvAppend, KvFree, Status
from tests.certificates import certificates
from tests.csd_link.nvmeof.test_sequences import IDENTITY, SMALL, Counting
from tests.nvmeof import HOST, NQN, MemoryBlocks, subsystem_of
from tests.served import until
from vcsd_eval.verify.faulty_proxy import FaultyProxy


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls") / "files", HOST)


class Served:
    """A target with sequences whose connections have TLS, if `tls` is given."""

    def __init__(self, tls, **limits):
        self.service, self.refused = Counting(), []
        sequences = SequenceNamespace(lambda host: self.service, IDENTITY, bytes(16))
        subsystem = subsystem_of(MemoryBlocks(), namespaces={3: sequences})
        subsystem.refuse_host, subsystem.needs_tls = self.refused.append, tls is not None
        self.target = Target(subsystem, "127.0.0.1", 0, replace(SMALL, **limits), tls)

    def __enter__(self):
        self.target.start()
        return self

    def __exit__(self, *_):
        until(lambda: not self.target.connections)
        assert (len(self.target.controllers), self.target.controllers.in_flight_bytes) == (0, 0)
        self.target.stop()

    def device(self, tls=None, port=None, **options):
        return NvmeDrive(lambda: Endpoint("127.0.0.1", port or self.target.port, NQN), tls=tls, **options)


@pytest.mark.parametrize("digests", [Digests(), Digests(True, True)])
def test_commands_of_any_size_are_executed_over_tls(files, digests):
    rows = np.arange(3 << 20, dtype=np.float16).reshape(-1, 1, 64)  # 6 MiB: by R2T
    append = KvAppend((1,), 0, np.array([len(rows)]), rows, rows[:, :, :0])
    with Served(files["drive"]) as served:
        assert served.target.controllers.subsystem.needs_tls
        device = served.device(files["host"], digests=digests)
        commands = [KvFree((9,)), append, Flush(), KvFree((3 << 20,)), append, Flush()] * 2
        futures = [device.submit(command, number) for number, command in enumerate(commands)]
        assert [future.result().data[0].size for future in futures] == [9, 0, 0, 3 << 20, 0, 0] * 2
        assert served.service.seen == list(range(len(commands)))
        threads = [threading.Thread(target=lambda: device.submit(KvFree((70_000,)), 0).result()) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(served.service.seen) == len(commands) + 8 and device.lost is None
        device.close()


@pytest.mark.parametrize("kind", ["cut", "drop", "double", "flip", "delay"])
def test_commands_are_executed_once_if_tls_records_are_damaged(files, kind):
    with Served(files["drive"], pdu_s=0.3) as served:
        proxy = FaultyProxy(served.target.port, random.Random(3), 400_000, (kind,))
        device = served.device(files["host"], proxy.port)
        proxy.is_active = True
        sizes = [10, 5000, 50_000, 0] * 20
        completions = [device.submit(KvFree((size,)), number).result() for number, size in enumerate(sizes)]
        assert [done.data[0].size for done in completions] == sizes
        assert served.service.seen == list(range(len(sizes))) and proxy.count > 0
        proxy.is_active = False
        device.close()
        proxy.close()


@pytest.mark.parametrize(
    ("drive", "host", "said", "counted"),
    [
        ("drive", None, "if it needs TLS, add ?tls=FILE", "does not use TLS"),
        ("drive", "no certificate", "add cert=FILE&key=FILE", "the host has no certificate"),
        ("drive", "stranger", "refuses this side's certificate", "unable to get local issuer certificate"),
        ("impostor", "host", "the peer's certificate is refused: ", "refuses this side's certificate"),
        ("elsewhere", "host", "IP address mismatch", "refuses this side's certificate"),
        (None, "host", "the peer does not use TLS", None),
    ],
)
def test_tls_peer_without_valid_certificate_is_refused(files, drive, host, said, counted):
    files = files | {None: None, "no certificate": Credentials(ca=files["drive"].ca)}
    with Served(files[drive]) as served:
        with pytest.raises(DriveLostError) as refused:
            served.device(files[host])
        assert said in str(refused.value) and "\n" not in str(refused.value)
        until(lambda: not served.target.connections)
        assert served.service.attached == 0 and not served.service.seen
        assert len(served.refused) == (counted is not None)
        assert all(counted in reason for reason in served.refused)
        if drive == "drive":
            served.device(files["host"]).close()


def test_drive_without_ca_accepts_host_without_certificate(files):
    with Served(replace(files["drive"], ca="")) as served:
        device = served.device(Credentials(ca=files["drive"].ca))
        assert device.submit(Flush(), 0).result().status is Status.SUCCESS
        device.close()
        target = served.target
        target.controllers.subsystem.discovers = (DiscoveryRecord(NQN, target.port),)
        credentials = Credentials(ca=files["drive"].ca)
        assert discover("127.0.0.1", target.port, tls=credentials)[0].nqn == NQN
        names = NvmeHost("127.0.0.1", target.port, DISCOVERY_NQN, tls=credentials)
        entry = names.log_page(0x70, 1024, 1024)
        assert (entry[3] & 3, entry[768]) == (1, 2), "a secure channel is required, by TLS 1.3"
        names.close()


def test_certificate_with_nqn_is_valid_for_that_host_only(files):
    with Served(files["drive"]) as served:
        port = served.target.port
        with pytest.raises(StatusError, match="0x184"):
            NvmeHost("127.0.0.1", port, NQN, f"{HOST}2", tls=files["named"])
        assert "it must connect by that name" in served.refused[0]
        host = NvmeHost("127.0.0.1", port, NQN, f"{HOST}2", tls=files["host"])
        other = HostQueue("127.0.0.1", port, tls=files["named"])
        with pytest.raises(StatusError, match="0x184"):  # another host's queue, with another certificate
            other.connect(ConnectData(bytes(16), 1, NQN, f"{HOST}2"), 2, ENTRIES)
        other.close()
        host.close()
        NvmeHost("127.0.0.1", port, NQN, HOST, tls=files["named"]).close()


def trickle(line):
    """A record that says it is 16 KiB long, a byte at a time."""
    for byte in b"\x16\x03\x01\x40\x00" + bytes(1 << 14):
        line.send(bytes([byte]))
        time.sleep(0.01)


@pytest.mark.parametrize("behave", [lambda line: None, trickle])
def test_a_peer_that_never_finishes_the_handshake_is_dropped(files, behave):
    with Served(files["drive"], handshake_s=0.5) as served:
        lines = [socket.create_connection(("127.0.0.1", served.target.port)) for _ in range(8)]
        stop = [threading.Thread(target=_until_dropped, args=(behave, line)) for line in lines]
        for thread in stop:
            thread.start()
        device = served.device(files["host"])
        for number in range(50):
            assert device.submit(KvFree((100,)), number).result().data[0].size == 100
        device.close()
        for thread in stop:
            thread.join()
        for line in lines:
            line.close()
        until(lambda: len(served.refused) == len(lines))


def _until_dropped(behave, line):
    try:
        behave(line)
        assert line.recv(1 << 10) in (b"", b"\x15")
    except ConnectionError:
        pass


def test_a_host_that_stops_reading_over_tls_is_dropped(files):
    with Served(files["drive"], pdu_s=0.3) as served:
        host = NvmeHost("127.0.0.1", served.target.port, NQN, tls=files["host"])
        session, _ = decode_attach(host.io.command(Sqe(Op.ATTACH, nsid=3, cdw10=1 << 16), (), 1 << 16).data)
        parts = EncodedCommand.of(KvFree((16 << 20,)), IDENTITY.layout.slot_bytes).parts(0, 0)
        number = {"cdw14": session & 0xFFFFFFFF, "cdw15": session >> 32}
        host.io.command(Sqe(Op.SUBMIT, nsid=3, cdw10=sum(map(len, parts)), **number), parts)
        host.io.begin(Sqe(Op.FETCH, nsid=3, cdw10=32 << 20, **number), (), 32 << 20)
        host.io.flush()
        until(lambda: served.target.connections == 1)
        assert host.get_property(0x1C), "the admin queue is served"
        host.close()


def test_invalid_credential_files_are_refused(files, tmp_path):
    drive, host = files["drive"], files["host"]
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", drive.key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for bad, said in (
        (Credentials(drive.cert, str(tmp_path / "none")), f"{tmp_path / 'none'}: No such file"),
        (Credentials(drive.cert, host.key), "key values mismatch"),
        (Credentials(drive.cert, locked), "unencrypted key in PEM"),
        (Credentials(__file__, drive.key), "in PEM"),
        (Credentials(drive.cert, drive.key, __file__), "in PEM"),
    ):
        for make in (bad.server, bad.client):
            with pytest.raises(TlsError) as refused:
                make()
            assert said in str(refused.value) and "\n" not in str(refused.value)


def test_tls_below_1_3_is_refused(files):
    with Served(files["drive"]) as served:
        client = ["openssl", "s_client", "-connect", f"127.0.0.1:{served.target.port}", "-tls1_2"]
        done = subprocess.run(client, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode and "protocol version" in done.stderr
        until(lambda: served.refused)


def test_each_refusal_has_words_of_its_own():
    """Also one of which OpenSSL knows no reason."""
    reasons = (
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "TLSV1_ALERT_UNKNOWN_CA",
        "WRONG_VERSION_NUMBER",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "HTTP_REQUEST",
    )
    said = list[str]()
    for reason in reasons:
        error = ssl.SSLError(1, f"[SSL: {reason}]")
        error.reason = reason
        said.append(words(error))
    assert len({*said}) == len(reasons)
    assert "cert=" in said[0] and "unknown ca" in said[1] and "http request" in said[4]
    unknown = ssl.SSLError(8, "the line is cut")
    unknown.reason = None
    assert "the line is cut" in words(unknown)
