"""A model on a GPU: its tokens with KV data in drives and in tiers are those of the model alone.

partner of: host_driver/hf/staging.py, host_driver/device_memory.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vcsd
from tests.conftest import missing
from tests.vcsd_cli.test_main import vcsd as command
from vcsd import TierLimits
from vcsd.config import ServingConfig
from vcsd.loading import CHECKPOINT, PROMPT, encode, load
from vcsd.serving import serve

NEW = 32
KV_BYTES = 2 * 4 * 64 * 4  # of one token and layer of the bundled model in FP32
LONGEST = 2048


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not torch.cuda.is_available():
        missing("gpu", "torch finds no GPU")
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bundled(request):
    """The bundled model on the GPU, its inputs and its greedy tokens."""
    model, tokenizer = load(CHECKPOINT, "cuda")
    model = model.to(getattr(torch, request.param))
    inputs = encode(model, tokenizer, PROMPT.read_text(), 2, NEW, seed=0)
    return model, inputs, tokens_of(model, inputs)


def tokens_of(model, inputs) -> list[list[int]]:
    result = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return result[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("method", ["dense", "sparf"])
@pytest.mark.parametrize("drives", [1, 3])
def test_tokens_in_drives_equal_sdpa(bundled, drives, method) -> None:
    model, inputs, expected = bundled
    with vcsd.attach(model, drives=drives, method=method):
        assert tokens_of(model, inputs) == expected
    assert tokens_of(model, inputs) == expected  # the model is as it was


def test_default_device_may_be_gpu(tmp_path, bundled) -> None:
    """Pinned buffers are on the host, whatever the default device is."""
    model, inputs, expected = bundled
    tiers = TierLimits(KV_BYTES * LONGEST * 2, 1 << 20, 1 << 20, tmp_path, max_tokens=LONGEST)
    with torch.device("cuda"):
        with vcsd.attach(model, drives=2):
            assert tokens_of(model, inputs) == expected
        with vcsd.attach(model, policy="split", tiers=tiers):
            assert tokens_of(model, inputs) == expected


@pytest.mark.parametrize("policy", ["reactive", "flexgen", "dual-blade", "split", "auto", "tutti"])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_tokens_in_tiers_equal_sdpa_within_limits(tmp_path, bundled, policy, layers) -> None:
    model, inputs, expected = bundled
    one = KV_BYTES * LONGEST * len(inputs["input_ids"])
    tiers = TierLimits(layers * one, one, one, tmp_path, max_tokens=LONGEST)
    with vcsd.attach(model, policy=policy, tiers=tiers) as run:
        assert tokens_of(model, inputs) == expected
        peaks = {tier["name"]: tier["peak_bytes"] for tier in run.report().tiers}
    assert 0 < peaks["device"] <= layers * one


@pytest.mark.parametrize(("policy", "drives"), [("in-storage", 2), ("ours", 2), ("orbitflow", 0), ("tierkv", 0)])
def test_served_requests_equal_requests_alone(tmp_path, bundled, policy, drives) -> None:
    model, inputs, _ = bundled
    row = inputs["input_ids"][0, -600:].tolist()
    prompts = [row[start:] for start in (0, 100, 300, 500)]
    tiers = TierLimits(device=1 << 24, host=1 << 24, files=tmp_path)
    config = ServingConfig(policy=policy, tiers=tiers, drives=drives, max_batch_size=4, max_tokens=700)
    with serve(model, config, background=False) as server:
        alone = [server.submit(prompt, NEW).result() for prompt in prompts]
    with serve(model, config, background=False) as server:
        streams = [server.submit(prompt, NEW) for prompt in prompts]
        server.run()
        assert [stream.tokens for stream in streams] == alone
        assert not server.kv.requests()


def test_command_runs_model_on_gpu(capsys, monkeypatch, tmp_path: Path) -> None:
    words = ("run", "--device", "cuda", "--method", "dense", "--drives", "2", "--max-new-tokens", "16", "-o", "json")
    code, out, err = command(capsys, monkeypatch, *words)
    assert code == 0, err
    assert json.loads(out)["agreement"]["tokens_equal"]
