"""Latent attention in drives: one row per token, and the model's own outputs."""

import itertools
import os
import signal
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import vcsd
from csd_firmware import InProcessDrive
from csd_link.run_dir import pid_path
from csd_spec import LAYOUTS, KvAppend, SeqCreate, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from csd_spec.verbs import verb_of
from csd_spec.view import in_flash
from host_driver.hf.latent import Latent, in_latent_space, latent_modules

RANK, ROTARY, HEADS = 512, 64, 4
D = 16  # of a row in a small drive
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY}
SIZES |= {"qk_nope_head_dim": 32, "v_head_dim": 24, "q_lora_rank": 16, "max_position_embeddings": 512}
SIZES |= {"moe_intermediate_size": 32, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FP16_ERROR = 5e-3


def deepseek_v2():
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, n_shared_experts=1, first_k_dense_replace=1))


def deepseek_v3():
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, n_shared_experts=1, first_k_dense_replace=1))


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def made(make):
    model = make().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2)
    return model


def talk(model):
    """A padded batch, token by token, cropped, and a second turn: logits of all that are tokens."""
    ids, mask = torch.randint(3, 97, (3, 100), generator=torch.Generator().manual_seed(1)), torch.ones(3, 100).long()
    mask[1, :13], mask[2, :27] = 0, 0
    logits, at, cache = [], 0, None
    for length in (40, *[1] * 12, -5, 20, *[1] * 3):
        if length < 0:
            cache.crop(length)
            at += length
            continue
        positions = (mask[:, : at + length].cumsum(1) - 1).clamp(min=0)[:, at:]
        given = {"attention_mask": mask[:, : at + length], "position_ids": positions, "cache": cache}
        out = model(input_ids=ids[:, at : at + length], use_cache=True, **given)
        cache = out.cache
        logits.append(out.logits[mask[:, at : at + length].bool()])
        at += length
    return torch.cat(logits)


@pytest.mark.parametrize("make", [deepseek_v2, deepseek_v3])
@pytest.mark.parametrize("method", ["dense", "sparf"])
@pytest.mark.parametrize("drives", [1, 3])
def test_latent_models_equal_their_own_attention(make, method, drives):
    model = made(make)
    expected = talk(model)
    with vcsd.attach(model, method=method, compression=1, drives=drives):
        assert (talk(model) - expected).abs().max() < FP16_ERROR
    assert torch.equal(talk(model), expected)


@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_bf16_rows_stay_bf16(method):
    """For a BF16 model, by default; the largest FP16 value is below 65,504."""
    model = made(lambda: deepseek_v3().to(torch.bfloat16))
    model.model.layers[1].self_attn.kv_a_layernorm.weight.fill_(1e6)
    model.model.layers[1].self_attn.kv_b_proj.weight.mul_(1e-6)
    expected = talk(model)
    with vcsd.attach(model, method=method, compression=1, drives=2) as csd:
        assert csd.driver.attention.layout == "latent-bf16"
        assert (talk(model) - expected).abs().max() < 8 * FP16_ERROR  # BF16 has 3 bits less


def test_latent_stream_is_on_all_drives_one_is_read():
    """Outputs of each query head are the same bits wherever it is attended."""
    model, logits = made(deepseek_v3), {}
    for drives in (1, 3):
        with ExitStack() as devices:
            each = [devices.enter_context(closing(InProcessDrive(INSTCSD_ZYNQ7045_8CH))) for _ in range(drives)]
            with vcsd.attach(model, drives=each, method="dense") as csd:
                logits[drives] = talk(model)
                programmed = [device.firmware.ftl.counters.groups for device in each]
                read = [device.firmware.ftl.counters.read for device in each]
            assert csd.report().drives.copies == drives
            assert len(set(programmed)) == 1
            assert all(read[0] > other for other in read[1:])
    assert torch.equal(logits[1], logits[3])


def test_killed_drive_gets_latent_stream_again():
    """One in the middle of the first turn, and the one that is read before the second."""
    model, driver = made(deepseek_v3), []
    forwards = itertools.count()

    def kill(*_):
        if (drive := {8: 1, 13: 0}.get(next(forwards))) is not None:
            os.kill(int(pid_path(driver[0].devices[drive].name).read_text()), signal.SIGKILL)

    with vcsd.attach(model, method="dense"):
        expected = talk(model)
    with vcsd.attach(model, method="dense", drives=3, transport="process") as csd:
        driver.append(csd.driver)
        hook = model.model.register_forward_pre_hook(kill)
        got = talk(model)
        hook.remove()
        assert [len(device.recoveries) for device in csd.driver.devices] == [1, 1, 0]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("make", [deepseek_v2, deepseek_v3])
@pytest.mark.parametrize("storage", ["fp16", "bf16"])
def test_progressive_error_is_that_of_8_bits(make, storage):
    """Where all tokens are attended, far less than where many are left out; a token takes a row of 8 bits and its share
    of powers, 6 tokens a page, and pages of K in few bits."""
    model = made(make)
    expected, errors = talk(model), []
    for options in ({"method": "ours", "compression": 1, "kv_dtype": storage}, {"method": "local"}):
        with vcsd.attach(model, **options) as csd:
            errors.append((talk(model) - expected).abs().max())
            stored = csd.report().drives.token_bytes
        if not errors[1:]:
            assert stored == {"refined": 7 * 576 / 6, "scores": 5 * 4096 / 80, "values": 5 * 4096 / 112}
    assert 0 < 4 * errors[0] < min(8 * FP16_ERROR, errors[1])


def test_token_takes_one_row_and_copy_of_layout():
    """K of 576 channels in pages of 3 rows, and its copy for SparF; V takes no space."""
    model, tokens = made(deepseek_v3), 300
    spec = INSTCSD_ZYNQ7045_8CH
    with closing(InProcessDrive(spec)) as device, vcsd.attach(model, drives=[device], method="dense") as csd:
        kept = model(torch.randint(3, 97, (1, tokens)), use_cache=True)
        (seq,) = device.firmware.ftl.sequences.values()
        assert set(seq.maps) == {"k", "embedding_k"}
        k, copy = seq.maps["k"], seq.maps["embedding_k"]
        row = (RANK + ROTARY) * 2
        assert k.per_group == spec.geometry.page_bytes // row
        assert k.streams == 1
        assert in_flash(k.slots[:, :, : tokens // k.per_group]).all()
        assert copy.streams == -(-(RANK + ROTARY) // copy.channels)  # of the same rows, in another order
        assert kept.cache.get_seq_length() == tokens
        assert csd.driver.shape.kv_bytes_per_token == SIZES["num_hidden_layers"] * row


def test_latent_row_crosses_link_once():
    """For a prompt: K and lengths. For a step: q of each head, K, l and k; back: its output and rows."""
    model, tokens, layers = made(deepseek_v3), 300, SIZES["num_hidden_layers"]
    row = (RANK + ROTARY) * 2
    with vcsd.attach(model, method="dense") as csd:
        out = model(torch.randint(3, 97, (1, tokens)), use_cache=True)
        csd.driver.settle()
        before = csd.driver.traffic.link_bytes
        model(torch.tensor([[5]]), cache=out.cache)
        step = csd.driver.traffic.link_bytes - before
    assert layers * tokens * row <= before < layers * (tokens + 1) * row
    assert step == layers * (64 + 16 + HEADS * row + row + HEADS * row + HEADS * 8)


@pytest.mark.parametrize(("layout", "channels"), [("latent", D), ("latent-bf16", D), ("fp16", 0), ("fp16", D - 1)])
def test_v_has_the_channels_of_its_layout(small_drive, layout, channels):
    with closing(InProcessDrive(small_drive)) as device:
        seqs = tuple(device.submit(SeqCreate(1, 1, 1, D, 512, LAYOUTS[layout].code), 0).result().data[0].tolist())
        good, rows = 0 if LAYOUTS[layout].latent else D, np.ones((5, 1, D), np.float16)
        for command in (
            KvAppend(seqs, 0, np.array([5]), rows, np.ascontiguousarray(rows[..., :channels])),
            replace(
                verb_of(0xC5).example(seqs, H=1, G=2, d=D),
                v=np.ascontiguousarray(rows[:1, :, :channels]),
                top_k=np.array([1]),
                recent=np.array([0]),
            ),
        ):
            done = device.submit(command, 0).result()
            assert f"v: must have shape ({len(command.k)}, 1, {good})" in done.reason
            done = device.submit(replace(command, v=np.ascontiguousarray(command.k[..., :good])), 0).result()
            assert done.status is Status.SUCCESS, done.reason


def test_dense_reads_each_row_once():
    model = made(deepseek_v3)
    pages = {}
    for lone in ("dense", "local"):
        with vcsd.attach(model, method=lone, compression=1) as csd:
            out = model(torch.randint(3, 97, (1, 300)), use_cache=True)
            model(torch.tensor([[5]]), cache=out.cache)
            pages[lone] = csd.report().drives.pages_read
    assert pages["dense"] == SIZES["num_hidden_layers"] * 100


def test_absorbed_attention_equals_expanded():
    model = made(deepseek_v3)
    module = latent_modules(model)[0]
    with in_latent_space(model):
        rows, query = torch.randn(2, 1, 50, RANK + ROTARY), torch.randn(2, HEADS, 1, 32 + ROTARY)
        latent = Latent(module, rows)
        keys, values = latent.expand(rows)
        weights = (query @ keys.transpose(2, 3) * 0.05).softmax(-1)
        absorbed = (latent.queries(query) @ rows.transpose(2, 3) * 0.05).softmax(-1)
        torch.testing.assert_close(absorbed, weights, rtol=1e-3, atol=1e-5)
        out = latent.outputs((absorbed @ rows).transpose(1, 2))
        torch.testing.assert_close(out, (weights @ values).transpose(1, 2), rtol=1e-3, atol=1e-4)
    assert "expand_kv" not in vars(module)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layout": "int8"}, "use progressive, progressive4, fp16"),
        ({"layout": "progressive-exact"}, "use progressive, progressive4, fp16"),
        ({"layout": "progressive"}, "keeps no rows, use layout fp16"),
        ({"kv_dtype": "fp8"}, "layout fp16 stores fp16, bf16"),
        ({"drives": HEADS + 1}, "4, the model's query heads"),
    ],
)
def test_invalid_options_with_latent_stream_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason), vcsd.attach(made(deepseek_v3), **options):
        pass
