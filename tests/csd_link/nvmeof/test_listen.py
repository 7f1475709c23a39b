"""Addresses at which drives listen."""

import json
from dataclasses import asdict

import pytest

from csd_link.nvmeof.listen import AllowedHost, Listen, nqn_of
from csd_link.nvmeof.subsystem import DiscoveryRecord
from csd_link.nvmeof.tls import Credentials


def test_drives_listen_on_consecutive_ports():
    at = Listen.parse("127.0.0.1:4420", ("a", "b"), is_remote_allowed=False)
    assert (at.port_of("a"), at.port_of("b")) == (4420, 4421)
    assert at.records == (DiscoveryRecord(nqn_of("a"), 4420), DiscoveryRecord(nqn_of("b"), 4421))
    assert Listen.from_dict(json.loads(json.dumps(asdict(at)))) == at
    assert Listen.parse("[::1]:1", ("a",), is_remote_allowed=False).host == "::1"
    free = Listen("127.0.0.1", 0, ("a",), (AllowedHost("nqn"), AllowedHost("nqn2", "bob")))
    assert (free.port_of("a"), free.records) == (0, ())
    assert Listen.from_dict(json.loads(json.dumps(asdict(free)))) == free
    assert [free.tenant_of(host) for host in ("nqn", "nqn2", "nqn3")] == ["", "bob", ""]


@pytest.mark.parametrize("text", ["", "4420", ":4420", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65535", "127.0.0.1:x"])
def test_invalid_listen_address_is_refused(text):
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        Listen.parse(text, ("a", "b"), is_remote_allowed=True)


def test_remote_listen_address_needs_option():
    for text in ("0.0.0.0:4420", "[::]:4420"):
        with pytest.raises(ValueError, match="--listen-remote"):
            Listen.parse(text, ("a",), is_remote_allowed=False)
        with pytest.raises(ValueError, match="add --hosts-file FILE"):
            Listen.parse(text, ("a",), is_remote_allowed=True)
        with pytest.raises(ValueError, match="or --tls-ca FILE"):
            Listen.parse(text, ("a",), is_remote_allowed=True, tls=Credentials("cert", "key"))
        secured = Listen.parse(text, ("a",), is_remote_allowed=True, tls=Credentials("cert", "key", "ca"))
        assert Listen.from_dict(json.loads(json.dumps(asdict(secured)))) == secured
        at = Listen.parse(text, ("a",), is_remote_allowed=True, hosts=(AllowedHost("nqn"),))
        assert (at.port, at.hosts) == (4420, (AllowedHost("nqn"),))
