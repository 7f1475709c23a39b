"""Traces as publishers, load generators, pandas and spreadsheets write them, and one-line errors for all others.

partner of: kv_cache/trace_file.py
"""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from kv_cache.trace_file import ARRIVALS, INPUTS, OUTPUTS, load
from vcsd_cli import main as cli

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
AIPERF = """\
{"metadata": {"session_num": 1, "turn_index": 0, "request_start_ns": 1759813207532900363, "request_end_ns": \
1759813207838764604, "was_cancelled": false}, "metrics": {"input_sequence_length": {"value": 550, "unit": "tokens"}, \
"output_token_count": {"value": 9, "unit": "tokens"}, "output_sequence_length": {"value": 12, "unit": "tokens"}, \
"inter_chunk_latency": {"value": [4.8, 5.3], "unit": "ms"}}, "error": null}
{"metadata": {"session_num": 2, "request_start_ns": 1759813207000000000, "was_cancelled": true}, "metrics": \
{"error_isl": {"value": 550, "unit": "tokens"}}, "error": {"code": 499, "type": "RequestCancellationError"}}
{"metadata": {"session_num": 0, "request_start_ns": 1759813206532900363}, "metrics": {"input_sequence_length": \
{"value": 20, "unit": "tokens"}, "output_sequence_length": {"value": 3, "unit": "tokens"}}, "error": null}
"""
GUIDELLM = {
    "metadata": {"version": 1},
    "benchmarks": [
        {
            "start_time": 1.0,
            "requests": {
                "successful": [
                    {
                        "type_": "generative_request_stats",
                        "info": {"timings": {"request_start": 1757000000.25}},
                        "input_metrics": {"text_tokens": 128},
                        "request_start_time": 1757000000.25,
                        "request_end_time": 1757000002.0,
                        "prompt_tokens": 128,
                        "output_tokens": 64,
                        "total_tokens": 192,
                    },
                    {"request_start_time": 1757000000.75, "prompt_tokens": 130, "output_tokens": 60},
                ],
                "incomplete": [{"request_start_time": 1757000001.0, "prompt_tokens": 1, "output_tokens": None}],
                "errored": [],
            },
        }
    ],
}
VLLM = {
    "date": "20251127-120000",
    "backend": "vllm",
    "num_prompts": 3,
    "request_rate": 2.0,
    "input_lens": [512, 300, 128],
    "output_lens": [64, 0, 32],
    "ttfts": [0.1, 0.0, 0.2],
    "itls": [[0.01], [], [0.02]],
    "start_times": [78012.5, 78012.75, 78013.0],
    "errors": ["", "timeout", ""],
}
# Samples of published files and of files that tools write, and the requests in them: arrival in s, prompt, output
SAMPLES = {
    "azure-2023.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n",
        [(0, 374, 44), (4.314579, 396, 109)],
    ),
    "azure-2024.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:00.017335+00:00,2399,6\n2024-05-10 00:00:01+00:00,1,6\n",
        [(0, 2162, 5), (0.007405, 2399, 6), (0.99007, 1, 6)],
    ),
    "splitwise.csv": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n",
        [(0, 374, 44), (4.314579, 396, 109)],
    ),
    "pandas.csv": (
        ",arrived_at,num_prefill_tokens,num_decode_tokens\n0,5e-05,374.0,44\n1,1.00005,396.0,109\n",
        [(0, 374, 44), (1, 396, 109)],
    ),
    "mooncake.jsonl": (
        '{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n\n'
        '{"timestamp": 2500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n',
        [(0, 6758, 500), (1.5, 7322, 490)],
    ),
    "mooncake-floats-no-hashes.jsonl": (
        '{"timestamp": 0.5, "input_length": 6, "output_length": 5}\n'
        '{"timestamp": 250.5, "input_length": 7, "output_length": 4, "session_id": "a"}\n',
        [(0, 6, 5), (0.25, 7, 4)],
    ),
    "mooncake-by-pandas.csv": (
        'timestamp,input_length,output_length,hash_ids\n0,1000,5,"[0, 1]"\n3000,1000,5,"[0, 2]"\n',
        [(0, 1000, 5), (3, 1000, 5)],
    ),
    "bailian.jsonl": (
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, '
        '"type": "text", "turn": 1, "hash_ids": [1089, 1090]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.114, "input_length": 600, "output_length": 9, '
        '"type": "text", "turn": 2, "hash_ids": [1089]}\n',
        [(0, 521, 132), (1, 600, 9)],
    ),
    "burstgpt.csv": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n118.5,GPT-4,417,276,693,API log\n",
        [(0, 472, 18), (113.5, 417, 276)],
    ),
    "aiperf.jsonl": (AIPERF, [(0, 20, 3), (1, 550, 12)]),
    "guidellm.json": (json.dumps(GUIDELLM, indent=2), [(0, 128, 64), (0.5, 130, 60)]),
    "vllm-bench.json": (json.dumps(VLLM), [(0, 512, 64), (0.5, 128, 32)]),
    "excel-german.csv": (
        "\ufeffStart time (ms);Prompt tokens;Output tokens;Note\r\n0,5;10;5;\r\n1000,5;20;6;x\r\n",
        [(0, 10, 5), (1, 20, 6)],
    ),
    "excel-sep.csv": (
        "sep=;\r\nprompt_tokens;completion_tokens;created\r\n10;5;1715299200\r\n",
        [(0, 10, 5)],
    ),
    "quoted.csv": (
        '"Output Tokens","Request Tokens"," Timestamp_MS ","Prompt, first line"\n"5","10","1715299200000","a\nb"\n'
        '"6","11","1715299200250",""\n',
        [(0, 10, 5), (0.25, 11, 6)],
    ),
    "epoch-ms.tsv": ("time\tisl\tosl\n1715299200000\t10\t5\n1715299201500\t11\t6\n", [(0, 10, 5), (1.5, 11, 6)]),
    "iso.csv": (
        "created_at,input_tokens,output_tokens\n2024-05-10T02:00:01+02:00,2,1\n2024-05-10T00:00:00Z,1,1\n",
        [(0, 1, 1), (1, 2, 1)],
    ),
    "log.json": (
        '[{"created": 1715299200, "model": "m", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}]',
        [(0, 7, 3)],
    ),
    "frame.json": (
        '{"arrived_at":{"0":0.5,"1":1.0},"num_prefill_tokens":{"0":7,"1":8},"num_decode_tokens":{"0":3,"1":4}}',
        [(0, 7, 3), (0.5, 8, 4)],
    ),
}
SPLITWISE = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
MALFORMED = [
    ("a.csv", "", "is empty"),
    ("a.csv", SPLITWISE, "has no requests"),
    (
        "a.csv",
        "arrived_at,num_prefill_tokens\n0,1\n",
        r"line 2: no column for output \(.*there are: arrived_at, num_pr",
    ),
    ("a.csv", "a,b\n0,1\n", r"line 2: no column for arrival \(.*, prompt \(.*, output \(.*; there are: a, b$"),
    ("a.csv", "0.0,374,44\n1.0,3,4\n", "line 1: has no names of columns, but '0.0,374,44': add a header"),
    ("a.csv", SPLITWISE + "0,0,1\n", "line 2: num_prefill_tokens = '0': must be a whole number of tokens, 1 to"),
    ("a.csv", SPLITWISE + "0,5,1\n1,5.5,1\n", "line 3: num_prefill_tokens = '5.5': must be a whole number"),
    ("a.csv", SPLITWISE + "0,5,-1\n", "line 2: num_decode_tokens = '-1': must be a whole number"),
    ("a.csv", SPLITWISE + "0,5,many\n", "line 2: num_decode_tokens = 'many': must be a number"),
    ("a.csv", SPLITWISE + "0,5,\n", "line 2: num_decode_tokens is empty"),
    ("a.csv", SPLITWISE + "0,1_000,5\n", "line 2: num_prefill_tokens = '1_000': must be a number"),
    ("a.csv", SPLITWISE + "nan,5,5\n", "line 2: arrived_at = 'nan': must be an ISO date"),
    ("a.csv", SPLITWISE + "0,5,5\n5/10/2024 13:05,5,5\n", "line 3: arrived_at = '5/10/2024 13:05': must be a number"),
    ("a.csv", SPLITWISE + "0,5,0\n", "has no requests with output tokens"),
    ("a.csv", SPLITWISE + "0,5\n", "line 2: has 2 cells, the header 3"),
    ("a.csv", SPLITWISE + "0,5,5,7\n", "line 2: has 4 cells, the header 3"),
    ("a.csv", SPLITWISE + '0,5,"5\n', "line 2: is not CSV"),
    ("a.csv", SPLITWISE + "0,5,5\n1e12,5,5\n", "arrived_at: covers 1e.12 s: the unit is wrong, or an arrival"),
    ("a.csv", "PK\x03\x04\udcff", "is not a text file: save it as CSV"),
    ("a.csv.gz", "\x1f\udc8bx", "is a damaged gzip file"),
    ("a.jsonl", "{\n", "line 1: is not valid JSON"),
    ("a.jsonl", '{"timestamp": 0}\n', "line 1: no column for prompt .*, output .*; there are: timestamp"),
    ("a.jsonl", "[1]\n", r"line 1: must be an object with columns, not \[1\]"),
    (
        "a.jsonl",
        '{"timestamp": 0, "input_length": 6, "output_length": 5}\n{"timestamp": 0, "input_length": 6}\n',
        "line 2: output_length is empty",
    ),
    (
        "a.jsonl",
        '{"timestamp": true, "input_length": 6, "output_length": 5}\n',
        "line 1: timestamp = True: must be a number",
    ),
    (
        "a.jsonl",
        '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": ["a"]}\n',
        "line 1: hash_ids = .* must be a list of whole numbers",
    ),
    ("a.json", "[]", "has no requests"),
    ("a.json", "{", "line 1: is not valid JSON"),
    ("a.json", "[" * 100_000, "is nested too deeply"),
    ("a.json", '{"x": {}}', "has no list `requests`"),
    ("a.json", '{"a": 1}', "must be a list of requests, or an object of traces by name; has a"),
    ("a.json", '{"benchmarks": [1]}', r"benchmarks\[0\]: has no list requests.successful"),
    ("a.json", '{"x": {"requests": [{"input_tokens": 1, "arrival_step": 0}]}}', r"requests\[0\]: no column for output"),
    ("a.json", '{"x": {"slo_base_blocks": 0, "requests": []}}', "slo_base_blocks = 0"),
]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def of(trace):
    return [(request.arrival, request.input_tokens, request.output_tokens) for request in trace.requests]


@pytest.mark.parametrize("name", SAMPLES)
def test_trace_of_the_wild_is_read(tmp_path, name):
    text, expected = SAMPLES[name]
    trace = load(written(tmp_path, name, text))
    rows = of(trace)
    assert [request[1:] for request in rows] == [request[1:] for request in expected]
    assert [request[0] for request in rows] == pytest.approx([request[0] for request in expected], abs=1e-6)
    assert trace.unit == "s" and [request.number for request in trace.requests] == list(range(len(rows)))


@pytest.mark.parametrize("write", [lambda text: gzip.compress(text.encode()), lambda text: text.encode("utf-16")])
def test_compressed_and_utf16_traces_are_read(tmp_path, write):
    text, expected = SAMPLES["splitwise.csv"]
    (tmp_path / "t.csv.gz").write_bytes(write(text))
    trace = load(tmp_path / "t.csv.gz")
    assert of(trace) == expected and trace.name == "t"


@pytest.mark.parametrize(
    ("name", "block"), [("mooncake.jsonl", 512), ("mooncake-by-pandas.csv", 512), ("bailian.jsonl", 16)]
)
def test_hashes_are_of_the_blocks_of_their_format(tmp_path, name, block):
    trace = load(written(tmp_path, name, SAMPLES[name][0]))
    assert trace.block_tokens == block and len(trace.requests[0].hashes) == 2
    assert load(written(tmp_path, "p.csv", SAMPLES["splitwise.csv"][0])).block_tokens == 0


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mooncake.jsonl", "read timestamp (ms), input_length, output_length"),
        ("burstgpt.csv", "read Timestamp (s), Request tokens, Response tokens; left out 1 failed requests"),
        ("iso.csv", "read created_at (ISO dates), input_tokens, output_tokens; sorted by arrival"),
        ("epoch-ms.tsv", "read time (ms), isl, osl"),
    ],
)
def test_source_says_columns_and_units(tmp_path, name, source):
    assert load(written(tmp_path, name, SAMPLES[name][0])).source.startswith(source)


def test_lengths_need_no_arrivals_and_keep_their_order(tmp_path):
    path = written(tmp_path, "lengths.csv", "prompt_tokens,output_tokens\n5,6\n1,2\n")
    assert of(load(path, arrivals=False)) == [(0, 5, 6), (0, 1, 2)]
    with pytest.raises(ValueError, match=r"no column for arrival \(.*\); there are: prompt_tokens, output_tokens"):
        load(path)


def test_orbitflow_is_sorted_and_counts_engine_steps(tmp_path):
    path = written(tmp_path, "o.json", json.dumps(ORBITFLOW))
    trace = load(path, "lambda2.0x")
    assert trace.unit == "steps" and trace.slo_tokens == 611 * 16
    assert [request.arrival for request in trace.requests] == [0, 7]
    assert len(trace.head(1).requests) == 1 and trace.head(0) is trace
    seconds = trace.in_seconds(0.5)
    assert [request.arrival for request in seconds.requests] == [0, 3.5] and seconds.unit == "s"
    assert seconds.in_seconds(9) is seconds and seconds.slo_tokens == trace.slo_tokens
    assert load(path, "5.0").name == "32k_lambda5.0x_cv1"


@pytest.mark.parametrize(("name", "text", "says"), MALFORMED)
def test_malformed_trace_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, name, text, says):
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError, match=says):
        load(path)
    monkeypatch.setattr(
        sys, "argv", ["vcsd", "eval", "serving", "--trace", str(path), "--checkpoint-dir", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"vcsd: --trace: trace {path}: ")


def test_examples_and_names_of_the_docs_page_are_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs/traces.md").read_text()
    examples = re.findall(r"```(csv|json)\n(.*?)```", page, re.DOTALL)
    assert [len(load(written(tmp_path, f"t.{kind}", text)).requests) for kind, text in examples] == [2, 2, 2]
    for role, names in (("arrival", ARRIVALS), ("prompt", INPUTS), ("output", OUTPUTS)):
        (cell,) = re.findall(rf"^\| {role} \| (.*) \|$", page, re.MULTILINE)
        assert tuple(name.replace("_", "") for name in re.findall(r"`(\w+)`", cell)) == names


def test_file_that_cannot_be_read_is_named(tmp_path):
    for path, says in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no", "No such file"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(ValueError, match=f"trace {path}: .*{says}"):
            load(path)
