"""Networks between a host and its drives."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from csd_spec.checked import value
from csd_spec.drive import Rate


@value
class Network:
    """A port of a host, by which it reaches all of its drives.

    Attributes:
        name: Its name.
        bytes_per_s: Payload of commands and completions that crosses the port, in each direction.
        message_ns: From a sender to a receiver in addition to that: protocol stacks, network cards and a switch.
    """

    name: str
    bytes_per_s: Rate
    message_ns: Annotated[int, Field(ge=0, le=10_000_000)]

    def transfer_ns(self, nbytes: int) -> int:
        """Time for which `nbytes` of payload occupy the port."""
        return -(-nbytes * 1_000_000_000 // self.bytes_per_s)


TCP_PAYLOAD = 1448 / 1538
"""Ethernet with an MTU of 1500: TCP segments of 1448 bytes with time stamps, in 1538 bytes with preamble and gap."""

RDMA_PAYLOAD = 4096 / 4178
"""RoCE v2 with a path MTU of 4096: headers, checksums, preamble and gap are 82 bytes."""

TCP_MESSAGE_NS, RDMA_MESSAGE_NS = 12_000, 2_500
"""Assumed: kernel TCP on both sides, and RDMA on both sides, with one switch and no load."""


def _networks() -> dict[str, Network]:
    found = {}
    for gbits in (25, 100, 400):
        for suffix, share, message_ns in (("", TCP_PAYLOAD, TCP_MESSAGE_NS), ("-rdma", RDMA_PAYLOAD, RDMA_MESSAGE_NS)):
            name = f"{gbits}gbe{suffix}"
            rate = round(gbits * 1e9 / 8 * share)
            found[name] = Network(name=name, bytes_per_s=rate, message_ns=message_ns)
    return found


NETWORKS = _networks()


def network_named(name: str) -> Network:
    """The network of a name; raises ValueError if there is none."""
    if name not in NETWORKS:
        raise ValueError(f"network = {name!r}: must be one of {', '.join(NETWORKS)}")
    return NETWORKS[name]
