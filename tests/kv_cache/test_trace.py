"""Traces: three file formats, one-line errors, and the generator.

partner of: kv_cache/trace.py
"""

import json
from pathlib import Path

import numpy as np
import pytest

from kv_cache.trace import generate, load

MOONCAKE = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
ORBITFLOW = {
    "32k_lambda2.0x_cv1": {
        "slo_base_blocks": 611,
        "requests": [
            {"input_tokens": 9, "output_tokens": 2, "arrival_step": 7},
            {"input_tokens": 5, "output_tokens": 3, "arrival_step": 0},
        ],
    },
    "32k_lambda5.0x_cv1": {"requests": [{"input_tokens": 1, "output_tokens": 1, "arrival_step": 0}]},
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_splitwise_csv_is_read(tmp_path):
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
    trace = load(written(tmp_path, "conv.csv", text))
    assert [(each.arrival, each.input_tokens, each.output_tokens) for each in trace.requests] == [
        (0.0, 374, 44),
        (4.314579, 396, 109),
    ]
    assert trace.unit == "s" and trace.requests[0].tokens == 374 + 43


def test_mooncake_has_hashes_of_its_blocks_and_milliseconds(tmp_path):
    trace = load(written(tmp_path, "m.jsonl", MOONCAKE + MOONCAKE.replace('"timestamp": 0', '"timestamp": 1500')))
    assert trace.requests[0].hashes == (0, 1) and trace.block_tokens == 512
    assert trace.requests[1].arrival == 1.5
    assert len(trace.head(1).requests) == 1 and trace.head(0) is trace


def test_orbitflow_is_sorted_and_counts_engine_steps(tmp_path):
    path = written(tmp_path, "o.json", json.dumps(ORBITFLOW))
    trace = load(path, "lambda2.0x")
    assert trace.unit == "steps" and trace.slo_tokens == 611 * 16
    assert [each.arrival for each in trace.requests] == [0, 7]
    seconds = trace.in_seconds(0.5)
    assert [each.arrival for each in seconds.requests] == [0, 3.5] and seconds.unit == "s"
    assert seconds.in_seconds(9) is seconds and seconds.slo_tokens == trace.slo_tokens
    assert load(path, "5.0").name == "32k_lambda5.0x_cv1"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "arrived_at,num_prefill_tokens\n0,1\n", "line 2: .*num_decode_tokens"),
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0,0,1\n", "line 2: num_prefill_tokens"),
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n3,1,1\n2,1,1\n", "request 1 arrives before"),
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n", "has no requests"),
        ("a.jsonl", "{\n", "line 1 is not valid JSON"),
        ("a.jsonl", '{"timestamp": 0}\n', "line 1: .*input_length"),
        ("a.json", "[]", "an object of traces"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", '{"x": {}}', "has no list `requests`"),
        ("a.json", '{"x": {"requests": [{"input_tokens": 1}]}}', r"requests\[0\]: .*output_tokens"),
        ("a.json", '{"x": {"slo_base_blocks": 0, "requests": []}}', "slo_base_blocks = 0"),
    ],
)
def test_invalid_trace_is_one_line_error(tmp_path, name, text, says):
    with pytest.raises(ValueError, match=says) as raised:
        load(written(tmp_path, name, text))
    assert "\n" not in str(raised.value)


def test_missing_trace_file_or_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="must be one of 32k_lambda2"):
        load(written(tmp_path, "o.json", json.dumps(ORBITFLOW)), "lambda9")


@pytest.mark.parametrize("cv", [None, 0.5, 1.0, 4.0])
def test_generated_gaps_have_their_rate_and_spread(cv):
    trace = generate(40_000, 2.0, (16, 64), (8, 512), cv, seed=3, longest=400)
    gaps = np.diff([each.arrival for each in trace.requests])
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv or 1.0, rel=0.25)
    assert all(16 <= each.input_tokens <= 64 and 1 <= each.output_tokens <= 400 - 16 for each in trace.requests)


def test_device_without_end_is_refused():
    with pytest.raises(ValueError, match="is a device, not a file"):
        load(Path("/dev/zero"))
