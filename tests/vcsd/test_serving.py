"""Models of all formats of KV data in a server with several requests: tokens of each request as alone.

partner of: vcsd/serving.py, host_driver/kv_table.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM, PreTrainedModel

import vcsd
from csd_spec import Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from kv_cache import CSD, DEVICE, DIRECT, HOST, Iteration
from kv_cache.limits import TierLimits
from kv_cache.policies.in_storage import InTwoPlaces
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState
from kv_cache.transfer.policy_thread import PolicyThread
from tests.host_driver.hf.test_cache import VOCABULARY, llama, qwen3, sharpen
from tests.host_driver.hf.test_latent import deepseek_v2, deepseek_v3
from tests.host_driver.hf.test_layers import gemma3, mimo
from vcsd.config import ServingConfig
from vcsd.loading import CHECKPOINT, load
from vcsd.serving import serve

NEW, LONGEST = 14, 72
_FLASH = Geometry(
    channels=8, dies_per_channel=2, planes_per_die=1, blocks_per_plane=32, pages_per_block=64, page_bytes=4096
)
SMALL = replace(INSTCSD_ZYNQ7045_8CH, name="small", geometry=_FLASH, dram_bytes=64 << 20)  # 128 MiB of flash
TIERS = (DEVICE,), (CSD,), (HOST,), (DIRECT,)


class Moving(Policy):
    """Each layer of each request is in another tier in each iteration."""

    tiers = (CSD,)

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        def placed(number: int) -> tuple[tuple[str, ...], ...]:
            return tuple(TIERS[(number + layer + s.step) % len(TIERS)] for layer in range(s.cost.layers))

        return s.prefill() or s.output(s.sequences, [placed(sequence.number) for sequence in s.sequences])


def minicpm3() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 16}
    channels = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24, "max_position_embeddings": 512}
    return MiniCPM3ForCausalLM(MiniCPM3Config(**sizes, **heads, **channels))


def bf16(make: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    return lambda: make().to(torch.bfloat16)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, bf16": bf16(llama),
    "qwen3, bf16": bf16(qwen3),
    "gemma3, bf16": bf16(gemma3),
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "deepseek-v3, bf16": bf16(deepseek_v3),
    "minicpm3": minicpm3,
    "minicpm3, bf16": bf16(minicpm3),
    "mimo": mimo,
    "mimo, bf16": bf16(mimo),
}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.inference_mode():
        model: PreTrainedModel = sharpen(MODELS[name]())
        return model


def prompts(count: int = 6) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (4 + 9 * i,), generator=draw).tolist() for i in range(count)]


def setting(policy: object, folder: Path, drives: int = 2, **more: object) -> ServingConfig:
    tiers = TierLimits(device=1 << 20, host=1 << 20, files=folder)
    given = {"policy": policy, "tiers": tiers, "drives": drives, "max_batch_size": 6}
    if drives:
        given["spec"] = SMALL  # many of 2 TB would fill the address space
    return ServingConfig(**given | {"max_tokens": LONGEST} | more)  # type: ignore[arg-type]


def alone(model: PreTrainedModel, asked: ServingConfig) -> list[list[int]]:
    """Tokens of each request while no other is served."""
    with serve(model, asked, background=False) as server:
        return [server.submit(prompt, NEW).result() for prompt in prompts()]


def generated(model: PreTrainedModel) -> list[list[int]]:
    """Tokens of the model's own greedy `generate`, one request at a time."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts()]


def together(model: PreTrainedModel, asked: ServingConfig) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of each request with all others, and bytes by route."""
    with serve(model, asked, background=False) as server:
        streams = [server.submit(prompt, NEW) for prompt in prompts()]
        server.run()
        assert {stream.finish_reason for stream in streams} == {"length"}
        assert not server.kv.requests() and not (server.kv.drives and server.kv.drives.sequences)
        return [stream.tokens for stream in streams], dict(server.kv.real.moved)


@pytest.mark.parametrize("name", MODELS)
def test_serve_all_tiers_at_once_tokens_as_alone(tmp_path, name) -> None:
    """Every layer moves between device, host, direct and drives while six requests decode."""
    model = made(name)
    tokens, moved = together(model, setting(Moving(), tmp_path))
    assert tokens == alone(model, setting("in-storage", tmp_path))
    for other in (CSD, HOST, DIRECT):
        assert moved[f"{DEVICE}>{other}"] and moved[f"{other}>{DEVICE}"]


@pytest.mark.parametrize("name", ["llama, bf16", "deepseek-v2", "minicpm3", "mimo"])
@pytest.mark.parametrize("policy", ["ours", "in-storage", "in-two-places", "orbitflow"])
def test_serve_policies_with_drives_tokens_as_alone(tmp_path, name, policy) -> None:
    """A BF16 model computes a prompt in pieces a little differently, by its own attention too: it gets no pieces."""
    model, asked = made(name), setting(policy, tmp_path, prefill_chunk_tokens=0 if "bf16" in name else 5)
    assert together(model, asked)[0] == alone(model, asked)


@pytest.mark.parametrize(("name", "policy"), [*zip(MODELS, cycle(["orbitflow", "tierkv", "reactive"]), strict=False)])
def test_serve_without_drives_tokens_as_generate(tmp_path, name, policy) -> None:
    model = made(name)
    assert together(model, setting(policy, tmp_path, drives=0, time_slice_tokens=4))[0] == generated(model)


@pytest.mark.parametrize("name", ["llama, bf16", "mimo"])
def test_serve_rounded_storage_tokens_as_alone(tmp_path, name) -> None:
    """FP8: values are rounded when they are new, so it does not matter where they have been since."""
    model = made(name)
    wanted = alone(model, setting("in-storage", tmp_path, kv_dtype="fp8"))
    assert together(model, setting(Moving(), tmp_path, kv_dtype="fp8"))[0] == wanted


@pytest.mark.parametrize(
    ("name", "row_bytes", "dtype"),
    [
        ("llama, bf16", 2 * 2 * 16 * 2, torch.bfloat16),
        ("deepseek-v3", (512 + 64) * 2, torch.float16),
        ("mimo", 2 * (16 + 8) * 2, torch.float16),
    ],
)
def test_serve_format_same_bytes_at_every_tier(tmp_path, name, row_bytes, dtype) -> None:
    with serve(made(name), setting(Moving(), tmp_path), background=False) as server:
        assert server.kv.format.row_bytes == row_bytes
        assert server.kv.format.value_dtype is dtype and server.kv.drives.format is server.kv.format
        server.submit(prompts()[2], NEW)
        while not server.kv.real.moved["device>csd"]:
            assert server.step()
        table = server.kv.runner.table
        assert {entry.row_bytes for entry in table.entries.values()} == {row_bytes}


def test_serve_beyond_fp16_ends_request_with_reason(tmp_path) -> None:
    model = made("minicpm3")
    with torch.inference_mode():
        model.model.layers[1].self_attn.kv_a_layernorm.weight.fill_(1e6)
    with serve(model, setting(Moving(), tmp_path), background=False) as server:
        stream = server.submit([1, 2, 3], 4)
        server.run()
    assert stream.finish_reason == "failed"
    with pytest.raises(ValueError, match="beyond FP16's 65,504: use kv_dtype='bf16'"):
        stream.result()


def test_serve_layout_that_cannot_store_the_model_is_refused(tmp_path) -> None:
    int8 = setting("in-storage", tmp_path, layout="int8")
    with pytest.raises(ValueError, match="V is a part of K in this model"), serve(made("minicpm3"), int8):
        pass
    with pytest.raises(vcsd.UnsupportedModelError, match="serves already"), serve(model := made("mimo")), serve(model):
        pass


@pytest.mark.parametrize("method", ["dense", "sparf", "ours"])
def test_served_steps_take_the_simulated_time_of_attached_ones(method) -> None:
    """And the same commands: a request's prompt is stored in drives as it is computed, and freed as a whole."""
    model, tokenizer = load(CHECKPOINT)
    ids = tokenizer("Once upon a time there was a little dog. " * 3)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with vcsd.attach(model, drives=2, method=method) as csd:
        out = model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    serving = vcsd.ServingConfig(policy="in-storage", drives=2, method=method)
    with vcsd.serve(model, serving) as server:
        assert list(server.submit(ids, 6)) == out
        assert server.kv.drives
        driver = server.kv.drives.driver
    attached, served = csd.driver.traffic, driver.traffic
    assert [step.ns for step in served.steps] == [step.ns for step in attached.steps]
    assert (served.prefill_ns, served.link_bytes) == (attached.prefill_ns, attached.link_bytes)
    assert driver.now_ns == csd.driver.now_ns


class HalfInHost(Policy):
    def layers(self, it: Iteration) -> None:
        for layer in it.layers:
            for block in it.blocks(layer):
                it.copy(block, DEVICE)
            it.attend(layer)
            for block in it.blocks(layer) if layer % 2 else ():
                it.move(block, HOST)


@pytest.mark.parametrize("policy", ["flexgen", "dual-blade", "tutti", "preload", HalfInHost])  # `split` measures time
def test_served_bytes_of_each_route_are_those_of_an_attached_model(tmp_path, policy) -> None:
    model, new = made("llama, bf16"), 6
    ids = torch.randint(3, VOCABULARY, (1, 60))
    tiers = TierLimits(host=1 << 20, page_cache=1 << 20, files=tmp_path, max_tokens=60 + new)
    with torch.inference_mode(), vcsd.attach(model, policy=policy, tiers=tiers) as run:
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)[0, 60:].tolist()
        attached = {route["name"]: (route["copies"], route["bytes"]) for route in run.report().routes}
    serving = ServingConfig(policy=policy, tiers=replace(tiers, max_tokens=None), max_tokens=60 + new)
    with serve(model, serving) as server:
        assert list(server.submit(ids[0].tolist(), new)) == out
        server.kv.real.settle()
        moved = server.kv.real.moved
        served = {name: (counts.copies, moved[name]) for name, counts in server.kv.runner.traffic.items()}
    assert served == attached and sum(nbytes for _, nbytes in served.values()) > 0


class FirstTokens(InTwoPlaces):
    def first_tokens(self, s: SchedulerState) -> int:
        return 8


def test_policy_that_keeps_first_tokens_on_the_device_is_three_lines(tmp_path) -> None:
    model = made("qwen3, bf16")
    with serve(model, setting(FirstTokens(), tmp_path), background=False) as server:
        long = server.submit(prompts()[5], NEW)
        while len(long.tokens) < 4:
            server.step()
        token_bytes, used = len(server.kv.runner.layers) * server.kv.format.row_bytes, server.kv.runner.table.used
        assert used["device"] == 8 * token_bytes and used["csd"] == (len(prompts()[5]) + 3 - 8) * token_bytes
        server.run()
    with serve(model, setting("in-storage", tmp_path), background=False) as server:
        assert server.submit(prompts()[5], NEW).result() == long.tokens


def test_no_prompt_or_step_in_drives_needs_a_program(monkeypatch) -> None:
    """Whatever else is served, in whole prompts and in chunks; tokens are those of each request alone."""
    model, asked, programs = made("qwen3, bf16"), prompts(3), []
    start = PolicyThread.start
    monkeypatch.setattr(PolicyThread, "start", lambda thread, run: programs.append(start(thread, run)))
    answers = []
    for chunk in (0, 5):
        serving = ServingConfig(policy="in-storage", drives=2, prefill_chunk_tokens=chunk, max_tokens=LONGEST)
        with serve(model, serving, background=False) as server:
            handles = [server.submit(prompt, NEW) for prompt in asked]
            answers.append([handle.result() for handle in handles])
            assert server.kv.real.moved.total() == 0
    assert not programs and answers[0] == answers[1]
    with serve(model, ServingConfig(policy="in-storage", drives=2, max_batch_size=1, max_tokens=LONGEST)) as server:
        assert [server.submit(prompt, NEW).result() for prompt in asked] == answers[0]
