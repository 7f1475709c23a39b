"""Mooncake's store over the Key Value namespace of a drive; runs inside the guest VM, with Mooncake's own package.

Objects are put faster than the store's memory can hold them, so it writes them to the drive and evicts them; then they
are read back. Source of its settings: Mooncake's documentation, docs/source/deployment/ssd/nvme-kv.md.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

KV_NSID = 2
RPC_PORT = 50051
SIZES = {1 << 10: 400, 8 << 10: 60, 64 << 10: 20, 512 << 10: 3, 4 << 20: 1}  # object size in bytes: weight
SEGMENT_BYTES, BUFFER_BYTES = 32 << 20, 32 << 20  # of the store's memory
WAVE_BYTES = 8 << 20  # bytes put before the drive must hold them
BATCH = 32  # objects per call: without KVM a call takes 10 to 20 ms, even for 1 KiB
PATIENCE_S = 120.0  # for the drive to restart
OFFLOAD_S = 15.0  # without a new object on the drive: Mooncake does not retry failed offloads
LOG = Path("/tmp/mooncake.log")
_LOOK_S = 0.1


def use(nodes: Sequence[dict[int, Path]], environment: dict[str, str], libc: Any) -> dict[str, Any]:
    """Start Mooncake's master and a client whose disk is the drive; put, evict, remove and read objects.

    Args:
        nodes: Character devices of the namespaces of each drive, by NSID.
        given: Words of the kernel's command line: objects, seed.
        libc: Unused.
    """
    os.dup2(os.open(LOG, os.O_WRONLY | os.O_CREAT), 2)  # the console is slow
    node = nodes[0][KV_NSID]
    os.environ |= {
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "nvme_kv_storage_backend",
        "MOONCAKE_NVME_KV_DEVICE_PATH": str(node),
        "MOONCAKE_NVME_KV_NSID": str(KV_NSID),
        "MOONCAKE_NVME_KV_TRANSPORT": "ioctl",  # the wheel is built without the other transport
    }
    package = next(Path(folder) / "mooncake" for folder in sys.path if (Path(folder) / "mooncake").is_dir())
    try:
        with_master = started(package, Path("/tmp/offload"))
        return {"node": node.name} | with_master(
            lambda store: exercise(store, int(environment["objects"]), int(environment["seed"]))
        )
    except Exception as error:
        said = [line for line in LOG.read_text(errors="replace").splitlines() if line.startswith(("E", "W"))]
        raise OSError(f"{error}; Mooncake last said: {' | '.join(line[:200] for line in said[-3:])}") from error


def started(package: Path, folder: Path) -> Callable[[Callable[[Any], dict[str, Any]]], dict[str, Any]]:
    """Context that runs an action on a dedicated store: a master, and a client in this process.

    Args:
        package: Folder of Mooncake's package.
        folder: Folder of the client's files.
    """
    folder.mkdir(exist_ok=True)
    os.environ |= {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(2 * BUFFER_BYTES),
    }

    def run(action: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        options = f"--rpc_port={RPC_PORT}", "--enable_offload=true", "--default_kv_lease_ttl=200"
        master = subprocess.Popen([str(package / "mooncake_master"), *options], stdout=2, stderr=2)
        try:
            store = _connected(folder)
            try:
                return action(store)
            finally:
                store.close()
        finally:
            master.kill()
            master.wait()

    return run


def _connected(folder: Path) -> Any:
    from mooncake.store import MooncakeDistributedStore

    deadline = time.monotonic() + PATIENCE_S
    while True:
        store = MooncakeDistributedStore()
        options = {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
        local, master = "127.0.0.1", f"127.0.0.1:{RPC_PORT}"
        code = store.setup(local, "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", master, **options)
        if not code:
            return store
        if time.monotonic() > deadline:
            raise OSError(f"Mooncake's client failed to start: code {code}")
        time.sleep(_LOOK_S)


def exercise(store: Any, objects: int, seed: int) -> dict[str, Any]:
    """Put objects in waves; each wave must reach the drive before the next. Remove some, then read all others.

    Returns:
        Counts: objects (put), wrong (bytes differ), lost (stored on the drive but unreadable), removed, bytes (total
            size), put_again (failed offloads), evicted (on the drive only when read).
    """
    draw, stored = random.Random(seed), dict[str, bytes]()
    wave, waves_bytes, total, removed, number = dict[str, bytes](), 0, 0, 0, 0
    wrong = read = again = lost = evicted = 0
    began = time.monotonic()
    while number < objects:
        key, data = f"object-{seed}-{number}", draw.randbytes(draw.choices(list(SIZES), list(SIZES.values()))[0])
        stored[key] = hashlib.sha256(data).digest()
        wave[key] = data
        number, total, waves_bytes = number + 1, total + len(data), waves_bytes + len(data)
        if waves_bytes > WAVE_BYTES or number == objects:
            _put(store, wave)
            again += _await_on_drive(store, wave)
            chosen = draw.sample(sorted(stored), min(len(stored), len(wave) // 8))
            wrong += sum(value != stored[name] for name, value in _read(store, chosen))
            read += len(chosen)
            for name in draw.sample(sorted(wave), len(wave) // 16):
                removed += store.remove(name, True) == 0
                del stored[name]
            wave, waves_bytes = {}, 0
    wrote_s = time.monotonic() - began
    for keys in _batches(list(stored)):
        places = store.batch_get_replica_desc(keys)
        evicted += sum(not any(replica.is_memory_replica() for replica in places[key]) for key in keys)
        for key, value in _read(store, keys):
            lost += value is None
            wrong += value is not None and value != stored[key]
    return {
        "objects": number,
        "bytes": total,
        "wrong": wrong,
        "lost": lost,
        "removed": removed,
        "put_again": again,
        "evicted": evicted,
        "read_while_written": read,
        "write_s": wrote_s,
        "read_s": time.monotonic() - began - wrote_s,
    }


def _batches(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[at : at + BATCH]) for at in range(0, len(keys), BATCH)]


def _put(store: Any, objects: dict[str, bytes]) -> None:
    for keys in _batches(list(objects)):
        deadline = time.monotonic() + PATIENCE_S
        while code := store.put_batch(keys, [objects[key] for key in keys]):
            if time.monotonic() > deadline:
                raise OSError(f"put of {', '.join(keys)} failed: code {code}")
            time.sleep(_LOOK_S)


def _await_on_drive(store: Any, wave: dict[str, bytes]) -> int:
    """Wait until each object has a replica on the drive; put objects again if their offload failed.

    Returns:
        Number of objects that were put again.
    """
    deadline, next_try, again = time.monotonic() + PATIENCE_S, time.monotonic() + OFFLOAD_S, 0
    waiting = list(wave)
    while True:
        replicas, before = store.batch_get_replica_desc(waiting), len(waiting)
        waiting = [
            key for key in waiting if not any(replica.is_local_disk_replica() for replica in replicas.get(key, ()))
        ]
        if not waiting:
            return again
        if len(waiting) < before:
            deadline, next_try = time.monotonic() + PATIENCE_S, time.monotonic() + OFFLOAD_S
        if time.monotonic() > deadline:
            raise OSError(f"{len(waiting)} of {len(wave)} objects did not reach the drive in time")
        if time.monotonic() > next_try:
            next_try = time.monotonic() + OFFLOAD_S
            for key in waiting:
                store.remove(key, True)
            _put(store, {key: wave[key] for key in waiting})
            again += len(waiting)
        time.sleep(_LOOK_S)


def _read(store: Any, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    """Keys with the digests of their objects; None if an object is still unreadable after retries."""
    for batch in _batches(keys):
        for key, data in zip(batch, store.get_batch(batch), strict=True):
            deadline = time.monotonic() + PATIENCE_S
            while not data and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                data = store.get(key)
            yield key, hashlib.sha256(data).digest() if data else None
