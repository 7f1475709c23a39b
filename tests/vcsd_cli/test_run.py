"""`vcsd run`, called by a program, and with a user's mistakes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from csd_firmware.folder import DriveFolder
from csd_io.medium import Medium
from csd_link.driveset import DriveOptions
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.vcsd_cli.test_main import PROMPT, vcsd
from vcsd_cli.run import drive_set


def test_run_json_has_every_key(capsys, monkeypatch):
    code, out, _ = vcsd(
        capsys, monkeypatch, "run", "--prompt", PROMPT, "--max-new-tokens", "12", "--drives", "3", "-o", "json"
    )
    result = json.loads(out)
    assert code == 0
    shape = {"layers": 4, "q_heads": 8, "kv_heads": 4, "head_dim": 64, "latent": False, "v_head_dim": None}
    assert result["model"] == {"name": "checkpoint"} | shape
    assert result["layers"]["in_drives"] == [0, 1, 2, 3]
    assert (result["attention"], result["convention"]) == ("sparf", "paper")
    stored = len(PROMPT) + 11
    k = -(-stored // 8)
    assert (result["r"], result["k"], result["l"]) == (8, k, -(-k // 4))
    assert len(result["tokens"]) == 12
    assert bytes(result["tokens"]).decode() == result["text"]
    assert set(result["agreement"]) == {"tokens_equal", "max_abs_logit_diff", "top1_match_rate"}
    assert result["link_bytes"]["ssd_offload_baseline_per_step"] > 100 * result["link_bytes"]["per_step"]
    assert 0 < result["flash"]["useful_read_fraction"] < 1
    assert [drive["kv_heads"] for drive in result["drives"]] == [[0], [1], [2, 3]]
    modelled = result["simulated_time"]
    assert sum(modelled["breakdown_ns"].values()) == pytest.approx(modelled["step_ns"])
    assert {"argtopk", "flash_embed", "logit0", "flash_token", "logit", "attend", "link"} <= set(
        modelled["breakdown_ns"]
    )
    assert result["wall_s"] > 0


def test_steady_step_time_equal_in_short_and_long_runs(capsys, monkeypatch):
    result = {}
    for tokens in (8, 60):
        prompt = PROMPT[: 24 * 32 + 26]  # a group of 32 tokens becomes full in the sixth step
        words = ("run", "--prompt", prompt, "--max-new-tokens", str(tokens), "--no-compare", "-o", "json")
        modelled = json.loads(vcsd(capsys, monkeypatch, *words)[1])["simulated_time"]
        (result[tokens],) = modelled["by_context"]
        assert result[tokens]["steps"] == modelled["steps"] == tokens - 1
        assert result[tokens]["steady_steps"] < result[tokens]["steps"]
        assert result[tokens]["steady_step_ns"] == modelled["steady_step_ns"]
    assert result[8]["step_ns"] > 1.2 * result[60]["step_ns"]  # a group that becomes full is a seventh of these steps
    assert result[8]["steady_step_ns"] == pytest.approx(result[60]["steady_step_ns"], rel=0.03)


def test_run_prints_text_report(capsys, monkeypatch):
    code, out, _ = vcsd(capsys, monkeypatch, "run", "--prompt", PROMPT, "--max-new-tokens", "8", "--batch", "3")
    assert code == 0
    assert out.startswith("The bundled model has 4.6 M parameters")
    assert f"\nPrompt (820 tokens):\n... {PROMPT[-160:]}\n\nContinuation:\n" in out
    for title in (
        "Agreement with ordinary attention",
        "Traffic",
        "Drives",
        "One decode step at 820 tokens",
        "Decode step over context",
        "faster than a plain SSD",
    ):
        assert title in out
    assert "Modelled time" not in out  # a method has one step time, that of the comparison


def test_short_context_is_called_too_short_to_compare(capsys, monkeypatch):
    words = ("run", "--prompt", "The drive", "--max-new-tokens", "3")
    out = vcsd(capsys, monkeypatch, *words)[1]
    assert "9 tokens are too few to compare methods" in " ".join(out.split())
    assert "Decode step over context" not in out
    assert "Modelled time" in vcsd(capsys, monkeypatch, *words, "--no-compare")[1]


def test_run_both_streams_to_one_file_text_is_whole(tmp_path):
    """Progress lines are printed all the time; none splits the text, and each is a whole line."""
    words = ["run", "--prompt", PROMPT, "--max-new-tokens", "40"]
    often = "from vcsd import progress; progress.PERIOD_S = 0.001; progress.RARER = 0"
    code = f"{often}; from vcsd_cli.main import main; main()"
    with (tmp_path / "both").open("w") as both:
        subprocess.run([sys.executable, "-c", code, *words], stdout=both, stderr=subprocess.STDOUT, check=True)
    shown = (tmp_path / "both").read_text()
    alone = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    text = alone.stdout[alone.stdout.index("Continuation:\n") : alone.stdout.index("\n\nAgreement")]
    assert len(text) >= len("Continuation:\n") + 20
    assert text in shown
    assert "decoding: 3" in alone.stderr
    lines = set(shown.replace(text, "").splitlines())
    said = [line for line in lines if line.endswith(" s") and ", " in line]
    assert all(line.startswith(("loading", "decoding", "ordinary", "timing", "compiling")) for line in said)


def test_run_json_has_step_times_of_methods(capsys, monkeypatch):
    words = ("run", "--prompt", PROMPT, "-o", "json", "--max-new-tokens")
    short, long = (
        json.loads(vcsd(capsys, monkeypatch, *words, tokens)[1])["step_comparison"] for tokens in ("9", "12")
    )
    assert short == long  # independent of the run's length
    assert short["context_tokens"] == len(PROMPT)
    times = short["step_times_ns"]
    assert set(times) == set(short["output_errors"]) == {"dense", "sparf", "ours", "plain_ssd"}
    assert all(ns > 0 for ns in times.values())
    assert short["left_out"] == {}
    _, out, _ = vcsd(capsys, monkeypatch, *words, "3", "--no-compare")
    assert json.loads(out)["step_comparison"] is None


def test_sparf_and_sparq_differ_only_in_bytes(capsys, monkeypatch):
    results = []
    for method in ("sparf", "sparq"):
        args = (
            "run",
            "--prompt",
            PROMPT,
            "--sparf-channels",
            "8",
            "--sparf-tokens",
            "64",
            "--sparf-recent",
            "16",
            "--max-new-tokens",
            "30",
        )
        _, out, _ = vcsd(capsys, monkeypatch, *args, "--method", method, "-o", "json")
        results.append(json.loads(out))
    sparf, sparq = results
    assert sparf["tokens"] == sparq["tokens"]
    assert sparf["agreement"] == sparq["agreement"]
    assert sparq["flash"]["useful_read_fraction"] == 1 > sparf["flash"]["useful_read_fraction"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--model", "/nowhere"], "no model at /nowhere"),
        (["--drives", "0"], "--drives"),
        (["--drives", "5"], "4 KV heads"),
        (["--compression", "0.5"], "--compression"),
        (["--compression", "nan"], "--compression"),
        (["--sparf-channels", "65", "--sparf-tokens", "8"], "r = 65"),
        (["--sparf-channels", "8"], "--sparf-tokens"),
        (["--sparf-channels", "8", "--sparf-tokens", "8", "--sparf-recent", "9"], "l = 9"),
        (["--sparf-channels", "8", "--sparf-tokens", "8", "--compression", "2"], "exclude"),
        (["--prompt", "x" * 4000], "context of 4096"),
        (["--prompt", ""], "empty"),
        (["--prompt", "  \n"], "empty"),
        (["--prompt", "x", "--prompt-file", "y"], "exclude"),
        (["--prompt-file", "/nowhere.txt"], "/nowhere.txt"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--batch", "0"], "--batch"),
        (["--method", "magic"], "magic"),
        (["--drives", "two"], "--drives"),
        (["--layout", "9"], "--layout"),
        (["--layout", "latent"], "V is not a part of K"),
        (["--kv-dtype", "fp4"], "--kv-dtype"),
        (["--method", "sparf", "--layout", "progressive"], "use progressive-exact"),
        (["--method", "ours", "--layout", "int4"], "layout int4 has one precision, use layout progressive"),
        (["--methods-file", "/nowhere.py"], "/nowhere.py"),
        (["--device", "abacus"], "abacus"),
        (["--colour"], "colour"),
    ],
)
def test_invalid_input_is_one_line_on_stderr_only(capsys, monkeypatch, args, reason):
    code, out, err = vcsd(capsys, monkeypatch, "run", *args)
    assert code != 0
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert reason in err


def test_prompt_file_that_is_no_text_is_refused(capsys, monkeypatch, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    code, out, err = vcsd(capsys, monkeypatch, "run", "--prompt-file", str(tmp_path / "binary"))
    assert code and not out
    assert "not UTF-8" in err


def test_broken_model_folder_is_one_line_error(capsys, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    code, out, err = vcsd(capsys, monkeypatch, "run", "--model", str(tmp_path))
    assert (code != 0, out) == (True, "")
    assert len(err.strip().splitlines()) == 1


def test_flush_durability_host_syncs_records(capsys, monkeypatch, tmp_path):
    synced, original = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), original(fd)))
    counts = []
    for durability in ("process", "host"):
        words = ("--prompt", PROMPT, "--max-new-tokens", "2", "--no-compare", "--data-dir", str(tmp_path / durability))
        assert vcsd(capsys, monkeypatch, "run", *words, "--durability", durability, "-o", "json")[0] == 0
        counts.append(len(synced))
    assert counts[1] > 2 * counts[0]  # `process` has those of the description alone


@pytest.mark.parametrize("medium", ["direct"])
def test_medium_changes_no_figure(capsys, monkeypatch, tmp_path, medium):
    words = ("run", "--prompt", PROMPT, "--max-new-tokens", "4", "--no-compare", "-o", "json")
    figures = []
    for more in ((), ("--medium", medium, "--data-dir", str(tmp_path), "--page-buffer-mib", "1")):
        code, out, _ = vcsd(capsys, monkeypatch, *words, *more)
        assert code == 0
        figures.append({name: value for name, value in json.loads(out).items() if name != "wall_s"})
    assert figures[0] == figures[1]


def test_file_medium_without_data_dir_is_refused(capsys, monkeypatch):
    code, _, err = vcsd(capsys, monkeypatch, "run", "--medium", "direct")
    assert code == 2 and "--medium direct: needs a folder to keep drives in" in err


def test_unknown_durability_is_refused(capsys, monkeypatch):
    code, _, err = vcsd(capsys, monkeypatch, "run", "--durability", "ever")
    assert (code, "'process', 'host'" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "nosuch"], "no model at nosuch"),
        (["--drive-config", "nosuch.yaml"], "nosuch.yaml: No such file"),
        (["--methods-file", "nosuch.py"], "nosuch.py"),
        (["--data-dir", "kept"], "holds a drive with channels = 4"),
        (["--transport", "process"], "MiB are free"),
    ],
)
def test_run_bad_input_is_refused_before_the_model_is_loaded(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    geometry = replace(INSTCSD_ZYNQ7045_8CH.geometry, channels=4)
    DriveFolder(replace(INSTCSD_ZYNQ7045_8CH, geometry=geometry), tmp_path / "kept" / "drive1").close()
    monkeypatch.setattr("vcsd.loading.load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr("csd_link.transports.process.MIN_BYTES", 1 << 60)
    code, out, err = vcsd(capsys, monkeypatch, "run", *words)
    assert code and not out and len(err.splitlines()) == 1 and says in err


@pytest.mark.parametrize("drives", [1, 2, 3])
def test_run_needs_no_memory_for_served_drives(drives, tmp_path):
    served = drive_set(DriveOptions(transport="window:served"), str(drives), None)
    assert not served.overrides
    kept = drive_set(DriveOptions(data_dir=tmp_path, medium="direct"), str(drives), None)
    assert kept.storage == Medium("direct", 256 << 20)


def test_timeline_has_the_time_of_the_last_step(capsys, monkeypatch, tmp_path):
    words = "--max-new-tokens", "3", "--no-compare", "--timeline", str(tmp_path / "step.json"), "-o", "json"
    code, out, _ = vcsd(capsys, monkeypatch, "run", *words)
    told = json.loads(out)["timeline"]
    assert code == 0 and told["step_ns"] > 0 and told["merged_slices"] == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert (
        max(round(1000 * (event["ts"] + event["dur"])) for event in events if event["name"] == "decode step")
        == told["step_ns"]
    )


def test_timeline_without_drives_is_refused(capsys, monkeypatch, tmp_path):
    words = "--policy", "auto", "--timeline", str(tmp_path / "step.json")
    code, _, err = vcsd(capsys, monkeypatch, "run", *words)
    assert (code, err.partition(", and")[0]) == (2, f"vcsd: --timeline {words[-1]}: an option of drives")
