"""What transformers lets a caller do with a model: equal to the plain model, or refused before anything runs.

Each feature runs with each family of models in drives, in tiers and, where a server can be asked for it, in a server.
`REFUSED` has the features that are refused, and where; docs/models.md has the same table.

partner of: host_driver/hf/forward.py, host_driver/hf/callers_cache.py, host_driver/hf/cache_argument.py,
host_driver/exclusive.py, vcsd/home_stack.py
"""

import copy
import inspect
import os
import pickle
import threading
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import peft
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import vcsd
from vcsd import UnsupportedModelError

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GQA = COMMON | {"num_key_value_heads": 2}
WINDOW = GQA | {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
MLA = GQA | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
}
MLA |= {"v_head_dim": 16, "first_k_dense_replace": 4}
FAMILIES = {
    "gqa": lambda: LlamaForCausalLM(LlamaConfig(**GQA)),
    "windows": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**WINDOW)),
    "mla": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**MLA)),
    "bf16": lambda: LlamaForCausalLM(LlamaConfig(**GQA)).to(torch.bfloat16),
}
# Of logits of order 1: drives round q, k, v and outputs to FP16 or BF16 once; tiers and server add in another order
TOLERANCE = {"gqa": 5e-3, "windows": 5e-3, "mla": 5e-3, "bf16": 6e-2}
NEW = 12


@dataclass
class Case:
    """A model, what attaches it, and a prompt."""

    model: torch.nn.Module
    ids: torch.Tensor
    place: str
    opened: list = field(default_factory=list)

    @contextmanager
    def attached(self, model=None):
        """The model as attached, or plain if the place is empty."""
        model = self.model if model is None else model
        if not self.place:
            yield None
        elif self.place == "drives":
            with vcsd.attach(model, drives=min(2, _heads(self.model)), method="dense") as session:
                self.opened.append(session)
                yield session
        else:
            tiers = vcsd.TierLimits(device=1 << 17, host=1 << 18)
            with vcsd.attach(model, policy="auto", tiers=tiers) as session:
                self.opened.append(session)
                yield session

    def generate(self, model=None, ids=None, **options):
        model, ids = self.model if model is None else model, self.ids if ids is None else ids
        options = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)} | options
        return model.generate(ids, **options)

    def forward(self, ids, cache=None, **inputs):
        """Logits, and the cache."""
        out = self.model(input_ids=ids, use_cache=True, **{CACHE: cache}, **inputs)
        return out.logits.float(), out[CACHE]


def _heads(model):
    return 4 if "Deepseek" in type(model).__name__ else model.config.num_key_value_heads


def threads(case):
    """Several threads generate on one attached model."""
    prompts, results = [case.ids[:1, : 20 + number] for number in range(4)], {}

    def work(number):
        results[number] = case.generate(ids=prompts[number])

    with case.attached():
        for _ in range(2):
            workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    return [results[number] for number in range(4)]


def prompt_lookup(case):
    """Candidates from the prompt."""
    with case.attached():
        return case.generate(ids=_repeated(), prompt_lookup_num_tokens=3)


def prompt_lookup_on_own_cache(case):
    """The same, on each kind of cache that the caller makes."""
    made = []
    with case.attached():
        for cache in (DynamicCache(), DynamicCache(config=case.model.config)):
            made.append(case.generate(ids=_repeated(), prompt_lookup_num_tokens=3, **{CACHE: cache}))
    return made


def assisted(case):
    """A smaller model drafts; it is not attached."""
    assistant = copy.deepcopy(case.model)
    with case.attached():
        return case.generate(ids=case.ids[:1], assistant_model=assistant, num_assistant_tokens=4)


def early_exit(case):
    """The model drafts with its first layers."""
    with case.attached():
        return case.generate(ids=case.ids[:1], assistant_early_exit=2)


def left_padding(case):
    """A batch of prompts of different lengths."""
    ids, mask = case.ids.clone(), torch.ones_like(case.ids)
    ids[0, :7], mask[0, :7] = 0, 0
    with case.attached():
        return case.generate(ids=ids, attention_mask=mask)


def right_padding(case):
    """A batch padded after its tokens, and a forward of one token more."""
    ids, mask = case.ids.clone(), torch.ones_like(case.ids)
    ids[0, -5:], mask[0, -5:] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with case.attached():
        _, cache = case.forward(ids, attention_mask=mask, position_ids=positions)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        return case.forward(case.ids[:, :1], cache, attention_mask=mask, position_ids=positions[:, -1:] + 1)[0]


def several_turns(case):
    """A second prompt on the cache of the first generation."""
    options = {"return_dict_in_generate": True}
    with case.attached():
        first = case.generate(**options)
        ids = torch.cat([first.sequences, case.ids[:, :9]], 1)
        return first.sequences, case.generate(ids=ids, **{CACHE: first[CACHE]})


def chunked_prefill(case):
    """The prompt is computed in parts."""
    with case.attached():
        return case.generate(prefill_chunk_size=7)


def own_dynamic_cache(case):
    """A cache that the caller made, and keeps for a second turn."""
    made, cache = [], DynamicCache()
    with case.attached():
        made.append(case.forward(case.ids, cache)[0])
        made.append(case.forward(case.ids[:, :1], cache)[0])
        made.append(case.forward(case.ids[:, :5], cache)[0])
        assert cache.get_seq_length() == case.ids.shape[1] + 6
    return made


def own_cache_of_config(case):
    """A cache with the layers of the model's config."""
    with case.attached():
        return case.generate(**{CACHE: DynamicCache(config=case.model.config)})


def own_static_cache(case):
    """A cache of fixed size."""
    with case.attached():
        return case.generate(**{CACHE: StaticCache(config=case.model.config, max_cache_len=64)})


def static_cache_by_name(case):
    """The same, made by transformers."""
    with case.attached():
        return case.generate(cache_implementation="static", disable_compile=True)


def recording_cache(case):
    """A cache told to record its past, and cut after a forward."""
    made, cache = [], DynamicCache(config=case.model.config)
    cache.activate_past_recording()
    with case.attached():
        case.forward(case.ids, cache)
        for tokens in (5, 3):
            made.append(case.forward(case.ids[:, :tokens], cache)[0])
            cache.crop(-tokens)
        made.append(case.forward(case.ids[:, :1], cache)[0])
    return made


def filled_cache(case):
    """A cache that was filled before the model was attached."""
    _, cache = case.forward(case.ids, DynamicCache())
    with case.attached():
        return case.forward(case.ids[:, :1], cache)[0]


def own_class_of_cache(case):
    """A cache with an update of its own."""
    with case.attached():
        return case.generate(**{CACHE: _Counting()})


def mask_only_in_prefill(case):
    """A padded batch, whose mask is left out in later forwards."""
    ids, mask = case.ids.clone(), torch.ones_like(case.ids)
    ids[0, :7], mask[0, :7] = 0, 0
    with case.attached():
        _, cache = case.forward(ids, attention_mask=mask)
        return case.forward(ids[:, -1:], cache)[0]


def mask_only_later(case):
    """A mask that hides tokens of an earlier forward, in which they were seen."""
    mask = torch.ones(2, case.ids.shape[1] + 1, dtype=torch.long)
    mask[0, :3] = 0
    with case.attached():
        _, cache = case.forward(case.ids)
        return case.forward(case.ids[:, :1], cache, attention_mask=mask)[0]


def no_mask(case):
    """No mask in any forward, and none is needed."""
    made, cache = [], None
    with case.attached():
        for ids in (case.ids, case.ids[:, :1], case.ids[:, :4], case.ids[:, :1]):
            logits, cache = case.forward(ids, cache)
            made.append(logits)
    return made


def mask_4d_bool(case):
    """Causal masks (B, 1, new, positions) of True and False, with padding."""
    return _with_4d_masks(case, lambda mask: mask)


def mask_4d_float(case):
    """The same as terms that are added to the logits."""
    least = torch.finfo(case.model.dtype).min
    return _with_4d_masks(case, lambda mask: torch.zeros(mask.shape, dtype=case.model.dtype).masked_fill(~mask, least))


def mask_4d_bias(case):
    """A mask with other terms than 0 and the least."""
    return _with_4d_masks(case, lambda mask: torch.zeros(mask.shape, dtype=case.model.dtype).masked_fill(~mask, -2.0))


def mask_4d_by_head(case):
    """A mask for each query head."""
    return _with_4d_masks(case, lambda mask: mask.repeat(1, 4, 1, 1))


def fork(case):
    """A forked child generates."""
    with case.attached():
        case.generate()
        return _in_child(case.generate)


def deep_copy(case):
    """A copy of the model, with other weights."""
    with case.attached():
        other = copy.deepcopy(case.model)
        for weight in other.parameters():
            weight.data.mul_(1.5)
        return case.generate(model=other)


def shallow_copy(case):
    """A copy that shares the weights."""
    with case.attached():
        return case.generate(model=copy.copy(case.model))


def output_attentions(case):
    """Attention weights."""
    case.model.set_attn_implementation("eager")
    with case.attached():
        out = case.model(case.ids, output_attentions=True, use_cache=True)
        return [attention.float() for attention in out.attentions]


def output_hidden_states(case):
    """States of every layer, at each step."""
    with case.attached():
        out = case.generate(output_hidden_states=True, return_dict_in_generate=True)
        return [layer.float() for step in out.hidden_states for layer in step]


def meta_device(case):
    """A model without data."""
    with torch.device("meta"):
        model = type(case.model)(case.model.config)
    with case.attached(model):
        return model(case.ids.to("meta")).logits.shape


def lora(case):
    """A model with an adapter in its layers, in PEFT's wrapper."""
    wrapped = _lora(case.model)
    with case.attached(wrapped):
        return case.generate(model=wrapped)


def lora_switched_off(case):
    """Its adapter is switched off while it is attached."""
    wrapped = _lora(case.model)
    with case.attached(wrapped), wrapped.disable_adapter():
        return case.generate(model=wrapped)


def prefix_tuning(case):
    """An adapter that fills the cache before the prompt."""
    torch.manual_seed(2)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(case.model, config).eval()
    with case.attached(wrapped):
        mask = torch.ones_like(case.ids)
        return wrapped.generate(input_ids=case.ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)


def embeddings(case):
    """Embeddings in place of tokens."""
    with case.attached():
        states = case.model.get_input_embeddings()(case.ids)
        options = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(case.ids)}
        return case.model.generate(inputs_embeds=states, **options)


def beams(case):
    """Beam search, which moves sequences between rows."""
    with case.attached():
        return case.generate(num_beams=3)


def several_returned(case):
    """Several samples of one prompt."""
    with case.attached():
        torch.manual_seed(5)
        return case.generate(ids=case.ids[:1], do_sample=True, num_return_sequences=3)


def crop_and_reset(case):
    """A cache cut to a part of it, and emptied."""
    made = []
    with case.attached():
        cache = DynamicCache()
        case.forward(case.ids[:, :10], cache)
        cache.crop(-4)
        made.append(case.forward(case.ids[:, :1], cache)[0])
        cache.reset()
        made.append(case.forward(case.ids[:, :10], cache if case.place else None)[0])
    return made


def no_cache(case):
    """Forwards without a cache."""
    with case.attached():
        return case.generate(use_cache=False)


def tuple_output(case):
    """Outputs as tuples."""
    with case.attached():
        out = case.model(case.ids, return_dict=False, use_cache=True)
        return case.model(case.ids[:, :1], return_dict=False, **{CACHE: out[1]})[0].float()


def _in_child(work):
    """Result of a function in a forked child; its exception is raised here."""
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            outcome = error
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        outcome = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _repeated():
    return torch.tensor([[5, 6, 7, 8, 9, 10] * 6])


def _with_4d_masks(case, form):
    """A prompt and two tokens, with masks that hide padding on the left of row 0."""
    seen = torch.ones(2, case.ids.shape[1] + 2, dtype=torch.bool)
    seen[0, :7] = False
    made, cache, past = [], None, 0
    with case.attached():
        for ids in (case.ids, case.ids[:, :1], case.ids[:, 1:2]):
            end = past + ids.shape[1]
            causal = torch.ones(end, end, dtype=torch.bool).tril()[past:]
            mask = causal & seen[:, None, None, :end] | torch.eye(end, dtype=torch.bool)[past:]
            masks = form(mask)
            if window := getattr(case.model.config, "sliding_window", None):
                kept = mask.triu(end - mask.shape[2] - window + 1)[..., -(window - 1 + ids.shape[1]) :]
                masks = {"full_attention": masks, "sliding_attention": form(kept)}
            logits, cache = case.forward(ids, cache, attention_mask=masks)
            made.append(logits[:, 7:] if not past else logits)
            past = end
    return made


def _lora(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


class _Counting(DynamicCache):
    """Counts its updates."""

    updates = 0

    def update(self, *args, **kwargs):
        self.updates += 1
        return super().update(*args, **kwargs)


FEATURES = [
    value
    for value in dict(globals()).values()
    if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["case"] and value.__name__[0] != "_"
]
REFUSED = {
    "filled_cache": ("drives", "tiers"),
    "own_class_of_cache": ("drives", "tiers"),
    "prefix_tuning": ("drives", "tiers"),
    "mask_only_in_prefill": ("drives",),
    "mask_only_later": ("drives",),
    "mask_4d_bias": ("drives",),
    "mask_4d_by_head": ("drives",),
    "fork": ("drives", "tiers"),
    "deep_copy": ("drives", "tiers"),
    "output_attentions": ("drives",),
    "meta_device": ("drives", "tiers"),
    "beams": ("drives",),
    "early_exit": ("tiers",),
}


def build(family):
    """A small model with random weights large enough for attention that is not flat, and its prompt."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model, torch.randint(3, VOCABULARY, (2, 24))


def check_equal(got, expected, model, tolerance):
    """Assert equal tokens, and logits within a tolerance.

    Tokens may differ from where the plain model has two logits that are equal within that tolerance.
    """
    if isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_equal(one, other, model, tolerance)
    elif expected.is_floating_point():
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    else:
        assert got.shape == expected.shape
        for row in (got != expected).any(1).nonzero()[:, 0].tolist():
            at = int((got[row] != expected[row]).nonzero()[0, 0])
            before = expected[row : row + 1, :at]
            logits = model(before, attention_mask=(before != 0).long(), use_cache=False).logits[0, -1].float()
            assert logits[expected[row, at]] - logits[got[row, at]] <= tolerance * max(1.0, float(logits.abs().max()))


@pytest.mark.parametrize("place", ["drives", "tiers"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
@torch.no_grad()
def test_attached(feature, family, place):
    model, ids = build(family)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # PEFT's
    if place in REFUSED.get(feature.__name__, ()):
        case = Case(model, ids, place)
        with pytest.raises(UnsupportedModelError) as refusal:
            feature(case)
        assert "\n" not in str(refusal.value)
        return
    plain = copy.deepcopy(model)
    expected = feature(Case(copy.deepcopy(model), ids, ""))
    check_equal(feature(Case(model, ids, place)), expected, plain, TOLERANCE[family])


def served(case, prompts, model=None, **options):
    """Tokens of a server with drives for each prompt, or of the plain model."""
    model = case.model if model is None else model
    if not case.place:
        options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | options
        return [model.generate(input_ids=torch.tensor([prompt]), **options)[:, len(prompt) :] for prompt in prompts]
    with vcsd.serve(model, policy="in-storage", drives=1, max_tokens=64) as server:
        case.opened.append(server)
        handles = [server.submit(prompt, NEW) for prompt in prompts]
        return [torch.tensor([handle.result()]) for handle in handles]


def server_batch(case):
    """Prompts of different lengths together."""
    return served(case, [case.ids[0, : 9 + 5 * number].tolist() for number in range(4)])


def server_threads(case):
    """Several threads submit."""
    prompts, results = [case.ids[1, : 8 + 3 * number].tolist() for number in range(4)], {}
    if not case.place:
        return served(case, prompts)
    with vcsd.serve(case.model, policy="in-storage", drives=1, max_tokens=64) as server:

        def work(number):
            results[number] = torch.tensor([server.submit(prompts[number], NEW).result()])

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return [results[number] for number in range(4)]


def server_turns(case):
    """A second prompt that continues the first."""
    prompt = case.ids[0].tolist()
    first = served(case, [prompt])[0]
    return first, served(case, [prompt + first[0].tolist() + [7, 8, 9]])[0]


def server_chunks(case):
    """The prompt is computed in parts."""
    prompt = case.ids[0].tolist()
    if not case.place:
        return served(case, [prompt])
    with vcsd.serve(case.model, policy="in-storage", drives=1, max_tokens=64, prefill_chunk_tokens=7) as server:
        return [torch.tensor([server.submit(prompt, NEW).result()])]


def server_lora(case):
    """A model in PEFT's wrapper."""
    return served(case, [case.ids[0].tolist()], _lora(case.model))


def server_deep_copy(case):
    """A copy of a model that serves, with other weights, generates by itself."""
    with vcsd.serve(case.model, policy="in-storage", drives=1) if case.place else nullcontext():
        other = copy.deepcopy(case.model)
        for weight in other.parameters():
            weight.data.mul_(1.5)
        return case.generate(model=other)


def server_fork(case):
    """A forked child submits a request."""
    with vcsd.serve(case.model, policy="in-storage", drives=1) as server:
        return _in_child(lambda: server.submit(case.ids[0].tolist(), NEW).result())


def server_meta(case):
    """A model without data."""
    with torch.device("meta"):
        model = type(case.model)(case.model.config)
    served(case, [case.ids[0].tolist()], model)


SERVED = [value for name, value in dict(globals()).items() if name.startswith("server_")]
REFUSED_BY_SERVER = server_fork, server_meta


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", SERVED, ids=lambda feature: feature.__name__)
@torch.no_grad()
def test_served(feature, family):
    model, ids = build(family)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # PEFT's
    if feature in REFUSED_BY_SERVER:
        with pytest.raises((UnsupportedModelError, vcsd.RequestRejectedError)) as refusal:
            feature(Case(model, ids, "server"))
        assert "\n" not in str(refusal.value)
        return
    plain = copy.deepcopy(model)
    expected = feature(Case(copy.deepcopy(model), ids, ""))
    check_equal(feature(Case(model, ids, "server")), expected, plain, TOLERANCE[family])


def test_page_has_every_feature_and_their_counts():
    """The table of docs/models.md names each feature by its first line here."""
    page = " ".join((Path(__file__).parents[3] / "docs" / "models.md").read_text().split())
    refused = len(FAMILIES) * (sum(map(len, REFUSED.values())) + len(REFUSED_BY_SERVER))
    every = len(FAMILIES) * (2 * len(FEATURES) + len(SERVED))
    assert f"{every} combinations, of which {every - refused} give the plain model's tokens" in page
    assert f"and {refused} are refused in one line" in page
    rows = {
        feature: [
            ("refused" if place in REFUSED.get(feature.__name__, ()) else "equal") for place in ("drives", "tiers")
        ]
        for feature in FEATURES
    }
    lines = [f"| {feature.__doc__.rstrip('.')} | {' | '.join(row)} | - |" for feature, row in rows.items()]
    for feature in SERVED:
        outcome = "refused" if feature in REFUSED_BY_SERVER else "equal"
        lines.append(f"| {feature.__doc__.rstrip('.')} | - | - | {outcome} |")
    assert [line for line in lines if line not in page] == []
