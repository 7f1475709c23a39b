"""vLLM on a CPU with prefixes in drives, across restarts and a drive failure: do tokens match vLLM without drives?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from csd_link.connect import connect
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import pid_path, window_path
from csd_link.served_drive import ServedDrive
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.real import vllm_child
from vcsd.loading import CHECKPOINT
from vcsd.progress import Tick
from vcsd.transport import FACTORY

ROOT = Path(__file__).parents[2]
BLOCK, PROMPT, PREFIX = 64, 600, 576  # tokens of a vLLM block, a prompt, the common prefix
NEW = 16  # tokens of an answer
PASSAGE = ROOT / "eval" / "accuracy" / "passage.txt"
STOP_S = 60.0
BEFORE_KILL_S = 1.0  # until a load that the drive does not answer is in flight


class VllmProcess:
    """vLLM in a separate process."""

    def __init__(self, python: Path, log: Path, dtype: str, drives: Sequence[str] = ()) -> None:
        self._log = log
        environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        command = [str(python), "-m", vllm_child.__name__, json.dumps(_arguments(dtype, drives))]
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._before = dict.fromkeys(("external_hits", "loads_failed"), 0)
        self._answer()

    def ask(self, **question: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Tokens, and counters since the last answer."""
        answer = self._answer()
        since = {name: answer[name] - before for name, before in self._before.items()}
        self._before = {name: answer[name] for name in self._before}
        return {"tokens": answer["tokens"]} | since

    def generate(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        self.ask(prompts=prompts, tokens=NEW)
        return self.answer()

    def stored(self, blocks: int) -> None:
        """Wait until `blocks` blocks are stored in the drives."""
        self.ask(stored=blocks)
        self.answer()

    def close(self) -> None:
        """Wait until the process exits by itself: it stores all pending blocks first."""
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self.close()
            said = self._log.read_text().strip().splitlines() or ["it said nothing"]
            errors = [line for line in said if "Error" in line] or said
            raise ConnectionError(f"vLLM exited early: {errors[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _arguments(dtype: str, drives: Sequence[str]) -> dict[str, Any]:
    """Engine arguments. vLLM's own prefix cache is off, so that all hits come from drives."""
    common = {
        "model": str(CHECKPOINT),
        "dtype": dtype,
        "block_size": BLOCK,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": False,
        "disable_hybrid_kv_cache_manager": True,
        "disable_log_stats": False,
        "enforce_eager": True,
    }
    transfer = {
        "kv_connector": "VcsdConnector",
        "kv_connector_module_path": "vcsd.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"drives": list(drives)},
    }
    return common | ({"kv_transfer_config": transfer} if drives else {})


class Cases:
    """Answers of vLLM without drives, and each case compared with them."""

    def __init__(self, python: Path, drives: int, folder: Path, tick: Tick) -> None:
        self._python, self._folder, self._tick = python, folder, tick
        self._names = [f"{folder.name}-{number}" for number in range(drives)]
        self.results: dict[str, dict[str, Any]] = {}
        self._expected: dict[tuple[str, int], list[int]] = {}

    def run(self) -> None:
        for dtype in ("float16", "bfloat16"):
            with self._engine(dtype) as alone:
                answers = alone.generate([prompt(number) for number in range(8)])["tokens"]
            self._expected |= {(dtype, number): tokens for number, tokens in enumerate(answers)}
        with self._served(), self._engine("float16", self._names) as engine:
            self._first(engine)
            self._case("shared_prefix", "float16", [1], engine.generate([prompt(1)]))
        with self._served(), self._engine("float16", self._names) as engine:
            self._case("restarted", "float16", [2], engine.generate([prompt(2)]))
            self._killed(engine)
        with self._served():
            with self._engine("float16", self._names) as engine:
                numbers = [4, 5, 6, 7]
                self._case("four_at_once", "float16", numbers, engine.generate(list(map(prompt, numbers))))
            with self._engine("bfloat16", self._names) as engine:
                self._first(engine)
                self._case("bfloat16", "bfloat16", [1], engine.generate([prompt(1)]))

    def _first(self, engine: VllmProcess) -> None:
        """Send a request; afterwards the prefix is stored."""
        engine.generate([prompt(0)])
        engine.stored(PREFIX // BLOCK)

    def _killed(self, engine: VllmProcess) -> None:
        """Kill a drive while a prefix is being loaded from it."""
        pid = int(pid_path(self._names[-1]).read_text())
        os.kill(pid, signal.SIGSTOP)
        engine.ask(prompts=[prompt(3)], tokens=NEW)
        time.sleep(BEFORE_KILL_S)
        os.kill(pid, signal.SIGKILL)
        answer = engine.answer()
        self._case("drive_killed", "float16", [3], answer)
        self.results["drive_killed"]["recomputed"] = answer["loads_failed"] > 0

    def _case(self, name: str, dtype: str, numbers: Sequence[int], answer: dict[str, Any]) -> None:
        equal = answer["tokens"] == [self._expected[dtype, number] for number in numbers]
        self.results[name] = {"external_hits": answer["external_hits"], "tokens_equal": equal, "requests": len(numbers)}
        self._tick(None)

    @contextmanager
    def _engine(self, dtype: str, drives: Sequence[str] = ()) -> Iterator[VllmProcess]:
        engine = VllmProcess(self._python, self._folder / "vllm.log", dtype, drives)
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def _served(self) -> Iterator[None]:
        """Start the drives on their existing files."""
        drives = [ServedDrive(name=n, spec=INSTCSD_ZYNQ7045_8CH, path=self._folder / f"{n}.flash") for n in self._names]
        placed = [ServerEndpoint(drive, partial(connect, window_path(drive.name))) for drive in drives]
        with own_server(placed, self._folder, FACTORY.server):
            yield


def prompt(number: int) -> list[int]:
    """600 tokens of text; all prompts share the first 576. The shipped model's tokens are bytes."""
    text = list(PASSAGE.read_bytes())
    at = PREFIX + number * (PROMPT - PREFIX)
    return text[:PREFIX] + text[at : at + PROMPT - PREFIX]


def run_cases(python: Path, drives: int, tick: Tick) -> dict[str, dict[str, Any]]:
    """Results per case: external_hits (tokens found in drives), and whether all tokens match those of vLLM alone.

    Cases: a second request, a restart of both, a drive killed during a read, four requests at once, BF16.

    Raises:
        ConnectionError: vLLM exited early.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        cases = Cases(python, drives, Path(scratch), tick)
        cases.run()
    return cases.results
