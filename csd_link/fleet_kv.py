"""Access to a fleet's keys in Ray's store: `python -m csd_link.fleet_kv ADDRESS [KEY TEXT]` prints or stores keys."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

NAMESPACE = b"vcsd-fleet"  # in Ray's key-value store
CONNECT_TIMEOUT_S = 3.0
_ALIVE = 0  # Ray's GcsNodeInfo.ALIVE


def main() -> None:
    """Print one JSON object; on failure, a one-line error."""
    address, *pair = sys.argv[1:]
    try:
        client = _client(address)
        if pair:
            client.internal_kv_put(pair[0].encode(), pair[1].encode(), True, NAMESPACE)
        print(json.dumps(dump(client)))
    except Exception as error:  # noqa: BLE001 - the parent reads one line
        print(str(error).partition(". ")[0].splitlines()[0], file=sys.stderr)
        sys.exit(1)


def _client(address: str) -> Any:
    """Return Ray's store client, which needs no Ray node on this machine, unless the address is `auto`."""
    if address == "auto":
        import ray

        ray.init("auto", log_to_driver=False, logging_level="error")
        address = ray.get_runtime_context().gcs_address
    else:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()  # Ray's own attempt takes 40 s to fail
    from ray import _raylet

    raylet: Any = _raylet  # a compiled module without types
    return raylet.GcsClient(address=address)


def dump(client: Any) -> dict[str, Any]:
    """Return the fleet's keys with their texts, and the identifiers of nodes that are alive."""
    keys = client.internal_kv_keys(b"", NAMESPACE)
    values = {key.decode(): client.internal_kv_get(key, NAMESPACE) for key in keys}
    nodes = [node.hex() for node, info in client.get_all_node_info().items() if info.state == _ALIVE]
    return {"keys": {key: value.decode() for key, value in values.items() if value is not None}, "nodes": nodes}


if __name__ == "__main__":
    main()
