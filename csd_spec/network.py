"""Network models between a host and its drives."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from csd_spec.checked import frozen_value
from csd_spec.drive import Rate


@frozen_value
class Network:
    """The port through which a host reaches all of its drives.

    Attributes:
        name: Name.
        bytes_per_s: Payload rate of commands and completions in each direction, bytes/s.
        message_ns: Additional latency per message, ns: protocol stacks, network cards and a switch.
    """

    name: str
    bytes_per_s: Rate
    message_ns: Annotated[int, Field(ge=0, le=10_000_000)]

    def transfer_ns(self, nbytes: int) -> int:
        """Time for which `nbytes` of payload occupy the port, ns."""
        return -(-nbytes * 1_000_000_000 // self.bytes_per_s)


TCP_PAYLOAD = 1448 / 1538
"""Ethernet with an MTU of 1500: TCP segments of 1448 bytes with timestamps, in 1538 bytes with preamble and gap."""

RDMA_PAYLOAD = 4096 / 4178
"""RoCE v2 with a path MTU of 4096: headers, checksums, preamble and gap are 82 bytes."""

TCP_MESSAGE_NS, RDMA_MESSAGE_NS = 12_000, 2_500
"""Assumed: kernel TCP or RDMA on both sides, one switch, no load."""


def _networks() -> dict[str, Network]:
    networks = {}
    for gbits in (25, 100, 400):
        for suffix, share, message_ns in (("", TCP_PAYLOAD, TCP_MESSAGE_NS), ("-rdma", RDMA_PAYLOAD, RDMA_MESSAGE_NS)):
            name = f"{gbits}gbe{suffix}"
            rate = round(gbits * 1e9 / 8 * share)
            networks[name] = Network(name=name, bytes_per_s=rate, message_ns=message_ns)
    return networks


NETWORKS = _networks()


def network_named(name: str, option: str = "network") -> Network:
    """Return the network with a name; raises ValueError, which names the option, if it is unknown."""
    if name not in NETWORKS:
        raise ValueError(f"{option} = {name!r}: must be one of {', '.join(NETWORKS)}")
    return NETWORKS[name]
