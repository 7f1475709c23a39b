"""A model whose drives are lost permanently continues with the same tokens.

partner of: host_driver/hf/replay.py
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import vcsd
from csd_spec import DriveError
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.failing_device import FailingDevice
from vcsd.loading import CHECKPOINT, PROMPT, load
from vcsd.redundancy import open_redundant

NEW = 12


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = load(CHECKPOINT)
    text = PROMPT.read_text()[:300]
    return model, tokenizer([text, text[40:]], return_tensors="pt", padding=True)


@pytest.fixture
def drives() -> Iterator[list[FailingDevice]]:
    made = [FailingDevice(INSTCSD_ZYNQ7045_8CH, name) for name in "abc"]
    yield made
    for each in made:
        each.close()


@torch.inference_mode()
def decode(loaded, **setting):
    model, inputs = loaded
    with vcsd.attach(model, **setting) as csd:
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        return out.tolist(), csd


@pytest.fixture(scope="module")
def undisturbed(loaded):
    return {name: decode(loaded, drives=2, method=name)[0] for name in ("sparf", "ours", "dense")}


@pytest.mark.parametrize("attention", ["sparf", "ours", "dense"])
@pytest.mark.parametrize("left", [0, 1, 3, 7, 30])
def test_lost_heads_are_computed_again(loaded, drives, undisturbed, attention, left):
    drives[0].left = left
    tokens, csd = decode(loaded, drives=drives[:2], method=attention, redundancy="recompute")
    assert tokens == undisturbed[attention]
    group = csd.driver.devices[0]
    assert [event.kind for event in group.events][:2] == ["lost", "served"]
    assert group.events[1].drive == "host"
    assert csd.report().to_dict()["losses"][0]["drive"] == "a"
    assert "Lost and replaced drives" in str(csd.report())


@torch.inference_mode()
def test_recompute_works_if_caller_reuses_token_memory(loaded, drives):
    model, inputs = loaded
    ids = inputs["input_ids"][:1]

    def logits(devices, redundancy, lost):
        with vcsd.attach(model, drives=devices, method="dense", redundancy=redundancy):
            cache, token = model(input_ids=ids[:, :80], use_cache=True).cache, ids[:, :1].clone()
            for number in range(80, 90):
                token.copy_(ids[:, number : number + 1])
                if lost and number == 88:
                    devices[0].left = 0
                got = model(input_ids=token, cache=cache).logits
            return got

    assert torch.equal(logits(drives[:2], "recompute", True), logits(2, "none", False))


@pytest.mark.parametrize("left", [0, 3, 30])
def test_mirror_serves_after_loss_of_one_drive(loaded, drives, undisturbed, left):
    drives[1].left = left
    tokens, csd = decode(loaded, drives=drives, method="sparf", redundancy="mirror")
    assert tokens == undisturbed["sparf"]
    assert any(event.drive == "b" for group in csd.driver.devices for event in group.events)


def test_micro_batches_wait_for_the_same_recomputation(loaded, drives, undisturbed):
    drives[1].left = 25
    tokens, csd = decode(loaded, drives=drives[:2], method="sparf", redundancy="recompute", micro_batches=2)
    assert tokens == undisturbed["sparf"]
    assert [event.kind for event in csd.driver.devices[1].events].count("lost") == 1


def test_recompute_survives_loss_of_all_drives(loaded, drives, undisturbed):
    drives[0].left, drives[1].left = 20, 35
    tokens, _ = decode(loaded, drives=drives[:2], method="sparf", redundancy="recompute")
    assert tokens == undisturbed["sparf"]


def test_without_redundancy_the_error_names_the_heads(loaded, drives):
    drives[0].left = 30
    with pytest.raises(DriveError, match=r"drive 0: path lost: it is gone; KV heads 0, 1 of all sequences are lost"):
        decode(loaded, drives=drives[:2])


@torch.inference_mode()
def test_recompute_stops_at_cropped_length(loaded, drives):
    model, inputs = loaded
    ids = inputs["input_ids"][:1]

    def logits(devices, redundancy, lost):
        with vcsd.attach(model, drives=devices, method="dense", redundancy=redundancy) as csd:
            cache = model(input_ids=ids[:, :80], use_cache=True).cache
            for number in range(80, 90):
                model(input_ids=ids[:, number : number + 1], cache=cache)
            cache.crop(-7)
            if lost:
                devices[0].left = 0
            got = [model(input_ids=ids[:, number : number + 1], cache=cache).logits for number in (83, 84)]
            assert not lost or csd.driver.devices[0].events
            return torch.cat(got)

    assert torch.equal(logits(drives[:2], "recompute", True), logits(2, "none", False))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"redundancy": "raid"}, "redundancy: must be 'none', 'mirror' or 'recompute'"),
        ({"redundancy": "mirror", "drives": 1}, "redundancy = .mirror.: at least 2 drives are needed"),
        ({"spares": 1}, "spares = 1: redundancy none does not use them"),
        ({"spares": -1}, "spares: must be greater"),
        ({"spares": "1"}, "spares: must be a valid integer"),
        (
            {"spares": 1, "redundancy": "mirror", "drives": [FailingDevice(INSTCSD_ZYNQ7045_8CH, "a")] * 2},
            "spares = 1: only",
        ),
    ],
)
def test_invalid_redundancy_settings_are_refused(loaded, setting, message):
    with pytest.raises(ValueError, match=message), vcsd.attach(loaded[0], **setting):
        pytest.fail("attached")


@dataclass
class OnNode(FailingDevice):
    """A drive on a machine of that name."""

    node: str
    max_bytes: int = 1 << 20

    def __hash__(self) -> int:
        return id(self)

    @property
    def name(self) -> str:
        return f"{self.node}-{id(self)}"

    spec = INSTCSD_ZYNQ7045_8CH


def test_mirrored_heads_are_on_different_machines():
    drives = [OnNode(node) for node in ("x", "x", "y", "x")]
    with open_redundant(drives, "mirror") as (groups, _):
        assert [[drive.node for drive in group.drives] for group in groups] == [
            ["x", "y"],
            ["x", "y"],
            ["y", "x"],
            ["x", "y"],
        ]
