"""Initial weights of the training: heads attend to the right positions, and copying works before any training."""

import pytest
import torch

from vcsd_eval.model.circuits import BACK, HOPS, LOUDER, make_louder
from vcsd_eval.model.train_checkpoint import new_model

SEED = 5


@pytest.fixture(scope="module")
def model():
    made = new_model(SEED).eval()
    made.set_attn_implementation("eager")
    return made


@torch.inference_mode()
def test_circuit_heads_attend_to_their_offsets(model):
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(SEED))
    first, second = model(input_ids=ids, output_attentions=True).attentions[:2]
    for head in range(BACK):
        assert (first[0, head].diagonal(-head - 1)[BACK:] > 0.9).all()
    for head, hop in enumerate(HOPS):
        assert (second[0, head].diagonal(-hop)[max(HOPS) :] > 0.9).all()


@torch.inference_mode()
def test_induction_finds_string_by_its_prefix(model):
    draw = torch.Generator().manual_seed(SEED)
    common = torch.randint(0, 256, (16,), generator=draw)  # what stands before all candidates
    parts = [torch.cat([torch.randint(0, 256, (40,), generator=draw), common, torch.tensor([n])]) for n in range(8)]
    ids = torch.cat([*parts, parts[3][:-1]])[None]
    assert model(input_ids=ids).logits[0, -1].argmax() == 3


@torch.inference_mode()
def test_untrained_circuits_copy_random_text(model):
    noise = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(SEED))
    best = model(input_ids=torch.cat([noise, noise], 1)).logits[0, :-1].argmax(-1)
    assert (best[332:] == noise[0, 33:]).float().mean() > 0.98


def test_initial_weights_depend_only_on_seed():
    first, again = new_model(SEED).state_dict(), new_model(SEED).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_gain_is_applied_head_by_head(model):
    made = new_model(SEED)
    make_louder(made)
    louder, before = (each.model.layers[2].self_attn.o_proj.weight.chunk(len(LOUDER), 1) for each in (made, model))
    for after, weight, factor in zip(louder, before, LOUDER, strict=True):
        torch.testing.assert_close(after, factor * weight)
