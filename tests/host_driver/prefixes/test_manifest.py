"""Manifests: readable list of the models that a tenant's keys belong to."""

from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_spec import KvAppend, KvDrop, KvName, SeqCreate
from csd_spec.arrays import keys_of
from host_driver.prefixes import manifest
from host_driver.prefixes.identity import FileIdentity, ModelIdentity
from host_driver.prefixes.manifest import read_manifests
from host_driver.prefixes.store import PrefixStore
from tests.host_driver.prefixes.prompts import NAMES, holds, rows
from tests.host_driver.prefixes.test_store import Faulty

MODEL = ModelIdentity(name="llama", config='{"rope_theta": 10000.0}', files=(FileIdentity("a.bin", 5, 7, "ff"),))
TOKENS = list(range(40))


@pytest.fixture
def devices(small_drive):
    made = [InProcessDrive(small_drive) for _ in range(2)]
    yield made
    for device in made:
        device.close()


@pytest.mark.parametrize(("listed", "max_bytes"), [*((n, 1 << 20) for n in (1, 3, 4, 9, 10, 100)), (100, 127)])
def test_all_keys_are_listed_however_many_a_command_returns(devices, monkeypatch, listed, max_bytes):
    monkeypatch.setattr(manifest, "LISTED", listed)
    monkeypatch.setattr(devices[0], "max_bytes", max_bytes)
    counts = list[int]()
    (handle,) = devices[0].submit(SeqCreate(1, 1, 2, 16, 64), 0).result().data[0].tolist()
    k = np.ones((9, 2, 16), np.float16)
    devices[0].submit(KvAppend((handle,), 0, np.array([9]), k, k), 0).result()
    keys = [bytes([number]) * 16 for number in range(1, 10)]
    devices[0].submit(KvName((handle,), np.arange(1, 10), keys_of(keys)), 0).result()
    monkeypatch.setattr(devices[0], "submit", counting(devices[0].submit, counts))
    assert manifest.list_keys(devices[0]) == {key: (handle, count) for count, key in enumerate(keys, 1)}
    most = min(listed, max_bytes // 32)  # of 32 bytes each in an answer
    assert counts == [most] * (9 // most + 1)


def counting(submit, counts):
    """`submit` that notes how many keys are asked for."""

    def noting(command, submit_ns):
        counts.append(command.count)
        return submit(command, submit_ns)

    return noting


def test_manifest_of_every_model_is_stored_with_its_keys(devices):
    for names in (replace(NAMES, model=MODEL, salt="secret"), NAMES):
        store = PrefixStore(devices, names)
        assert store.store(names.keys(TOKENS), *rows(TOKENS)) == 5
        assert PrefixStore(devices, names).blocks == 5, "a host that begins finds the blocks, and leaves the manifest"
    for device in devices:
        manifests = {manifest["model"]["name"]: manifest for manifest in read_manifests(device)}
        assert sorted(manifests) == ["llama", "m"] and all(manifest["blocks"] == 5 for manifest in manifests.values())
        model = manifests["llama"]["model"]
        assert model["config"] == {"rope_theta": 10000.0} and model["check"] == "sampled"
        assert model["files"] == [{"name": "a.bin", "nbytes": 5, "mtime_ns": 7, "digest": "ff"}]
        assert (
            model["digest"] == MODEL.digest
            and manifests["llama"]["block_tokens"] == 8
            and "secret" not in str(manifests)
        )


def test_store_without_manifest_room_retries_later(devices):
    faulty = Faulty(devices[1])
    store = PrefixStore([devices[0], faulty], NAMES)
    faulty.refuses, faulty.times = KvAppend, 1
    assert store.store(NAMES.keys(TOKENS[:16]), *rows(TOKENS[:16])) == 2
    assert [manifest["blocks"] for manifest in read_manifests(devices[1])] == [2] and "model" not in read_manifests(
        devices[1]
    )[0]
    assert len(devices[1].firmware.ftl.sequences) == 1, "nothing is left of the manifest"
    store.store(NAMES.keys(TOKENS), *rows(TOKENS))
    assert read_manifests(devices[1])[0]["model"]["name"] == "m"


def test_manifest_that_one_drive_has_lost_is_written_again(devices):
    PrefixStore(devices, NAMES).store(NAMES.keys(TOKENS[:16]), *rows(TOKENS[:16]))
    devices[0].submit(KvDrop(keys_of([NAMES.manifest_key])), 0).result()
    store = PrefixStore(devices, NAMES)
    assert holds(store, TOKENS, 16) and "model" not in read_manifests(devices[0])[0]
    store.store(NAMES.keys(TOKENS), *rows(TOKENS))
    assert read_manifests(devices[0])[0]["model"]["name"] == "m"
