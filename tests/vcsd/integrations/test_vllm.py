"""The connector through vLLM's interface, both sides of it, over served drives; vLLM itself: `./dev test --real`.

partner of: vcsd/integrations/vllm.py, vcsd/integrations/working.py, vcsd/integrations/settings.py,
vcsd/integrations/plan.py, vcsd/integrations/paged.py
"""

import random
import subprocess
import sys
from importlib import import_module
from importlib.metadata import packages_distributions
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from csd_link.host_end import DriveLostError
from tests.served import kill, serving, until
from tests.vcsd.integrations import engine
from tests.vcsd.integrations.engine import BLOCK, Engine, Request
from vcsd.integrations.paged import PagedCache

CONSTRAINTS = Path(__file__).parents[3] / "constraints-vllm.txt"
TOKENS = [random.Random(0).randrange(1000) for _ in range(60)]


@pytest.fixture
def vllm(monkeypatch):
    """The module of the connector, with vLLM's types."""
    engine.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "vcsd.integrations.vllm", raising=False)
    yield import_module("vcsd.integrations.vllm")
    sys.modules.pop("vcsd.integrations.vllm", None)


@pytest.fixture
def names(tmp_path):
    return [f"{tmp_path.name}-{number}" for number in range(2)]


def stored(engine, blocks=7):
    """Iterate until `blocks` blocks are in the drives of every worker, as the scheduler knows."""
    until(
        lambda: (
            engine.iterate() is not None and all(len(each) == blocks for each in engine.scheduler._scheduler._stored)
        )
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_prefix_found_by_next_request_and_after_restart(vllm, tmp_path, names, workers):
    with serving(tmp_path, *names, flash=tmp_path):
        first = Engine(vllm.VcsdConnector, names, workers)
        assert first.prefill(Request("a", TOKENS)) == [0]
        stored(first)
        other = [*TOKENS[:44], 1, *TOKENS[45:]]
        assert first.prefill(Request("b", TOKENS), Request("c", other)) == [56, 40]
        assert first.prefill(Request("d", TOKENS[:BLOCK])) == [0], "one token at least is left to compute"
        first.close()
    with serving(tmp_path, *names, flash=tmp_path):
        again = Engine(vllm.VcsdConnector, names, workers)
        assert again.prefill(*(Request(f"r{n}", [*TOKENS[:50], n]) for n in range(4))) == [48] * 4
        again.close()


def test_blocks_of_killed_drive_are_recomputed(vllm, tmp_path, names):
    with serving(tmp_path, *names, flash=tmp_path):
        one = Engine(vllm.VcsdConnector, names)
        one.prefill(Request("a", TOKENS))
        stored(one)
        kill(names[0])
        assert one.prefill(Request("b", TOKENS)) == [56] and one.recomputed == 56
        assert one.prefill(Request("c", TOKENS)) == [0]
        more = (f"d{n}" for n in count())  # of which some are dropped, until the drives are back
        until(lambda: one.prefill(Request(next(more), TOKENS)) == [56])
        counts = one.workers[0].connector.get_kv_connector_stats().data
        assert one.recomputed == 56 and counts["drives_lost"] == 1 and counts["loads_failed"] == 1
        one.close()


def test_prefixes_of_other_tenants_are_not_found(vllm, tmp_path, names):
    with serving(tmp_path, *names, tenants=("alice", "bob")):
        one = Engine(vllm.VcsdConnector, names, tenant="alice")
        one.prefill(Request("a", TOKENS))
        stored(one)
        lora = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="nowhere")
        for n, fields in enumerate([{"cache_salt": "x"}, {"lora_request": lora}, {"mm_features": [1]}]):
            assert one.prefill(Request(f"other{n}", TOKENS, **fields)) == [0]
        one.close()
        for extra in ({"tenant": "bob"}, {"tenant": "alice", "salt": "x"}, {"tenant": "alice", "seed": 1}):
            another = Engine(vllm.VcsdConnector, names, **extra)
            assert another.prefill(Request("a", TOKENS)) == [0]
            another.close()


def test_blocks_are_stored_after_admission_count(vllm, tmp_path, names):
    with serving(tmp_path, *names):
        one = Engine(vllm.VcsdConnector, names, admit_after=2, block_tokens=2 * BLOCK)
        assert one.prefill(Request("a", TOKENS)) == [0]
        assert "stores" not in (one.workers[0].connector.get_kv_connector_stats() or vllm.IntervalCounts()).data
        assert one.prefill(Request("b", TOKENS)) == [0]
        stored(one, blocks=3)
        assert one.prefill(Request("c", TOKENS)) == [48]
        one.close()


@pytest.mark.parametrize(("device", "hits"), [("cuda", [256, 256, 256, 288]), ("cpu", [0, 0, 256, 0])])
def test_blocks_are_found_by_engines_with_other_block_sizes(vllm, tmp_path, names, device, hits):
    """After a store in blocks of 64 tokens; backends for CPUs mix the tokens of a block."""
    prompt, result = [random.Random(1).randrange(1000) for _ in range(300)], []
    with serving(tmp_path, *names):
        for block, tokens in [(64, 290), (128, 300), (32, 300), (64, 300), (16, 290)]:
            one = Engine(vllm.VcsdConnector, names, block=block, device=device)
            result += one.prefill(Request("a", prompt[:tokens]))
            one.close()  # stores waiting blocks
    assert result == [0, *hits]


def test_second_engine_of_tenant_refused(vllm, tmp_path, names):
    with serving(tmp_path, *names, tenants=("alice", "bob")):
        one = Engine(vllm.VcsdConnector, names, tenant="alice")
        one.prefill(Request("a", TOKENS))
        stored(one)
        with pytest.raises(
            DriveLostError, match=r"window-alice is in use by process .*: end it, or use another tenant's window"
        ):
            Engine(vllm.VcsdConnector, names, tenant="alice")
        Engine(vllm.VcsdConnector, names, tenant="bob").close()
        assert one.prefill(Request("b", TOKENS)) == [56] and one.recomputed == 0
        one.close()


def test_workers_of_another_model_are_refused(vllm, tmp_path, names):
    with serving(tmp_path, *names):
        one = Engine(vllm.VcsdConnector, names)
        told = one.workers[0].connector.get_handshake_metadata()
        told.model = "another"
        with pytest.raises(ValueError, match=r'worker 0: its model differs from the .*"weights" to "content"'):
            one.scheduler.set_xfer_handshake_metadata({0: told})
        one.close()


def test_exchanged_worker_drives_return_nothing_wrong(vllm, tmp_path, names):
    with serving(tmp_path, *names, flash=tmp_path):
        one = Engine(vllm.VcsdConnector, names, workers=2)
        one.prefill(Request("a", TOKENS))
        stored(one)
        one.close()
        again = Engine(vllm.VcsdConnector, names[::-1], workers=2)
        assert again.prefill(Request("a", TOKENS)) == [56] and again.recomputed == 56
        again.close()


def test_sampled_tokens_stored_once_final(vllm, tmp_path, names):
    with serving(tmp_path, *names):
        one, request = Engine(vllm.VcsdConnector, names), Request("a", TOKENS[:20])
        one.scheduler.on_new_request(request)
        one.tables["a"] = [one.free.pop() for _ in range(5)]
        one.iterate([request])
        for token in TOKENS[20:25]:
            request.all_token_ids.append(token)
            one.iterate([request])
        stored(one, blocks=3)
        one.scheduler.request_finished(request, one.tables.pop("a"))
        assert one.prefill(Request("b", TOKENS)) == [24]
        one.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"policy": "fail"}, 'kv_load_failure_policy: must be "recompute"'),
        ({"drives": []}, "drives"),
        ({"turbo": 1}, "turbo"),
        ({"workers": 2, "drives": ["a"]}, "1 drives for 2 workers"),
        ({"block_tokens": 12}, "block_tokens = 12: must be a multiple or a divisor of the engine's 8"),
        ({"block_tokens": 4, "device": "cpu"}, "block_tokens = 4: must be a multiple of the engine's 8"),
    ],
)
def test_invalid_connector_config_is_one_line_error(vllm, change, reason):
    with pytest.raises(ValueError, match=reason):
        vllm.VcsdConnector(engine.config(**{"drives": ["a", "b"]} | change), 0, engine.cache_config())


def test_unsupported_model_is_one_line_error(vllm):
    with pytest.raises(ValueError, match="2 groups of layers"):
        vllm.VcsdConnector(engine.config(["a"]), 0, engine.cache_config(groups=2))
    with pytest.raises(ValueError, match="do not hold keys and values"):
        vllm.VcsdConnector(engine.config(["a"]), 0, engine.cache_config(content=0))


def test_counters_aggregate_and_reach_prometheus(vllm):
    counts = vllm.VcsdConnector.build_kv_connector_stats({"loads": 2}).aggregate(
        vllm.IntervalCounts({"loads": 1, "stores": 0})
    )
    assert counts.reduce() == {"loads": 3} and not counts.is_empty() and vllm.IntervalCounts().is_empty()
    made = {}

    def counter(name, documentation, labelnames):
        made[name] = SimpleNamespace(value=0)
        made[name].inc = lambda by: setattr(made[name], "value", made[name].value + by)
        made[name].labels = lambda engine: made[name] if engine == "7" else None
        return made[name]

    metrics = vllm.VcsdConnector.build_prom_metrics(None, {"counter": counter}, ["engine"], {0: ["7"]})
    metrics.observe({"loads": 3, "load_us": 5})
    assert made["vllm:vcsd_loads"].value == 3 and made["vllm:vcsd_load_us"].value == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_of_any_dtype_round_trip(dtype):
    draw = torch.Generator().manual_seed(0)
    layers = [torch.randint(0, 255, (12, 3, 4, 16), dtype=torch.uint8, generator=draw) for _ in range(2)]
    layers = [layer.repeat(1, 1, 1, dtype.itemsize).view(dtype) for layer in layers]
    cache = PagedCache(layers, blocks=6, block_tokens=8)  # two of the layers' own are one
    k, v = cache.read([4, 1])
    shape = cache.shape()
    assert k.shape == v.shape == (shape.layers, 16, shape.kv_heads, shape.head_dim)
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.view(torch.uint8)[8:10] = 0
        layer.view(torch.uint8)[2:4] = 0
    cache.write([4, 1], k, v)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(layers, before, strict=True))
    with pytest.raises(ValueError, match="12 blocks of 4 tokens: must be 6 blocks of 4"):
        PagedCache(layers, blocks=6, block_tokens=4)
    with pytest.raises(ValueError, match="2 shapes or dtypes"):
        PagedCache([layers[0], layers[1][:4]], blocks=6, block_tokens=8)


def test_connector_imports_only_packages_of_vllm():
    code = "import sys, vcsd.integrations.settings, vcsd.integrations.working; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    roots = {each.split(".")[0] for each in loaded}
    result = [name for root, names in packages_distributions().items() if root in roots for name in names]
    wanted = {name.lower().replace("_", "-") for name in result}
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in CONSTRAINTS.read_text().splitlines()}
    assert {"numpy", "torch"} < wanted and wanted - pinned - {"vcsd", "setuptools", "pip"} == set()
