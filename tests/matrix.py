"""The ends of the ranges in pyproject.toml, each installed in an environment of its own: `./dev test --matrix`.

Every row installs the project's wheel with `pip install`, without our constraints, and runs `vcsd run` outside of the
checkout. Rows of transformers also run the contract of tests/host_driver/hf/test_contract.py. The row of
vLLM runs the tests of its integrations, in the environment of `./dev test --real`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from host_driver.hf.shape import OLDEST_TRANSFORMERS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
CPU_TORCH = "torch==2.13.0"  # the newest of which there is a build for CPUs alone; rows of torch take gigabytes
CONTRACT = "tests/host_driver/hf/test_contract.py"
TOOLS = "hypothesis", "peft", "pytest", "pytest-timeout"  # of the contract
SHOWN = "torch", "transformers", "numpy", "numba"


@dataclass(frozen=True, slots=True)
class Row:
    """An environment.

    Attributes:
        name: Its name.
        pins: Requirements beside the wheel.
        contract: Whether the contract of transformers is run too.
    """

    name: str
    pins: tuple[str, ...]
    contract: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a row: installed versions, what ran, and the reason if it failed."""

    name: str
    versions: dict[str, str]
    ran: str
    passed: bool
    reason: str
    seconds: float


def oldest(name: str) -> str:
    """Requirement of the oldest version of a package that pyproject.toml allows."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (result[1] for requirement in requirements if (result := re.match(rf"{name}>=([\d.]+)", requirement)))
    return f"{name}=={bound}.0"


ROWS = (
    Row("newest", (CPU_TORCH,), contract=True),
    # Models need a later transformers than the integrations, whose oldest one is vLLM's
    Row(
        "oldest transformers", (CPU_TORCH, f"transformers=={'.'.join(map(str, OLDEST_TRANSFORMERS))}.0"), contract=True
    ),
    Row("oldest numpy", (CPU_TORCH, oldest("numpy"))),
    Row("oldest numba", (CPU_TORCH, oldest("numba"))),
    Row("oldest torch", (oldest("torch"),)),
    Row("newest torch", ("torch",)),
)
VLLM = "vLLM and LMCache"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join([*(row.name for row in ROWS), VLLM])}")
    parser.add_argument("-o", "--output", choices=("normal", "json"), default="normal")
    options = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in options.rows if name not in (*known, VLLM)]:
        parser.error(f"{unknown[0]}: must be one of {', '.join([*known, VLLM])}")
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        outcomes = []
        for name in options.rows or [*known, VLLM]:
            print(f"{name} ...", file=sys.stderr, flush=True)
            outcomes.append(in_vllm(wheel) if name == VLLM else tried(known[name], wheel))
            if options.output == "normal":
                print(line(outcomes[-1]), flush=True)
    if options.output == "json":
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    sys.exit(not all(outcome.passed for outcome in outcomes))


def build_wheel(folder: Path) -> Path:
    """The project's wheel."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", source, "-w", folder]
    subprocess.run(command, check=True)
    return next(folder.glob("vcsd-*.whl"))


def tried(row: Row, wheel: Path) -> Outcome:
    """Install a row's environment and run it."""
    began = time.monotonic()
    environment = FOLDER / row.name.replace(" ", "-")
    python = environment / "bin" / "python"
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    reason = failed([*pip, wheel, *row.pins, *(TOOLS if row.contract else ())], FOLDER)
    ran, versions = "install", {}
    if not reason:
        versions = versions_of(python)
        ran, reason = "vcsd run", run_outside(python)
    if not reason and row.contract:
        ran += ", contract"
        reason = failed([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", CONTRACT], ROOT, {"PYTHONPATH": ""})
    shutil.rmtree(environment, ignore_errors=True)  # some take gigabytes
    return Outcome(row.name, versions, ran, not reason, reason, time.monotonic() - began)


def in_vllm(wheel: Path) -> Outcome:
    """Integrations beside the pins of vLLM and LMCache, where models are refused with the version."""
    began = time.monotonic()
    python = ROOT / "build" / "vllm" / "bin" / "python"
    if not python.is_file():
        return Outcome(VLLM, {}, "", False, f"{python} is not there: ./dev test --matrix makes it", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
        reason = failed(pip, ROOT) or failed([python, "-c", REFUSAL], Path(folder), {"PYTHONPATH": str(target)})
    reason = reason or failed(
        [sys.executable, "-m", "pytest", "-q", "tests/real/test_vllm.py", "tests/real/test_lmcache.py"], ROOT
    )
    ran = "refusal of models, tests/real/test_vllm.py, test_lmcache.py"
    return Outcome(VLLM, versions_of(python), ran, not reason, reason, time.monotonic() - began)


REFUSAL = """
import transformers, vcsd
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).eval()
try:
    with vcsd.attach(model):
        raise SystemExit("a model is attached")
except vcsd.UnsupportedModelError as error:
    assert f"transformers {transformers.__version__} is installed" in str(error), error
"""


def run_outside(python: Path) -> str:
    """Run the bundled model in drives from an empty folder; the reason if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "--max-new-tokens", "2", "-o", "json"]
        done = run([python.with_name("vcsd"), *words], Path(folder), {"PYTHONPATH": ""})
    if done.returncode:
        return last_line(done.stderr)
    result = json.loads(done.stdout)
    return "" if result["agreement"]["tokens_equal"] else f"tokens differ from sdpa's: {result['agreement']}"


def versions_of(python: Path) -> dict[str, str]:
    """Installed versions of what the rows are about."""
    code = f"from importlib.metadata import version; print(*map(version, {SHOWN}))"
    return dict(zip(SHOWN, run([python, "-c", code], ROOT).stdout.split(), strict=True))


def run(
    command: list[object], folder: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | (variables or {})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # libraries are installed without byte code
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def failed(command: list[object], folder: Path, variables: dict[str, str] | None = None) -> str:
    """Run a command; its last line if it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = run(command, folder, variables)
    return last_line(done.stderr + done.stdout) if done.returncode else ""


def last_line(text: str) -> str:
    return re.sub(r"\s+", " ", next(iter(reversed(text.strip().splitlines())), "it failed without a word"))[:300]


def line(outcome: Outcome) -> str:
    """A row of the table."""
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    result = "passed" if outcome.passed else f"FAILED: {outcome.reason}"
    return f"{outcome.name:20}  {versions:66}  {outcome.ran}: {result} ({outcome.seconds:.0f} s)"


if __name__ == "__main__":
    main()
