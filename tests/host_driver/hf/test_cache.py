"""Real transformers models with their KV cache in drives, against the same models with sdpa.

partner of: host_driver/hf/attention.py, host_driver/hf/staging.py
"""

import gc
import inspect
import tracemalloc

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import vcsd
from csd_spec import DriveError, FixedBudget, SparFParams
from host_driver.hf.shape import UnsupportedModelError

VOCABULARY = 97
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**COMMON, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 512}

# FP16 keeps 11 bits; q, k, v and the output are each rounded once, and logits here are of order 1
FP16_ERROR = 5e-3


def opt():
    config = OPTConfig(**COMMON, ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=512)
    return OPTForCausalLM(config)


def llama(**kwargs):
    return LlamaForCausalLM(LlamaConfig(**(LLAMA | kwargs)))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=32))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512))


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def sharpen(model):
    """Random weights twice as large, so that attention is not flat."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(2)
    return model.eval()


class Conversation:
    """Forwards with a cache, and the attention mask that goes with them."""

    def __init__(self, model, mask):
        self.model, self.mask, self.cache = model, mask, None

    def feed(self, ids, mask=None):
        if self.cache is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(ids) if mask is None else mask], 1)
        extra = {}
        if "position_ids" in inspect.signature(self.model.forward).parameters or "OPT" not in type(self.model).__name__:
            extra["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(input_ids=ids, attention_mask=self.mask, cache=self.cache, use_cache=True, **extra)
        self.cache = out.cache
        return out.logits

    def crop(self, tokens):
        self.cache.crop(-tokens)
        self.mask = self.mask[:, :-tokens]


def talk(model, ids, mask):
    """Prompt, single tokens, a second turn of several, crop, and on: all logits of positions that are tokens."""
    talker, logits, at = Conversation(model, mask), [], 0
    for length in (100, 1, 1, 1, 30, 1, 1, -20, 1, 1, -100, 40, 1):
        if length < 0:
            talker.crop(-length)
            continue
        out = talker.feed(ids[:, at : at + length])
        logits.append(out[talker.mask[:, -length:].bool()])
        at += length
    return torch.cat(logits)


@pytest.mark.parametrize("make", [opt, llama, qwen3, gpt2])
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_padded_batch_turns_and_crop_equal_sdpa(make, drives, micro_batches):
    model = sharpen(make())
    ids, mask = torch.randint(3, VOCABULARY, (3, 200)), torch.ones(3, 100, dtype=torch.long)
    mask[0, :40], mask[2, :1] = 0, 0
    expected = talk(model, ids, mask)
    with vcsd.attach(model, drives=drives, method="dense", micro_batches=micro_batches):
        got = talk(model, ids, mask)
    assert (got - expected).abs().max() < FP16_ERROR


@pytest.mark.parametrize("make", [opt, llama, qwen3])
def test_generate_example_of_readme_works(make):
    model = sharpen(make())
    ids = torch.randint(3, VOCABULARY, (2, 90))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options)
    with vcsd.attach(model, drives=2, method="sparf", compression=1) as csd:
        got = model.generate(**inputs, **options)
        report = csd.report().drives
    difference = max((a - b).abs().max() for a, b in zip(expected.logits, got.logits, strict=True))
    assert torch.equal(got.sequences, expected.sequences)
    assert difference < FP16_ERROR
    assert report.steps == 19
    assert sum(report.breakdown_ns.values()) == pytest.approx(report.step_ns)
    assert "flash pages read" in str(report)


def stored(cache, layer):
    """Tokens of each row in the drives, as the table knows them."""
    with cache.kv.drives.together(cache.requests) as (batch, _):
        lengths = batch.lengths[:, layer].tolist()
    assert lengths == [cache.kv.tokens(request, layer) for request in cache.requests]
    return lengths


def test_padding_is_never_stored():
    model = llama().eval()
    ids, mask = torch.randint(3, VOCABULARY, (2, 50)), torch.ones(2, 50, dtype=torch.long)
    mask[0, :20] = 0
    with vcsd.attach(model, method="dense"):
        talker = Conversation(model, mask)
        talker.feed(ids)
        assert stored(talker.cache, 0) == [30, 50]
        talker.feed(ids[:, :1], mask=torch.tensor([[1], [0]]))  # row 1 is done and fed padding
        assert stored(talker.cache, 2) == [31, 50]
        assert talker.cache.get_seq_length() == 51


def test_sparse_decode_equal_for_drives_and_batches():
    model = sharpen(llama(num_attention_heads=8, num_key_value_heads=4))
    ids = torch.randint(3, VOCABULARY, (4, 120))
    outs, times = [], []
    for drives, micro_batches in ((1, 1), (3, 2), (4, 3), (4, 3)):
        budget = FixedBudget(SparFParams(2, 20, 5))
        with vcsd.attach(model, drives=drives, budget=budget, micro_batches=micro_batches) as csd:
            talker = Conversation(model, torch.ones_like(ids))
            talker.feed(ids)
            outs.append(torch.cat([talker.feed(ids[:, step : step + 1]) for step in range(10)], 1))
            times.append(csd.report().drives.breakdown_ns)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=FP16_ERROR, rtol=0)
    assert times[2] == times[3]  # modelled time does not depend on how threads are scheduled


def test_model_is_restored_after_exception():
    model = llama().eval()
    with pytest.raises(KeyError), vcsd.attach(model):
        assert model.config._attn_implementation == "csd"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model)
    with vcsd.attach(model):
        pass


def test_cache_in_drives_is_refused_after_detach():
    model = llama().eval()
    ids = torch.randint(3, VOCABULARY, (1, 20))
    with vcsd.attach(model):
        cache = model(input_ids=ids, use_cache=True).cache
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedModelError, match="'eager'"):
            model(input_ids=ids[:, :1], cache=cache)
    with pytest.raises(UnsupportedModelError, match="'sdpa'"):
        model(input_ids=ids[:, :1], cache=cache)


def test_a_cache_filled_elsewhere_is_refused():
    model = llama().eval()
    ids = torch.randint(3, VOCABULARY, (1, 20))
    cache = model(input_ids=ids, use_cache=True).cache
    with vcsd.attach(model), pytest.raises(UnsupportedModelError, match="filled outside"):
        model(input_ids=ids[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2)), "decoder"),
        (lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=32)), "sliding_attention"),
    ],
)
def test_unsupported_models_refused_unchanged(make, reason):
    model = make().eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason), vcsd.attach(model):
        pass
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"drives": 0}, "drives = 0"),
        ({"drives": 3}, "2 KV heads"),
        ({"method": "magic"}, "magic"),
        ({"compression": 0.5}, "compression: must be"),
        ({"budget_convention": "bits"}, "convention"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"budget": FixedBudget(SparFParams(64, 8, 2))}, "r = 64"),
        ({"drives": "2"}, "drives = '2': must be a number, ray or ray://HOST:PORT"),
        ({"drives": True}, "drives = True"),
        ({"drives": [2]}, "2 is not a device"),
        ({"compression": "8"}, "compression: must be"),
    ],
)
def test_bad_settings_are_refused(options, reason):
    model = llama().eval()
    with pytest.raises(ValueError, match=reason), vcsd.attach(model, **options):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_object_that_is_no_model_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"str is not a transformers model"), vcsd.attach("gpt2"):
        pass


def test_beam_search_and_training_are_refused():
    model = llama().eval()
    ids = torch.randint(3, VOCABULARY, (1, 20))
    with vcsd.attach(model):
        with pytest.raises(UnsupportedModelError, match="num_beams=1"):
            model.generate(ids, num_beams=2, max_new_tokens=4, do_sample=False)
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"model\.eval"):
            model(input_ids=ids, use_cache=True)


def test_full_drive_fails_forward_stays_usable(small_drive):
    model = llama().eval()
    with vcsd.attach(model, spec=small_drive, method="dense") as csd:
        with pytest.raises(DriveError, match="drive 0: capacity exceeded"):
            model(input_ids=torch.randint(3, VOCABULARY, (4, 500)), use_cache=True)
        gc.collect()
        ids = torch.randint(3, VOCABULARY, (1, 20))
        cache = model(input_ids=ids, use_cache=True).cache
        model(input_ids=ids[:, :1], cache=cache)
        assert csd.report().drives.steps == 1


def test_dropping_a_cache_frees_the_drives():
    model = llama().eval()
    with vcsd.attach(model, drives=2) as csd:
        cache = model(input_ids=torch.randint(3, VOCABULARY, (2, 100)), use_cache=True).cache
        buffers = [device.firmware.ftl.buffers for device in csd.driver.devices]
        assert all(buffer.left < buffer.capacity for buffer in buffers)
        del cache
        gc.collect()
        assert all(buffer.left == buffer.capacity for buffer in buffers)


def test_the_host_keeps_no_keys_or_values_after_a_long_prefill():
    """32k tokens: neither tensors nor the driver's arrays hold K or V, but for the forward's own output."""
    length = 32768
    model = llama(max_position_embeddings=length, num_hidden_layers=2, hidden_size=32).eval()
    kv_bytes = 2 * 2 * 2 * 8 * length * 4
    ids = torch.randint(3, VOCABULARY, (1, length))

    def tensor_bytes():
        gc.collect()
        result = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) is torch.Tensor
        }
        return sum(result.values())

    with vcsd.attach(model, drives=2):
        model(input_ids=ids[:, :64], use_cache=True)
        before = tensor_bytes()
        tracemalloc.start()
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache
        gc.collect()
        host_files = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("host_driver", "vcsd")]
        traces = tracemalloc.take_snapshot().filter_traces(host_files).statistics("filename")
        tracemalloc.stop()
        grown = tensor_bytes() - before + sum(trace.size for trace in traces)
        assert cache.get_seq_length() == length
        assert grown < kv_bytes / 50


def test_mask_is_not_kept_after_forward():
    """One that the caller changes in place for its next forward is looked at again."""
    model = sharpen(llama())
    with vcsd.attach(model, drives=1, method="dense"):
        talker = Conversation(model, torch.ones(2, 9, dtype=torch.long))
        for length in (9, 1, 3):
            talker.feed(torch.randint(3, VOCABULARY, (2, length)))
            assert talker.cache.rows is None
