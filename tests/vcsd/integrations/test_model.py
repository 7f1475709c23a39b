"""Changes of a model, through vLLM's connector and LMCache's plug-in: no hit on data that another model has stored.

partner of: vcsd/integrations/model.py
"""

import json
import os
import sys
from contextlib import closing
from importlib import import_module
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from tests.served import serving, until
from tests.vcsd.integrations import engine
from tests.vcsd.integrations.engine import Engine, Request
from tests.vcsd.integrations.test_lmcache import FORM, Chunk, Key, backend, plugged_in
from tests.vcsd.integrations.test_vllm import TOKENS, stored
from vcsd.integrations.model import Adapters, identity_of, locate
from vcsd.integrations.settings import Settings

HITS = 56  # tokens of TOKENS in whole blocks


class Model:
    """A model's folder, the form of its path, and vLLM's settings for it."""

    def __init__(self, folder):
        self.folder, self.path = folder / "model", str(folder / "model")
        self.overrides, self.fields, self.adapter = {}, {}, folder / "adapter"
        self.other = folder / "other"
        for each in (self.folder, self.other):
            each.mkdir()
            LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4).save_pretrained(each)
            for shard in (1, 2):
                (each / f"model-{shard}-of-2.safetensors").write_bytes(f"{each.name} {shard}".encode() * 1000)
            (each / "tokenizer.json").write_text("{}")
        self.adapter.mkdir()
        (self.adapter / "adapter_model.safetensors").write_bytes(b"one")
        self.link = folder / "link"
        self.link.symlink_to(self.folder)

    def told(self):
        """Fields of the engine's configuration, resolved as vLLM does it."""
        config = LlamaConfig.from_pretrained(self.path)
        config.update(self.overrides)
        return {"model": self.path, "hf_config": config, "hf_text_config": config} | self.fields

    def edit(self, **values):
        """Change config.json in place."""
        file = self.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))


def shard(model, number, content=b"fine-tuned"):
    return (model.folder / f"model-{number}-of-2.safetensors").write_bytes(content)


def keep_time(model):
    """Weights of the same size and with the same time of change, as a copy may have them."""
    file = model.folder / "model-1-of-2.safetensors"
    times, size = (file.stat().st_atime_ns, file.stat().st_mtime_ns), file.stat().st_size
    file.write_bytes(b"x" * size)
    os.utime(file, ns=times)


def point_to_other(model):
    model.link.unlink()
    model.link.symlink_to(model.other)


def by_link(model):
    model.path = str(model.link)


def by_relative_path(model):
    os.chdir(model.folder.parent)
    model.path = "./other/../model"


CHANGES = {
    "weights in place": lambda m: [shard(m, 1), shard(m, 2)],
    "weights of the same size and time": keep_time,
    "one shard": lambda m: shard(m, 2),
    "another shard": lambda m: (m.folder / "model-3-of-3.safetensors").write_bytes(b"more"),
    "rope_theta by override": lambda m: m.overrides.update(rope_theta=500_000.0, rope_parameters={"rope_theta": 5e5}),
    "sliding window by override": lambda m: m.overrides.update(sliding_window=1024),
    "config in place": lambda m: m.edit(rms_norm_eps=1e-3),
    "symlink to another model": point_to_other,
    "quantization": lambda m: m.fields.update(quantization="fp8"),
    "dtype": lambda m: m.fields.update(dtype=torch.float16),
    "kv cache dtype": lambda m: m.fields.update(cache_dtype="fp8"),
    "code in the folder": lambda m: (m.folder / "modeling.py").write_text("def forward(): ..."),
    "tokenizer in the folder": lambda m: (m.folder / "tokenizer.json").write_text('{"a": 1}'),
    "random weights": lambda m: m.fields.update(load_format="dummy"),
    "longer context with dynamic rope": lambda m: m.fields.update(max_model_len=131_072),
}
BEFORE = {
    "symlink to another model": by_link,
    "longer context with dynamic rope": lambda m: m.edit(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}
SAME = {
    "nothing": lambda m: None,
    "relative path": by_relative_path,
    "symlink to the same model": by_link,
    "longer context": lambda m: m.fields.update(max_model_len=131_072),
    "tokenizer elsewhere": lambda m: m.fields.update(tokenizer="another"),
    "name of the served model": lambda m: m.fields.update(served_model_name="x"),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Two served drives; tests differ by their seed."""
    folder = tmp_path_factory.mktemp("drives")
    made = [f"{folder.name}-{number}" for number in range(2)]
    with serving(folder, *made):
        yield made


SEEDS = count(1)


def vllm_door(monkeypatch, names):
    """A function that has an engine with a model prefill a prompt: which tokens are found."""
    engine.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "vcsd.integrations.vllm", raising=False)
    connector, seed = import_module("vcsd.integrations.vllm").VcsdConnector, next(SEEDS)

    def hits(model, weights):
        with closing(Engine(connector, names, model=model.told(), weights=weights, seed=seed)) as one:
            result = one.prefill(Request("r", TOKENS))
            stored(one)
            return result[0] // HITS

    return hits


def lmcache_door(monkeypatch, names):
    """The same for a chunk that LMCache keeps."""
    module, seed = next(plugged_in(monkeypatch)), next(SEEDS)

    def hits(model, weights):
        current(monkeypatch, engine.config([], model=model.told()))
        key, chunk = Key(f"{model.path}@1@0@ff@bfloat16"), Chunk(FORM, torch.bfloat16, seed=1 + weights)
        with closing(backend(module, names, model=model.path, identity="", seed=seed)) as one:
            result = one.get_blocking(key) if one.contains(key) else None
            assert result is None or torch.equal(result.tensor, chunk.tensor), "a wrong hit"
            one.batched_submit_put_task([key], [chunk])
            until(lambda: one.contains(key))
            return int(result is not None)

    return hits


def current(monkeypatch, config):
    """vLLM's configuration while a worker begins."""
    module = ModuleType("vllm.config")
    module.get_current_vllm_config_or_none = lambda: config
    monkeypatch.setitem(sys.modules, "vllm.config", module)


@pytest.mark.parametrize("door", [vllm_door, lmcache_door])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_finds_nothing(monkeypatch, tmp_path, names, door, change):
    model, hits = Model(tmp_path), door(monkeypatch, names)
    BEFORE.get(change, lambda m: None)(model)
    assert hits(model, weights=0) == 0
    CHANGES[change](model)
    assert hits(model, weights=1) == 0 and hits(model, weights=1) == 1


@pytest.mark.parametrize("door", [vllm_door, lmcache_door])
@pytest.mark.parametrize("change", SAME)
def test_same_model_finds_its_stored_prefixes(monkeypatch, tmp_path, names, door, change):
    monkeypatch.chdir(tmp_path)
    model, hits = Model(tmp_path), door(monkeypatch, names)
    assert hits(model, weights=0) == 0
    SAME[change](model)
    assert hits(model, weights=0) == 1


def test_adapter_replaced_in_place_finds_nothing(monkeypatch, tmp_path, names):
    engine.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "vcsd.integrations.vllm", raising=False)
    connector, seed = import_module("vcsd.integrations.vllm").VcsdConnector, next(SEEDS)
    model, requests = Model(tmp_path), count()

    def hits(one, number):
        lora = SimpleNamespace(lora_name="l", lora_int_id=number, lora_path=str(model.adapter))
        return one.prefill(Request(f"r{next(requests)}", TOKENS, lora_request=lora))

    with closing(Engine(connector, names, model=model.told(), seed=seed)) as one:
        assert one.prefill(Request("base", TOKENS)) == [0]
        stored(one)
        assert hits(one, 1) == [0]
        stored(one, blocks=14)
        assert hits(one, 1) == [HITS] and hits(one, 2) == [HITS], "the same adapter under another number"
        (model.adapter / "adapter_model.safetensors").write_bytes(b"two")
        assert hits(one, 1) == [0], "which of both was loaded is not known: nothing is stored either"
        assert hits(one, 3) == [0]
        stored(one, blocks=21)
        assert hits(one, 3) == [HITS] and hits(one, 1) == [0]


def test_lmcache_with_adapters_or_without_an_engine_is_refused(monkeypatch, tmp_path):
    module, model = next(plugged_in(monkeypatch)), Model(tmp_path)
    config = engine.config([], model=model.told())
    config.lora_config = object()
    current(monkeypatch, config)
    with pytest.raises(ValueError, match="do not tell LoRA adapters apart"):
        backend(module, ["a"])
    current(monkeypatch, None)
    with pytest.raises(ValueError, match='set "identity" to words'):
        backend(module, ["a"], identity="")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"load_format": "tensorizer"},
            'load_format = tensorizer: the location of its weights is unknown, set "identity"',
        ),
        ({"model": "nobody/has-this"}, "nobody/has-this: its files are not on this machine"),
        ({"model": "empty"}, "contains no weights"),
    ],
)
def test_model_that_cannot_be_identified_is_one_line(monkeypatch, tmp_path, fields, reason):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    config = engine.config([], model=Model(tmp_path).told() | fields)
    with pytest.raises(ValueError, match=reason):
        identity_of(config, Settings(drives=("a",)))
    words = [identity_of(config, Settings(drives=("a",), identity=each)).digest for each in ("v1", "v2")]
    assert words[0] != words[1]


def test_changing_scales_or_weights_are_refused(tmp_path):
    config = engine.config([], model=Model(tmp_path).told())
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ValueError, match="calculate_kv_scales: turn it off"):
        identity_of(config, Settings(drives=("a",)))
    config.cache_config.calculate_kv_scales, config.weight_transfer_config = False, object()
    with pytest.raises(ValueError, match="weights change while the engine runs"):
        identity_of(config, Settings(drives=("a",)))


def test_draft_model_changes_the_identity(tmp_path):
    config = engine.config([], model=Model(tmp_path).told())
    seen = [identity_of(config, Settings(drives=("a",)))]
    (tmp_path / "draft").mkdir()
    draft = Model(tmp_path / "draft")
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(**vars(config.model_config)))
    config.speculative_config.draft_model_config.model = draft.path
    seen.append(identity_of(config, Settings(drives=("a",))))
    shard(draft, 1)
    seen.append(identity_of(config, Settings(drives=("a",))))
    assert len({each.digest for each in seen}) == 3
    assert seen[2].files[-1].name.startswith("draft/") and seen[2].name == str(tmp_path / "model")


def test_hub_name_resolves_to_cached_folder(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0" * 40)
    assert locate("a/b", cache=str(tmp_path)) == snapshot


def test_request_with_unknown_adapter_is_ignored(caplog):
    adapters = Adapters("sampled")
    assert adapters.identity(SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="/nowhere/l")) is None
    assert "adapter l" in caplog.text
