"""Accuracy runs: every difference is caused by the method, all of it is measured, and nothing is counted twice.

partner of: eval/accuracy/accuracy.py, eval/accuracy/batch.py, eval/accuracy/plan.py, eval/accuracy/prefilled.py
"""

import json
from types import SimpleNamespace

import pytest
import torch

import vcsd
from csd_spec import CompressionBudget
from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.accuracy import scores_over_compression
from vcsd_eval.accuracy.batch import _generated
from vcsd_eval.accuracy.data import find
from vcsd_eval.accuracy.measure import measure_accuracy
from vcsd_eval.accuracy.plan import MeasurementPlan, contenders
from vcsd_eval.accuracy.prefilled import Prefilled
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.accuracy.tasks import Sample, Task
from vcsd_eval.accuracy.tasks.language import FORCED
from vcsd_eval.partial_results import ResultCache
from vcsd_eval.plot import save_figure

END = 255  # a token
PROMPTS = [list(b"one, two, three, four, one, two, three,"), list(b"one, two, three, four, five, six, one, two,")]


@pytest.fixture(scope="module")
def model():
    return load(CHECKPOINT)


def plan(task="wikitext", methods="dense,sparf", compressions=(8.0,), **changes):
    options = {"data": TEXT, "convention": "bytes", "samples": 2, "drives": 2, "max_context": 640, "seed": 0}
    return MeasurementPlan(
        task=task, methods=tuple(contenders(methods)), compressions=compressions, **(options | changes)
    )


def greedy(prefilled, steps):
    tokens = []

    def choose(step, logits):
        tokens.append(logits.argmax(-1))
        return tokens[-1]

    prefilled.decode(steps, choose)
    return torch.stack(tokens, 1)


@torch.inference_mode()
def test_decode_from_prefill_equals_generate_repeatedly(model):
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model[0].generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :])
    with vcsd.attach(model[0], drives=2, method="dense", compression=1) as csd:
        prefilled = Prefilled(model[0], PROMPTS)
        first = greedy(prefilled, 12)
        csd.set_method("local", CompressionBudget(16))
        other = greedy(prefilled, 12)
        csd.set_method("dense", CompressionBudget(1))
        again = greedy(prefilled, 12)
    assert torch.equal(first, torch.stack(expected))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_sparf_equals_sparq_and_compression_1_is_dense(model):
    result = measure_accuracy(*model, plan(methods="dense,sparf,sparq,ours", compressions=(1.0, 4.0)))
    rows = {(row["method"], row["compression"], row["metric"]): row for row in result["rows"]}
    for c in (1.0, 4.0):
        for metric in ("bits_per_byte", "perplexity", "top1_agreement", "kl_to_dense"):
            sparf, sparq = rows["sparf", c, metric], rows["sparq", c, metric]
            assert sparf["sample_values"] == sparq["sample_values"]
            assert sparf["pages_share"] > sparq["pages_share"] or c == 1
            assert sparf["ci_low"] <= sparf["value"] <= sparf["ci_high"]
    dense = rows["dense", 1.0, "bits_per_byte"]["value"]
    assert rows["sparf", 1.0, "bits_per_byte"]["value"] == pytest.approx(dense, abs=2e-3)
    assert rows["dense", 1.0, "kl_to_dense"]["value"] == 0
    assert rows["dense", 1.0, "top1_agreement"]["value"] == 1
    assert rows["dense", 1.0, "bits_per_byte"]["bytes_share"] == pytest.approx(1, abs=0.2)
    assert rows["sparf", 4.0, "kl_to_dense"]["value"] > 0
    assert rows["sparf", 4.0, "bits_per_byte"]["bytes_share"] < 0.3
    json.dumps(result)


def test_bits_per_byte_equal_model_loss(model):
    result = measure_accuracy(*model, plan(methods="dense"))
    (row,) = (row for row in result["rows"] if row["metric"] == "bits_per_byte")
    ids = list(TEXT.read_bytes())[:640]
    with torch.inference_mode():
        logs = torch.log_softmax(model[0](input_ids=torch.tensor([ids])).logits[0].float(), -1)
    nats = -logs[-1 - FORCED : -1].gather(1, torch.tensor(ids[-FORCED:])[:, None]).mean()
    assert row["sample_values"][0] == pytest.approx(float(nats) / 0.6931472, abs=2e-3)
    assert result["reference_bits_per_byte"] == pytest.approx(row["value"], rel=2e-3)


def test_reference_is_by_plain_transformers(model):
    """The mean over the windows of the result of one forward pass without a cache and without drives."""
    result = measure_accuracy(*model, plan(methods="local"))
    ids, nats = list(TEXT.read_bytes()), []
    for start in (0, len(ids) - 640):
        window = ids[start : start + 640]
        with torch.inference_mode():
            logs = torch.log_softmax(model[0](input_ids=torch.tensor([window])).logits[0].double(), -1)
        nats.append(-logs[-1 - FORCED : -1].gather(1, torch.tensor(window[-FORCED:])[:, None]).mean())
    assert result["reference_bits_per_byte"] == pytest.approx(float(sum(nats)) / 2 / 0.69314718, rel=1e-5)
    assert {row["method"] for row in result["rows"]} == {"local"}
    assert not any("reference" in row["metric"] for row in result["rows"])


def test_dense_on_wikitext_is_within_one_percent_of_transformers(model, data_dir):
    result = measure_accuracy(*model, plan(methods="dense", data=find("wikitext"), samples=3))
    (row,) = (row for row in result["rows"] if row["metric"] == "bits_per_byte")
    assert row["value"] == pytest.approx(result["reference_bits_per_byte"], rel=0.01)
    assert data_dir in find("wikitext").parents


def test_data_is_found_by_its_usual_name(model, tmp_path, monkeypatch):
    (tmp_path / "wiki.test.raw").write_bytes(TEXT.read_bytes())
    monkeypatch.delenv("VCSD_DATA", raising=False)
    with pytest.raises(ValueError, match=r"--data is needed: a text.*VCSD_DATA"):
        measure_accuracy(*model, plan(methods="dense", data=None))
    monkeypatch.setenv("VCSD_DATA", str(tmp_path))
    result = measure_accuracy(*model, plan(methods="dense", data=None, samples=1))
    assert result["rows"][0]["rule"].startswith("prefix of")


def test_text_ends_with_its_end_token(model):
    """Tokens after the end-of-text token do not count, and the other texts continue."""
    task = Task(lambda *_: ([], ""), lambda sample, text: {"length": len(text)}, binary=frozenset())
    samples = [Sample(PROMPTS[0], ("x",), 8), Sample(PROMPTS[1], ("x",), 4)]
    tokens = iter([list(b"ab"), list(b"cd"), [END, ord("e")], list(b"fg"), list(b"hi")])

    class Scripted:
        def decode(self, steps, choose):
            assert steps == 8
            for step, now in enumerate(tokens):
                logits = torch.zeros(2, 300).scatter_(1, torch.tensor(now)[:, None], 1.0)
                if choose(step, logits) is None:
                    return
            raise AssertionError("both texts have ended")

    tokenizer = SimpleNamespace(eos_token_id=END, decode=lambda ids, **_: bytes(ids).decode())
    assert _generated(Scripted(), samples, tokenizer, task) == ["ac", "bdeg"]
    assert next(tokens) == list(b"hi")


def test_killed_run_continues_with_same_result(model, tmp_path):
    whole = measure_accuracy(*model, plan("passkey", "dense,local,sparf", samples=9, max_context=1100))
    ticks = []

    def killed(_):
        ticks.append(1)
        if len(ticks) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_accuracy(*model, plan("passkey", "dense,local,sparf", samples=9, max_context=1100), tmp_path, killed)
    (left,) = tmp_path.iterdir()
    with left.open("a") as file:
        file.write('["1 Trial(')  # killed while writing
    assert len(list(ResultCache(left).values())) == 4
    rest = []
    done = measure_accuracy(
        *model, plan("passkey", "dense,local,sparf", samples=9, max_context=1100), tmp_path, rest.append
    )
    assert done == whole
    assert len(rest) == 6
    assert not list(tmp_path.iterdir())


def test_checkpoint_of_other_settings_is_not_used(model, tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    for changes in ({}, {"seed": 1}, {"drives": 1}, {"max_context": 1101}):
        with pytest.raises(KeyboardInterrupt):
            measure_accuracy(*model, plan("passkey", "dense", **({"max_context": 1100} | changes)), tmp_path, stop)
    assert len(list(tmp_path.iterdir())) == 4


def test_plot_has_every_method(model, tmp_path):
    result = measure_accuracy(*model, plan("passkey", "dense,local", (2.0, 8.0), max_context=1100))
    save_figure(scores_over_compression(result), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "local" in text
    assert "accuracy" in text


def test_invalid_measurement_is_refused(model):
    with pytest.raises(ValueError, match="method = 'fast': must be one of"):
        contenders("dense,fast")
    with pytest.raises(ValueError, match="task = 'chess': must be one of squad"):
        plan("chess")
    with pytest.raises(ValueError, match=r"compression = 0\.5"):
        plan(compressions=(0.5,))
    with pytest.raises(ValueError, match="max_context = 99999: the model's context is"):
        measure_accuracy(*model, plan(max_context=99_999))
