"""Real transformers models with their KV cache in tiers: the same bits as without, or refused with the reason.

partner of: host_driver/hf/cache.py, host_driver/device_memory.py, host_driver/hf/callers_cache.py, vcsd/report.py
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, StaticCache

import vcsd
from host_driver.device_memory import DeviceFrame
from host_driver.hf.cache import KvLayer
from kv_cache import Iteration, Policy
from kv_cache.policies import policy_of
from tests.host_driver.hf.test_adapters import MADE
from tests.host_driver.hf.test_cache import VOCABULARY, gpt2, llama, opt, qwen3, sharpen
from tests.host_driver.hf.test_device import gemma2, gpt_oss
from tests.host_driver.hf.test_latent import deepseek_v3
from tests.host_driver.hf.test_layers import gemma3, qwen3_next
from vcsd import TierLimits, UnsupportedModelError

POLICIES = ("reactive", "flexgen", "dual-blade", "split", "auto", "tutti")


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def layer_bytes(model, batch: int, tokens: int) -> int:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * batch * tokens * heads * size * next(model.parameters()).dtype.itemsize


def prompt(batch: int, tokens: int = 40) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (batch, tokens))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 3 * row] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, new: int = 12, **more):
    more = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True} | more
    out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **more)
    return out.sequences, torch.stack(out.logits) if out.logits is not None else None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("make", "batch"), [(opt, 1), (llama, 4), (qwen3, 2), (gpt2, 3)])
def test_tiers_equal_plain_model_for_any_policy_and_size(tmp_path, policy, make, batch) -> None:
    model = sharpen(make())
    inputs = prompt(batch)
    tokens, logits = generate(model, inputs)
    one = layer_bytes(model, batch, 52)
    for device, host, cache in ((one, 0, 0), (2 * one, one, one), (64 * one, 64 * one, 64 * one)):
        tiers = TierLimits(device, host, cache, tmp_path, max_tokens=52)
        with vcsd.attach(model, policy=policy, tiers=tiers) as run:
            result, theirs = generate(model, inputs)
            report = run.report()
        assert torch.equal(result, tokens) and torch.equal(theirs, logits)
        peaks = {tier["name"]: tier["peak_bytes"] for tier in report.tiers}
        assert 0 < peaks["device"] <= device and peaks.get("host", 0) <= host
    assert os.listdir(tmp_path) == []
    assert torch.equal(generate(model, inputs)[0], tokens)  # the model is as it was


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_dtype_keeps_its_bits(tmp_path, dtype) -> None:
    model, inputs = sharpen(llama()).to(dtype), prompt(2)
    tokens, logits = generate(model, inputs)
    with vcsd.attach(model, policy="dual-blade", tiers=TierLimits(page_cache=0, files=tmp_path, max_tokens=64)):
        result, theirs = generate(model, inputs)
    assert torch.equal(result, tokens) and torch.equal(theirs, logits)


@pytest.mark.parametrize("policy", POLICIES)
def test_beam_search_in_tiers_equals_plain(tmp_path, policy) -> None:
    model, inputs = sharpen(llama()), prompt(2)
    tokens, _ = generate(model, inputs, num_beams=3)
    tiers = TierLimits(layer_bytes(model, 6, 52), 0, layer_bytes(model, 6, 52), tmp_path, 52)
    with vcsd.attach(model, policy=policy, tiers=tiers):
        assert torch.equal(generate(model, inputs, num_beams=3)[0], tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_crop_turns_and_assisted_generation(tmp_path, policy) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    tokens, _ = generate(model, inputs, 20, prompt_lookup_num_tokens=3)
    tiers = TierLimits(layer_bytes(model, 1, 90), 0, layer_bytes(model, 1, 90), tmp_path, 90)
    ids = inputs["input_ids"]
    with vcsd.attach(model, policy=policy, tiers=tiers):
        assert torch.equal(generate(model, inputs, 20, prompt_lookup_num_tokens=3)[0], tokens)
        cache = DynamicCache()
        model(input_ids=ids, cache=cache)
        cache.crop(-10)
        elsewhere = model(input_ids=ids[:, 5:20], cache=cache).logits
        one = model(input_ids=ids[:, :1], cache=cache).logits
    cache = DynamicCache()
    model(input_ids=ids, cache=cache)
    cache.crop(-10)
    assert torch.equal(model(input_ids=ids[:, 5:20], cache=cache).logits, elsewhere)
    assert torch.equal(model(input_ids=ids[:, :1], cache=cache).logits, one)


@pytest.mark.parametrize("make", [gpt_oss, gemma2, gemma3, qwen3_next, MADE["bloom, 6 heads"], MADE["falcon, 2 of 6"]])
@pytest.mark.parametrize("beams", [1, 3])
def test_models_with_logit_terms_work_in_tiers(tmp_path, make, beams) -> None:
    """Caps, sinks, slopes; windows and linear layers stay with the model, however far it is beyond a window."""
    model, inputs = sharpen(make()), prompt(2)
    tokens, logits = generate(model, inputs, 40, num_beams=beams)
    tiers = TierLimits(page_cache=1 << 16, files=tmp_path, max_tokens=80)
    with vcsd.attach(model, policy="dual-blade", tiers=tiers) as run:
        result, theirs = generate(model, inputs, 40, num_beams=beams)
        report = run.report()
    assert torch.equal(result, tokens) and torch.equal(theirs, logits)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 2
    assert report.layers == {kind: [n for n, layer_kind in enumerate(kinds) if layer_kind == kind] for kind in kinds}
    assert (" of 2 of 4 layers in tiers" in str(report)) == (report.layers.keys() >= {"sliding_attention"})
    assert report.iterations == 40 and any(route["bytes"] for route in report.routes)


@pytest.mark.parametrize("make", [gemma2, gemma3])
def test_windows_of_a_cache_of_fixed_size(tmp_path, make) -> None:
    model, inputs = sharpen(make()), prompt(2)
    tokens, logits = generate(model, inputs, 20, cache_implementation="static")
    with vcsd.attach(model, policy="split", tiers=TierLimits(files=tmp_path, max_tokens=80)):
        result, theirs = generate(model, inputs, 20, cache_implementation="static")
    # our cache has no empty slots at its end
    assert torch.equal(result, tokens) and (theirs - logits).abs().max() < 1e-4


def test_keys_and_values_may_differ_in_channels(tmp_path) -> None:
    """The cache of latent attention: 512 channels and 64."""
    model, inputs = sharpen(deepseek_v3()), prompt(2)
    tokens, logits = generate(model, inputs)
    with vcsd.attach(model, policy="reactive", tiers=TierLimits(1 << 21, 0, files=tmp_path, max_tokens=52)) as run:
        result, theirs = generate(model, inputs)
        peak = run.report().tiers[0]["peak_bytes"]
    assert torch.equal(result, tokens) and torch.equal(theirs, logits)
    assert peak >= 2 * 51 * (512 + 64) * 4


def test_cache_after_failed_batch_selection_is_refused(tmp_path) -> None:
    model = sharpen(gemma3())
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path)):
        cache = model(torch.randint(3, 97, (2, 20)), use_cache=True).cache
        with pytest.raises(UnsupportedModelError, match="do not drop single sequences"):
            cache.batch_select_indices(torch.tensor([1]))
        with pytest.raises(UnsupportedModelError, match="start a new cache"):
            model(torch.tensor([[5], [6]]), cache=cache)


def test_caches_share_tiers_and_release_memory(tmp_path) -> None:
    model, ids = sharpen(llama()), prompt(1)["input_ids"]
    alone = [model(input_ids=part, cache=DynamicCache()).logits for part in (ids, ids[:, :9])]
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path)) as run:
        one, other = DynamicCache(), DynamicCache()
        assert torch.equal(model(input_ids=ids, cache=one).logits, alone[0])
        assert torch.equal(model(input_ids=ids[:, :9], cache=other).logits, alone[1])
        run.kv.real.settle()
        held = run.kv.runner.table.used["page-cache"]
        del other
        gc.collect()
        assert 0 < run.kv.runner.table.used["page-cache"] < held
        del one
        gc.collect()
        assert run.kv.runner.table.used["page-cache"] == 0 and not run.kv.real.frames


def test_unsupported_call_gives_reason(tmp_path) -> None:
    model, ids = llama().eval(), prompt(2)["input_ids"]
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path, max_tokens=44)):
        cache = DynamicCache()
        model(input_ids=ids, cache=cache)
        with pytest.raises(UnsupportedModelError, match="tiers do not copy sequences yet"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(UnsupportedModelError, match="tiers do not drop single sequences"):
            cache.batch_select_indices(torch.tensor([0]))
        with pytest.raises(
            UnsupportedModelError,
            match=r"holds keys and values of 2 x 2 x 16 and 16 of torch.float32 .* and is given 1 x 2",
        ):
            model(input_ids=ids[:1, :1], cache=cache)
        with pytest.raises(UnsupportedModelError, match="has failed half way"):
            model(input_ids=ids[:, :1], cache=cache)
        with pytest.raises(ValueError, match="45 tokens: must be at most max_tokens = 44"):
            model(input_ids=torch.cat([ids, ids[:, :5]], 1))
        with pytest.raises(UnsupportedModelError, match="a KV cache in tiers has no gradients"):
            model.train()(input_ids=ids)
        model.eval()
        filled = DynamicCache()
    model(input_ids=ids, cache=filled)
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path)):
        with pytest.raises(UnsupportedModelError, match=r"was filled outside of vcsd\.attach cannot move into tiers"):
            model(input_ids=ids[:, :1], cache=filled)
        static = StaticCache(config=model.config, max_cache_len=64)
        assert model(input_ids=ids, cache=static).logits.shape == (2, 40, VOCABULARY)
    with pytest.raises(UnsupportedModelError, match="in tiers: pass the cache to the model"):
        model(input_ids=ids[:, :1], cache=static)


def test_attach_policy_by_file_and_object(tmp_path) -> None:
    """A user's policy by FILE:NAME, as an object and as a function."""
    (tmp_path / "mine.py").write_text(
        "from kv_cache import HOST\n"
        "from kv_cache import Policy\n"
        "class Mine(Policy):\n"
        "    def layers(self, it):\n"
        "        for layer in it.layers:\n"
        "            for block in it.blocks(layer): it.copy(block, 'device')\n"
        "            it.attend(layer)\n"
        "            for block in it.blocks(layer): it.move(block, HOST)\n"
        "POLICIES = {'mine': Mine}\n"
    )
    name = f"{tmp_path / 'mine.py'}:mine"
    policy_object = policy_of(name)
    model, ids = sharpen(llama()), torch.randint(3, VOCABULARY, (2, 20))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    for policy in (name, policy_object, type(policy_object)):
        with vcsd.attach(model, policy=policy, tiers=TierLimits(files=tmp_path)) as run:
            assert torch.equal(model.generate(ids, **options), wanted)
            assert run.kv.real.moved["device>host"] and run.kv.real.moved["host>device"]


def test_device_too_small_for_a_layer_is_refused(tmp_path) -> None:
    model = llama().eval()
    tiers = TierLimits(1000, files=tmp_path)
    with (
        vcsd.attach(model, policy="flexgen", tiers=tiers),
        pytest.raises(ValueError, match="keys and values of one layer"),
    ):
        model(**prompt(1))


class Raises(Policy):
    def layers(self, it: Iteration) -> None:
        it.attend(0)
        raise KeyError("mine")


class Forbidden(Policy):
    def layers(self, it: Iteration) -> None:
        for layer in it.layers:
            it.attend(layer)
            it.drop(it.blocks(layer)[0], "device")


class Lazy(Policy):
    def layers(self, it: Iteration) -> None:
        it.attend(0)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Raises, "policy Raises: KeyError: 'mine'"),
        (Forbidden, "device has the last whole copy of it, which cannot be dropped"),
        (Lazy, "the policy ended its iteration before layer 1"),
    ],
)
def test_wrong_policy_one_error_model_continues(tmp_path, policy, reason) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    expected = model(**inputs).logits
    with (
        vcsd.attach(model, policy=policy, tiers=TierLimits(files=tmp_path)),
        pytest.raises(ValueError, match=reason),
    ):
        model(**inputs)
    assert torch.equal(model(**inputs).logits, expected)


def test_failing_disk_is_one_error_other_caches_continue(tmp_path, monkeypatch) -> None:
    from kv_cache.transfer.frames import CachedFrame

    model, inputs = sharpen(llama()), prompt(1)
    expected = model(**inputs).logits
    store, fails = CachedFrame.store, [True]

    def full(self, at, data):
        if fails:
            fails.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)
        store(self, at, data)

    monkeypatch.setattr(CachedFrame, "store", full)
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path)):
        cache = DynamicCache()
        with pytest.raises(OSError, match=str(tmp_path)) as raised:
            for _ in range(2):
                model(**inputs, cache=cache)
        assert raised.value.errno == errno.ENOSPC
        assert torch.equal(model(**inputs).logits, expected)


HELD = """
import os, signal, sys, torch, resource
from pathlib import Path
from types import SimpleNamespace
from transformers import LlamaConfig, LlamaForCausalLM
import vcsd

config = LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=64, num_hidden_layers=16, num_attention_heads=4,
                     num_key_value_heads=4, max_position_embeddings=4096)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
layer = 2 * 512 * 4 * 2048
where, kill = Path(sys.argv[1]), sys.argv[2] == "kill"
with torch.inference_mode(), vcsd.attach(
    model, policy="dual-blade", tiers=vcsd.TierLimits(2 * layer, 0, 4 * layer, where, 2048)
):
    ids = torch.randint(0, 64, (1, 512))
    out = model(input_ids=ids)
    def anonymous():
        fields = dict(line.split(":") for line in open("/proc/self/status"))
        return int(fields["RssAnon"].split()[0]) << 10
    before, most = anonymous(), 0
    while out.cache.get_seq_length() < 2000:
        out = model(input_ids=ids[:, :62], cache=out.cache)
        most = max(most, anonymous())
    print(16 * layer, 2 * layer, most - before, flush=True)
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_process_keeps_memory_limit_and_leaves_no_files(tmp_path: Path, end: str) -> None:
    done = subprocess.run([sys.executable, "-c", HELD, str(tmp_path), end], capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    every, may, grown = map(int, done.stdout.split())
    assert every == 134_217_728 and may == 16_777_216
    assert grown < may + (24 << 20)  # plus working memory of forwards
    assert os.listdir(tmp_path) == []


def test_forwards_of_several_threads_take_turns(tmp_path) -> None:
    model = sharpen(llama())
    inputs = [prompt(2), prompt(1)]
    expected = [generate(model, each)[0] for each in inputs]
    one = layer_bytes(model, 2, 52)
    with vcsd.attach(model, policy="dual-blade", tiers=TierLimits(2 * one, 0, one, tmp_path, 52)):

        def again(number: int) -> bool:
            with torch.inference_mode():
                return all(torch.equal(generate(model, inputs[number])[0], expected[number]) for _ in range(3))

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(again, range(2))) == [True, True]


def test_nested_forward_refused_next_continues(tmp_path) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    expected = model(**inputs).logits
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path, max_tokens=64)) as run:
        hook = model.model.layers[1].register_forward_hook(lambda *_: model(**inputs))
        with pytest.raises(ValueError, match="by this thread during its own forward"):
            model(**inputs)
        hook.remove()
        assert not run.kv.runner.table.entries  # the failed forward's blocks are free at once
        assert torch.equal(model(**inputs).logits, expected)


def test_cache_dropped_by_copy_thread_no_deadlock(tmp_path) -> None:
    """Whoever collects garbage frees: here while it copies, with the table at rest."""
    model, inputs = sharpen(llama()), prompt(1)
    with vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path, max_tokens=64)) as run:
        run.kv.real.settle()
        cache = DynamicCache()
        model(**inputs, cache=cache)
        requests = cache.csd_cache.requests
        dropped = threading.Thread(target=run.kv.access.drop, args=(requests,))
        dropped.start()
        dropped.join()
        assert run.kv.runner.table.entries  # not by that thread
        model(**inputs)
        assert not run.kv.requests() & set(requests)


def test_model_that_skips_its_first_attention_is_refused(tmp_path, monkeypatch) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    attention = model.model.layers[0].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (torch.zeros_like(hidden_states), None))
    with (
        vcsd.attach(model, policy="flexgen", tiers=TierLimits(files=tmp_path)),
        pytest.raises(ValueError, match="first attention in a forward is in layer 1: must be layer 0"),
    ):
        model(**inputs)


def test_failed_forward_releases_memory_at_once(tmp_path) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    one = layer_bytes(model, 1, 52)
    with vcsd.attach(model, policy="reactive", tiers=TierLimits(one, one, files=tmp_path, max_tokens=52)) as run:
        cache, one_more = DynamicCache(), inputs["input_ids"][:, :1]
        model(**inputs, cache=cache)
        hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(one_more, cache=cache)
        hook.remove()
        assert run.kv.runner.table.used == dict.fromkeys(run.kv.runner.table.used, 0)
        with pytest.raises(UnsupportedModelError, match="has failed half way"):
            cache.crop(-1)
        cache.reset()
        model(**inputs, cache=cache)


def test_an_interrupt_ends_a_forward_and_the_next_one_is_right(tmp_path) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    expected, _ = generate(model, inputs)

    def interrupts(*_):
        raise KeyboardInterrupt

    with vcsd.attach(model, policy="split", tiers=TierLimits(page_cache=0, files=tmp_path, max_tokens=52)):
        hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(interrupts)
        with pytest.raises(KeyboardInterrupt):
            model(**inputs)
        hook.remove()
        assert torch.equal(generate(model, inputs)[0], expected)


def test_a_cache_of_fixed_size_is_served(tmp_path) -> None:
    model, inputs = sharpen(llama()), prompt(2)
    tokens, _ = generate(model, inputs)
    with vcsd.attach(model, policy="split", tiers=TierLimits(files=tmp_path, max_tokens=52)):
        assert torch.equal(generate(model, inputs, cache_implementation="static")[0], tokens)


def test_attached_or_weightless_model_is_refused(tmp_path) -> None:
    model = llama().eval()
    with torch.device("meta"):
        nowhere = llama().eval()
    tiers = TierLimits(files=tmp_path)
    with vcsd.attach(model, policy="split", tiers=tiers):
        for options in ({"policy": "split", "tiers": tiers}, {}):
            with pytest.raises(UnsupportedModelError, match="attached already, with the KV cache in tiers"):
                vcsd.attach(model, **options).__enter__()
    with pytest.raises(UnsupportedModelError, match="meta device"):
        vcsd.attach(nowhere, policy="split", tiers=tiers).__enter__()


class Exits(Policy):
    def layers(self, it: Iteration) -> None:
        it.attend(0)
        sys.exit(3)


class LeavesAllOut(Policy):
    def layers(self, it: Iteration) -> None:
        it.attend(0, rows=())


class Sparse(Policy):
    def layers(self, it: Iteration) -> None:
        it.attend(0, method="sparf")


class Clumsy(Policy):
    def layers(self, it: Iteration) -> None:
        raise ValueError("not this way")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Exits, "policy Exits: RuntimeError: the policy ended with SystemExit"),
        (LeavesAllOut, "the policy attends to 0 of 1 requests of the batch"),
        (Sparse, "the policy attends with method 'sparf': in tiers only 'dense' works"),
        (Clumsy, "policy Clumsy: ValueError: not this way"),
    ],
)
def test_policy_with_invalid_action_is_named(tmp_path, policy, reason) -> None:
    model, inputs = sharpen(llama()), prompt(1)
    with (
        vcsd.attach(model, policy=policy, tiers=TierLimits(files=tmp_path)),
        pytest.raises(ValueError, match=reason),
    ):
        model(**inputs)


def test_device_frame_grows_and_keeps_content() -> None:
    frame = DeviceFrame(1 << 20, torch.device("cpu"))
    frame.store(0, memoryview(bytearray(b"abcd" * 1024)))
    held = frame.grow(1)
    assert held.untyped_storage().nbytes() == 1 << 16
    frame.store(70_000, memoryview(bytearray(b"x" * 5000)))
    out = bytearray(75_000)
    frame.load(0, memoryview(out))
    assert out[:4096] == b"abcd" * 1024 and out[70_000:] == b"x" * 5000
    assert frame.grow(1).untyped_storage().nbytes() == 2 << 16
    frame.trim(4000)
    assert frame.grow(4096).untyped_storage().nbytes() == 4096
    assert bytes(frame.grow(4096).numpy()) == b"abcd" * 1024
    assert len(frame.grow(1 << 20)) == 1 << 20


def test_auto_chooses_again_for_a_larger_batch(tmp_path) -> None:
    model = sharpen(llama())
    tiers = TierLimits(2 * layer_bytes(model, 8, 52), 4 * layer_bytes(model, 1, 52), 0, tmp_path, 52)
    with vcsd.attach(model, policy="auto", tiers=tiers) as run:
        for batch in (1, 8):
            inputs = prompt(batch)
            tokens = generate(model, inputs)[0]
            assert ("fits on the device" if batch == 1 else "exceeds each tier") in run.report().why
    assert torch.equal(generate(model, inputs)[0], tokens)


@pytest.mark.parametrize(("removed", "length"), [(0, 20), (-1, 19), (-20, 0), (-21, 0)])
def test_crop_of_a_layer_takes_negative_numbers(removed, length) -> None:
    cropped = list[tuple[str, int]]()
    cache = SimpleNamespace(check_whole=lambda: None, crop_layer=lambda *arguments: cropped.append(arguments))
    layer = SimpleNamespace(cache=cache, is_initialized=True, length=20, number=0)
    for positive in (1, 20):
        with pytest.raises(ValueError, match="crop"):
            KvLayer.crop(layer, positive)
    KvLayer.crop(layer, removed)
    assert layer.length == length
    assert cropped == ([(0, length)] if removed else [])
    KvLayer.crop(SimpleNamespace(cache=cache, is_initialized=False), -1)
