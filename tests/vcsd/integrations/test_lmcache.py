"""The storage plug-in through LMCache's interface, over served drives.

partner of: vcsd/integrations/lmcache.py
"""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.served import kill, serving, until

SHAPE = (2, 2, 8, 4, 16)  # layers, keys and values, tokens, heads, values
FORM = torch.Size((2, 2, 8, 64))


class Plugin:
    def __init__(self, dst_device="cpu", config=None, metadata=None, local_cpu_backend=None, loop=None):
        self.local_cpu_backend = local_cpu_backend


@pytest.fixture
def lmcache(monkeypatch):
    """The module of the plug-in, with LMCache's types."""
    yield from plugged_in(monkeypatch)


def plugged_in(monkeypatch):
    types = {"MemoryFormat": SimpleNamespace(KV_2LTD="2LTD"), "StoragePluginInterface": Plugin}
    base = "lmcache.v1"
    places = "memory_management", "storage_backend", "storage_backend.abstract_backend"
    for name in ("lmcache", base, *(f"{base}.{place}" for place in places)):
        module = ModuleType(name)
        module.__dict__.update(types)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "vcsd.integrations.lmcache", raising=False)
    yield import_module("vcsd.integrations.lmcache")
    sys.modules.pop("vcsd.integrations.lmcache", None)


class Key:
    def __init__(self, name):
        self.to_string = lambda: name


class Chunk:
    """What LMCache keeps a chunk in."""

    def __init__(self, form, dtype, kind="2LTD", seed=None):
        draw = torch.Generator().manual_seed(seed or 0)
        self.tensor = torch.randn(form, generator=draw).to(dtype) if seed else torch.zeros(form, dtype=dtype)
        self.get_memory_format, self.get_shape = lambda: kind, lambda: self.tensor.shape


def backend(lmcache, names, dtype=torch.bfloat16, shape=SHAPE, mla=False, room=True, model="m", **extra):
    metadata = SimpleNamespace(model_name=model, world_size=1, worker_id=0, kv_dtype=dtype, kv_shape=shape, use_mla=mla)
    memory = SimpleNamespace(allocate=lambda form, dtype, kind: Chunk(form, dtype, kind) if room else None)
    config = SimpleNamespace(extra_config={"vcsd": {"drives": names, "identity": "m"} | extra})
    return lmcache.VcsdBackend(config, metadata, memory, dst_device="cpu", loop=None)


@pytest.fixture
def names(tmp_path):
    return [f"{tmp_path.name}-{number}" for number in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_survive_restarts_unchanged(lmcache, tmp_path, names, dtype):
    keys, chunks = [Key("a"), Key("b")], [Chunk(FORM, dtype, seed=1), Chunk(FORM, dtype, seed=2)]
    with serving(tmp_path, *names, flash=tmp_path):
        one = backend(lmcache, names, dtype)
        assert not one.contains(keys[0]) and not one.exists_in_put_tasks(keys[0])
        one.batched_submit_put_task(keys, chunks)
        part, other = Chunk((2, 2, 5, 64), dtype, seed=3), Chunk(FORM, dtype, kind="LAYERS", seed=3)
        one.batched_submit_put_task([Key("part"), Key("other")], [part, other])
        one.close()
    with serving(tmp_path, *names, flash=tmp_path):
        one = backend(lmcache, names, dtype)
        assert [one.contains(key) for key in (*keys, Key("part"), Key("other"))] == [True, True, False, False]
        result = one.batched_get_blocking([*keys, Key("part")])
        assert result[2] is None and one.get_allocator_backend() is one.local_cpu_backend
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(result[:2], chunks, strict=True))
        one.touch_cache()
        assert one.remove(keys[0]) and not one.remove(keys[0]) and not one.contains(keys[0])
        assert one.get_blocking(keys[0]) is None and one.get_blocking(keys[1]) is not None
        kill(names[0])
        assert one.get_blocking(keys[1]) is None and not one.contains(keys[1])
        until(lambda: one.contains(keys[1]))
        assert torch.equal(one.get_blocking(keys[1]).tensor, chunks[1].tensor)
        one.close()


def test_pinned_chunks_stay(lmcache, tmp_path, names):
    keys = [Key(str(n)) for n in range(4)]
    with serving(tmp_path, *names):
        one = backend(lmcache, names, max_blocks=2, room=False)
        one.batched_submit_put_task(keys[:1], [Chunk(FORM, torch.bfloat16, seed=1)])
        until(lambda: one.contains(keys[0], pin=True))
        assert one.get_blocking(keys[0]) is None, "LMCache's memory has no room"
        for seed, key in enumerate(keys[1:], 2):
            one.batched_submit_put_task([key], [Chunk(FORM, torch.bfloat16, seed=seed)])
            until(lambda key=key: one.contains(key))
        assert [one.contains(each) for each in keys] == [True, False, False, True]
        assert not one.remove(keys[0]) and one.unpin(keys[0]) and one.remove(keys[0])
        one.close()


def test_unsupported_lmcache_setup_is_one_line_error(lmcache):
    with pytest.raises(ValueError, match="no keys and values per token"):
        backend(lmcache, ["a"], shape=(2, 1, 8, 1, 576), mla=True)
    with pytest.raises(ValueError, match="drives"):
        backend(lmcache, [])
