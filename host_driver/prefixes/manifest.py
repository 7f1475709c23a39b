"""Keys listed by a drive, and the manifests among them, which describe the model of a set of keys.

A manifest is JSON under its own key, stored like the values of any sequence, with the same durability as the keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from csd_link.splitting import max_bytes_of
from csd_spec import (
    LAYOUTS,
    Completion,
    Drive,
    DriveError,
    KvAppend,
    KvFree,
    KvGather,
    KvList,
    KvName,
    SeqCreate,
    Status,
)
from csd_spec.arrays import F16, key_list, keys_of
from csd_spec.model import FP16_BYTES
from host_driver.prefixes.cache_keys import KEY_BYTES, PREFIX_BYTES, PrefixNames, is_block, is_check, is_manifest

LISTED, LISTED_BYTES = 1024, 32  # maximum keys per command, and bytes of its answer per key
Place = tuple[int, int]  # handle, tokens


def list_keys(device: Drive) -> dict[bytes, Place]:
    """All keys of the tenant in a drive with handle and tokens; raises DriveError."""
    places: dict[bytes, Place] = {}
    count = min(LISTED, max_bytes_of(device) // LISTED_BYTES)
    assert count > 0, "the drive's limit is below an answer with one key"
    after = bytes(KEY_BYTES)
    while True:
        data: Any = check_completion(0, device.submit(KvList(keys_of([after]), count), 0).result()).data
        keys, handles, tokens = key_list(data[0]), data[1].tolist(), data[2].tolist()
        there = sum(token > 0 for token in tokens)
        places |= {keys[i]: (handles[i], tokens[i]) for i in range(there)}
        if there < count:
            return places
        after = keys[-1]


def blocks_of(listed: Mapping[bytes, Place]) -> dict[bytes, tuple[int, int, bytes]]:
    """Blocks that have both keys: handle, tokens, key of the content."""
    checks = {place: key for key, place in listed.items() if is_check(key)}
    return {key: (*place, checks[place]) for key, place in listed.items() if is_block(key) and place in checks}


def write_manifest(device: Drive, names: PrefixNames) -> None:
    """Store the manifest of `names` in a drive; raises DriveError and then leaves nothing stored."""
    d = names.shape.head_dim
    text = names.manifest.encode()
    tokens = -(-len(text) // (2 * d * FP16_BYTES))
    text = text.ljust(tokens * 2 * d * FP16_BYTES)
    k, v = np.frombuffer(text, np.float16).reshape(2, tokens, 1, d)
    handle = int(
        check_completion(0, device.submit(SeqCreate(1, 1, 1, d, tokens, LAYOUTS["opaque"].code), 0).result()).data[0][0]
    )
    try:
        check_completion(0, device.submit(KvAppend((handle,), 0, np.array([tokens]), k, v), 0).result())
        key = keys_of([names.manifest_key])
        check_completion(0, device.submit(KvName((handle,), np.array([tokens]), key), 0).result())
    except DriveError as error:
        if error.status is not Status.PATH_LOST:
            device.submit(KvFree((handle,)), 0).result()
        raise


def read_manifests(device: Drive) -> list[dict[str, Any]]:
    """Read the manifests of all models whose prefixes a tenant stores in a drive.

    Returns:
        A dictionary per model: the manifest's fields and the number of stored `blocks`; only `blocks` for keys without
        a readable manifest.
    """
    listed = list_keys(device)
    counts = Counter(key[:PREFIX_BYTES] for key in blocks_of(listed))
    manifests = {key[:PREFIX_BYTES]: _read(device, *listed[key]) for key in listed if is_manifest(key)}
    return [manifests.get(root, {}) | {"blocks": counts[root]} for root in sorted({*counts, *manifests})]


def _read(device: Drive, handle: int, tokens: int) -> dict[str, Any]:
    done = device.submit(KvGather((handle,), np.array([0]), np.array([tokens]), 0, 1), 0).result()
    try:
        rows: tuple[F16, F16] = check_completion(0, done).data  # type: ignore[assignment]
        values: dict[str, Any] = json.loads(b"".join(np.ascontiguousarray(part).tobytes() for part in rows))
        return values
    except (DriveError, ValueError):
        return {}


def check_completion(drive: int, done: Completion) -> Completion:
    """Return a successful completion; raises DriveError for any other."""
    if done.status is not Status.SUCCESS:
        raise DriveError(drive, done.status, done.reason)
    return done
