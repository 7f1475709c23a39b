"""Requests of different lengths in one forward, their KV caches in different tiers: the tokens of each as alone.

partner of: host_driver/hf/rows.py, host_driver/kv_table.py, host_driver/drive_tier.py
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from csd_firmware import InProcessDrive
from csd_spec import AttentionConfig
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.driver import Driver
from host_driver.hf import attention
from host_driver.hf.device import attend_on_device
from host_driver.hf.rows import RowModel, in_rows
from host_driver.hf.shape import UnsupportedModelError, placement
from host_driver.kv_table import KvTable
from kv_cache import CSD, DEVICE, DIRECT, HOST, Iteration, Policy, PolicyError
from kv_cache.iteration import IterationRunner, TierAssignment
from kv_cache.limits import TierLimits
from kv_cache.transfer.policy_thread import PolicyThread
from tests.host_driver.hf.test_adapters import MADE
from tests.host_driver.hf.test_cache import VOCABULARY, gpt2, llama, opt, qwen3, sharpen
from tests.host_driver.hf.test_device import gemma2, gpt_oss
from tests.host_driver.hf.test_layers import gemma3, qwen3_next

NEW, LONGEST = 10, 80
TIE = 1e-3  # difference of logits, whose standard deviation is about 0.3
HOMES = ((DEVICE,), (HOST,), (CSD,), (DIRECT,), (DEVICE, CSD))


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def drives(model, count: int = 2) -> Driver:
    devices = [InProcessDrive(INSTCSD_ZYNQ7045_8CH) for _ in range(count)]
    return Driver(devices, placement(model).shape, AttentionConfig.named("dense"))


def table(model, files: Path | None = None) -> KvTable:
    shape, like = placement(model).shape, next(model.parameters())
    return KvTable.for_requests(TierLimits(files=files), shape, like, LONGEST, drives(model))


def prompts(count: int = 5) -> dict[str, list[int]]:
    return {f"r{i}": torch.randint(1, VOCABULARY, (9 + 13 * i,)).tolist() for i in range(count)}


def alone(model, prompt: list[int]) -> list[int]:
    """Tokens of the model itself, until two logits are so close that rounded keys may turn them around."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    best = (logits[0].topk(2).values.tolist() for logits in out.logits)
    return tokens[: next((step for step, (first, second) in enumerate(best) if first - second < TIE), NEW)]


def check_tokens(tokens: dict[str, list[int]], wanted: dict[str, list[int]]) -> None:
    """Tokens of requests equal those of each alone."""
    assert {request: tokens[request][: len(alone)] for request, alone in wanted.items()} == wanted
    assert sum(map(len, wanted.values())) > 0.8 * NEW * len(wanted)


def served(model, kv: KvTable, given: dict[str, list[int]], homes, chunk: int = 0) -> dict[str, list[int]]:  # type: ignore[no-untyped-def]
    """Tokens of each: prompts one after the other, then all together."""
    rows = RowModel(model, kv)
    placed = homes if isinstance(homes, TierAssignment) else TierAssignment(homes)
    tokens: dict[str, list[int]] = {}
    with in_rows(model):
        for request, prompt in given.items():
            for at in range(0, len(prompt), chunk or len(prompt)):
                logits = rows.forward({request: prompt[at : at + (chunk or len(prompt))]}, placed)
            tokens[request] = [int(logits[0].argmax())]
        for _ in range(NEW - 1):
            logits = rows.forward({request: token[-1:] for request, token in tokens.items()}, placed)
            for token, row in zip(tokens.values(), logits, strict=True):
                token.append(int(row.argmax()))
            kv.runner.table.check()
    return tokens


@pytest.mark.parametrize("make", [opt, llama, qwen3, gpt2])
@pytest.mark.parametrize("chunk", [0, 7])
def test_rows_of_layer_in_different_tiers_equal_alone(tmp_path, make, chunk) -> None:
    model, inputs = sharpen(make()), prompts()
    wanted = {request: alone(model, prompt) for request, prompt in inputs.items()}
    kv = table(model, tmp_path)
    tokens = served(model, kv, inputs, lambda request, layer: HOMES[(int(request[1:]) + layer) % 5], chunk)
    check_tokens(tokens, wanted)
    assert kv.real.moved["device>csd"] and kv.real.moved["device>direct"] and kv.real.moved["device>host"]
    assert model.config._attn_implementation == "sdpa"
    kv.close()
    assert kv.runner.table.used.total() == 0
    assert {request: alone(model, prompt) for request, prompt in inputs.items()} == wanted  # the model is as it was


TERMS = {"gpt_oss": gpt_oss, "gemma2": gemma2, "gemma3": gemma3, "bloom": MADE["bloom, 6 heads"]}
TERMS |= {"mpt": MADE["mpt, 6 heads"], "falcon": MADE["falcon, 2 of 6"], "gptj": MADE["gptj"]}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("chunk", [0, 7])
def test_logit_terms_and_windows_work_in_every_tier(tmp_path, name, chunk) -> None:
    """Homes go round by layer, so that each of the two in tiers is everywhere, and in two tiers at once."""
    model, given = sharpen(TERMS[name]()), prompts()
    wanted = {request: alone(model, prompt) for request, prompt in given.items()}
    kv = table(model, tmp_path)
    tokens = served(model, kv, given, lambda request, layer: HOMES[(int(request[1:]) + layer) % 5], chunk)
    check_tokens(tokens, wanted)
    windows = getattr(model.config, "layer_types", []).count("sliding_attention")
    assert len(kv.windows) == len(given) * windows
    for request in given:
        kv.free([request])
    assert not kv.windows
    kv.close()
    assert {request: alone(model, prompt) for request, prompt in given.items()} == wanted  # the model is as it was


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "bloom"])
def test_row_in_two_tiers_is_attended_as_one(name, monkeypatch) -> None:
    """For tokens on the device and others in drives: in double precision, a sink counted once, distances over both."""
    kept, seen = [], []
    merge = attention.merge

    def noted(outputs, weights):
        kept.append(merge(outputs, weights)[0])
        return merge(outputs, weights)

    monkeypatch.setattr(attention, "merge", noted)
    whole = attention._Attention.stored_rows

    def compared(self, query, key, value):
        asked = self.terms
        out = whole(self, query, key, value)
        if query.shape[2] == 1:
            kv, layer = self.kv, self.layer.number
            stored = [kv.stored(e) for e in kv.blocks("r0", layer)[:-1]]
            with kv.drives.together(["r0"], 1) as (batch, numbers):
                stored.append(kv.drives.driver.read(batch, numbers, layer))
            each = (torch.cat([torch.as_tensor(rows) for rows in part]).double() for part in zip(*stored, strict=True))
            keys, values = (rows.transpose(0, 1)[None] for rows in each)
            terms = asked | {"is_causal": True}
            exact = attend_on_device(self.module, query.half().double(), keys, values, None, terms)
            seen.append(float((out.transpose(1, 2) - exact).abs().max() / exact.abs().max()))
        return out

    monkeypatch.setattr(attention._Attention, "stored_rows", compared)
    model = sharpen(TERMS[name]())
    kv = table(model)
    served(model, kv, prompts(1), lambda request, layer: (DEVICE, CSD))
    assert len(kept) == len(seen) == len(kv.runner.layers) * (NEW - 1)
    assert max(seen) < 2e-3
    kv.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(qwen3_next, "linear_attention")],
)
def test_models_with_unsupported_rows_are_refused(make, reason) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        RowModel(make(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", [CSD, DEVICE])
def test_step_in_which_no_block_moves_equals_the_program(monkeypatch, tier) -> None:
    """The table has the same state, and requests the same tokens."""
    model, inputs, states, programs = sharpen(llama()), prompts(3), [], []
    start = PolicyThread.start
    monkeypatch.setattr(PolicyThread, "start", lambda thread, run: programs.append(start(thread, run)))
    placed = TierAssignment(lambda request, layer: (tier,), placed=inputs.keys(), only_tier=tier)
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr(IterationRunner, "grow_in_place", lambda *_: False)
        kv = table(model)
        programs.clear()
        tokens = served(model, kv, inputs, placed)
        entries = kv.runner.table.entries.items()
        blocks = {block: (entry.tokens, entry.used, kv.runner.table.tiers_of(block)) for block, entry in entries}
        states.append((tokens, blocks, kv.runner.table.used, kv.runner.table.peak, kv.runner.iterations))
        assert len(programs) == (0 if in_place and tier == CSD else len(inputs)) + (0 if in_place else NEW - 1)
        kv.close()
    in_place, program = ([state if number != 3 else state[tier] for number, state in enumerate(one)] for one in states)
    assert in_place == program


def test_rows_without_drives_keep_dtype_of_model(tmp_path) -> None:
    model, inputs = sharpen(llama()), prompts()
    shape, like = placement(model).shape, next(model.parameters())
    one = KvTable.for_requests(TierLimits(), shape, like, LONGEST).format.row_bytes * LONGEST  # of a layer
    kv = KvTable.for_requests(TierLimits(device=2 * one, host=3 * one, files=tmp_path), shape, like, LONGEST)
    assert kv.format.value_dtype == like.dtype
    tokens = served(model, kv, inputs, lambda request, layer: (HOST,))
    check_tokens(tokens, {request: alone(model, prompt) for request, prompt in inputs.items()})
    peak = kv.runner.table.peak
    assert peak[DEVICE] <= 2 * one and peak[HOST] <= 3 * one and peak[DIRECT] > 0
    kv.close()


def test_tiers_of_rows_change_during_serving(tmp_path) -> None:
    model, inputs, draw = sharpen(llama()), prompts(), random.Random(3)
    homes: dict[tuple[str, int], tuple[str, ...]] = {}
    kv = table(model, tmp_path)
    iteration = kv.iteration

    def changed(new, wanted):  # type: ignore[no-untyped-def]
        homes.update({(r, layer): draw.choice(HOMES) for r in inputs for layer in range(len(kv.runner.layers))})
        return iteration(new, wanted)

    kv.iteration = changed  # type: ignore[method-assign]
    tokens = served(model, kv, inputs, lambda request, layer: homes[request, layer])
    check_tokens(tokens, {request: alone(model, prompt) for request, prompt in inputs.items()})
    kv.close()


def test_failed_forward_leaves_other_requests() -> None:
    model = sharpen(llama())
    like = next(model.parameters())
    kv = KvTable.for_requests(
        TierLimits(device=40 * KvTable.for_requests(TierLimits(), placement(model).shape, like, 1).format.row_bytes),
        placement(model).shape,
        like,
        64,
    )
    rows, prompt, in_host = RowModel(model, kv), prompts(1)["r0"], TierAssignment(lambda request, layer: (HOST,))
    with in_rows(model):
        first = rows.forward({"a": prompt}, in_host)
        with pytest.raises(PolicyError, match="device is full"):
            rows.forward({"b": [1] * 50}, in_host)
        kv.free(["b"])
        with pytest.raises(PolicyError, match="65 tokens: must be at most max_tokens = 64"):
            rows.forward({"a": [1] * (65 - len(prompt))}, in_host)
        tokens = [int(first.argmax())]
        for _ in range(NEW - 1):
            tokens.append(int(rows.forward({"a": tokens[-1:]}, in_host).argmax()))
    check_tokens({"a": tokens}, {"a": alone(model, prompt)})
    assert kv.requests() == {"a"}
    kv.close()


def test_a_request_is_freed_in_drives_as_a_whole(monkeypatch) -> None:
    """And not by a cut of each layer of each block, which would take a command each."""
    model, sent = sharpen(llama()), list[str]()
    kv = table(model)
    with in_rows(model):
        RowModel(model, kv).forward(prompts(1), TierAssignment(lambda request, layer: (CSD,)))
    kv.real.settle()
    assert len(kv.real.frames) == len(kv.runner.layers) and kv.drives
    submit = Driver._submit
    monkeypatch.setattr(
        Driver, "_submit", lambda self, commands, ns: sent.extend(map(kind, commands)) or submit(self, commands, ns)
    )
    kv.free(["r0"])
    assert sent == ["KvFree"] * len(kv.drives.driver.devices) and not kv.drives.sequences
    kv.close()


class Broken(Policy):
    def layers(self, it: Iteration) -> None:
        raise KeyError("mine")


def test_error_of_a_policy_has_its_name() -> None:
    model = sharpen(llama())
    shape, like = placement(model).shape, next(model.parameters())
    kv = KvTable.for_requests(TierLimits(), shape, like, LONGEST, policy=Broken())
    with in_rows(model), pytest.raises(PolicyError, match="policy Broken: KeyError: 'mine'"):
        RowModel(model, kv).forward(prompts(1), TierAssignment(lambda request, layer: (DEVICE,)))
    kv.close()


def kind(command: object) -> str:
    return type(command).__name__


def test_a_model_without_positions_is_refused() -> None:
    model = llama()
    model.forward = lambda input_ids, cache=None: None
    with pytest.raises(UnsupportedModelError, match="takes no position_ids"):
        RowModel(model, None)  # type: ignore[arg-type]


def test_failed_forward_abandons_its_iteration():
    """Else the next one would find copies of the one before."""
    done = []
    kv = SimpleNamespace(
        drives=None,
        begin=lambda new, assignment: done.append("begin"),
        finish=lambda: done.append("finish"),
        runner=SimpleNamespace(abandon=lambda: done.append("runner")),
        _policy_thread=SimpleNamespace(abandon=lambda: done.append("policy thread")),
    )
    kv.abandon = lambda: KvTable.abandon(kv)
    with pytest.raises(RuntimeError, match="failed"), KvTable.iteration(kv, {"r": 1}, None):
        raise RuntimeError("failed")
    assert done == ["begin", "runner", "policy thread"]
