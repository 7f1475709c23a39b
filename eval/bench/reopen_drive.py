"""Child process with a drive that holds more than its memory limit, and decodes until it is killed.

A job arrives as JSON on standard input after this process has reported that it is ready; every token is a line on
standard output, as are the figures. A token is a hash of the attention outputs of all layers in a step, and it
determines q, k and v of the next step: one wrong bit anywhere changes all later tokens. This is checked for FP16 only:
with quantized K, an unfinished group is scored from its rows as restored at power-on, which is close to the scores
before, but not equal.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_firmware import InProcessDrive
from csd_spec import Attend, AttentionConfig, Command, Completion, Flush, KvAppend, KvCrop, KvFree, SeqCreate, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Medium

CHUNK = 1024  # tokens of an append
HEAD_DIM = 128
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryJob:
    """Part of the run that one process does.

    Attributes:
        fill: Whether to create the drive, fill it with `tokens` tokens of KV data, and decode undisturbed on a fork;
            otherwise continue the existing drive, after `known` tokens.
        steps: Total number of tokens to decode, with a flush at a fixed interval.
    """

    folder: str
    medium: Any
    cache_bytes: int
    method: str
    layers: int
    kv_heads: int
    queries: int
    tokens: int
    steps: int
    flush_interval_steps: int
    fill: bool
    known: list[int]


class DriveDecoder:
    """A drive, and the synthetic model that uses it."""

    def __init__(self, job: RecoveryJob) -> None:
        self.job, self.what = job, AttentionConfig.named(job.method)
        medium, path = Medium(job.medium, job.cache_bytes), Path(job.folder)
        began = time.perf_counter()
        if job.fill:
            self.device = InProcessDrive(INSTCSD_ZYNQ7045_8CH, path, medium=medium, durability="host")
        else:
            self.device = InProcessDrive.reopen(path, medium=medium)
        self.open_s = time.perf_counter() - began

    def ask(self, command: Command) -> Completion:
        """Execute a command; raises OSError if it is refused."""
        done = self.device.submit(command, self.device.firmware.free_ns).result()
        if done.status is not Status.SUCCESS:
            raise OSError(f"{self.device.name}: {done.reason}")
        return done

    def fill(self) -> int:
        """Create a sequence with the KV data of all layers, and flush; returns its handle.

        Chunks are the same rows in different order.
        """
        job = self.job
        shape = {"layers": job.layers, "kv_heads": job.kv_heads, "head_dim": HEAD_DIM, "max_tokens": job.tokens + 4096}
        handle = int(self.ask(SeqCreate(count=1, layout=self.what.kv_layout.code, **shape)).data[0][0])
        draw = np.random.default_rng(0)
        rows = draw.standard_normal((CHUNK, job.kv_heads, HEAD_DIM), np.float32).astype(np.float16)
        for layer in range(job.layers):
            for at in range(0, job.tokens, CHUNK):
                count = min(CHUNK, job.tokens - at)
                k = np.roll(rows, 31 * (at // CHUNK) + layer, axis=0)[:count]
                self.ask(KvAppend((handle,), layer, np.array([count]), k, np.ascontiguousarray(k[::-1])))
            self.ask(Flush())  # to disk: buffered writes count as memory
        return handle

    def fork(self, handle: int) -> int:
        """Fork a sequence; returns the handle of the copy."""
        firmware = self.device.firmware
        fork = firmware.ftl.fork(handle)
        firmware.state.open(fork)
        return fork

    def step(self, handle: int, token: int) -> int:
        """Decode one token; returns the next one."""
        job, draw, crc = self.job, np.random.default_rng(token), 0
        for layer in range(job.layers):
            stored = int(self.device.firmware.ftl.sequence(handle).lengths[layer]) + 1
            params = self.what.at(stored, HEAD_DIM)
            q, k, v = (
                draw.standard_normal(shape, np.float32).astype(np.float16)
                for shape in ((1, job.kv_heads, job.queries, HEAD_DIM), *((1, job.kv_heads, HEAD_DIM),) * 2)
            )
            command = Attend(
                seqs=(handle,),
                layer=layer,
                q=q,
                k=k,
                v=v,
                method=self.what.method,
                r=params.r,
                top_k=np.array([params.k]),
                recent=np.array([params.l]),
            )
            crc = zlib.crc32(self.ask(command).data[0].tobytes(), crc)
        return crc % VOCABULARY

    def cropped(self, handle: int) -> int:
        """Crop a sequence to the tokens that all its layers have and the host knows; returns how many were decoded."""
        lengths = self.device.firmware.ftl.sequence(handle).lengths
        length = min(int(lengths.min()), self.job.tokens + len(self.job.known))
        for layer in np.flatnonzero(lengths > length).tolist():
            self.ask(KvCrop((handle,), layer, np.array([length])))
        return length - self.job.tokens

    def decode(self, handle: int, begun: int, known: list[int], flush: bool) -> Iterator[int]:
        """Yield tokens from number `begun` on; known tokens are used as input instead of the decoded ones."""
        token = known[begun - 1] if begun else 0
        for number in range(begun, self.job.steps):
            token = self.step(handle, token)
            yield token
            if flush and (number + 1) % self.job.flush_interval_steps == 0:
                self.ask(Flush())


def run(job: RecoveryJob, say: Any) -> dict[str, Any]:
    """Run a job; figures cover the whole process."""
    base = _peak_mib()
    decoder = DriveDecoder(job)
    expected, begun = list[int](), 0
    if job.fill:
        handle = decoder.fill()
        fork = decoder.fork(handle)
        expected = list(decoder.decode(fork, 0, [], flush=False))
        decoder.ask(KvFree((fork,)))
        decoder.ask(Flush())
    else:
        (handle,) = decoder.device.firmware.ftl.sequences
        begun = decoder.cropped(handle)
    say({"expected": expected, "begun": begun, "open_s": decoder.open_s})
    began = time.perf_counter()
    for token in decoder.decode(handle, begun, job.known, flush=True):
        say({"token": token, "peak_mib": _peak_mib(), "base_mib": base})
    step_s = (time.perf_counter() - began) / max(1, job.steps - begun)
    decoder.device.close()
    return {"peak_mib": _peak_mib(), "base_mib": base, "step_s": step_s}


def _peak_mib() -> float:
    """Peak memory of this program, MiB; `getrusage` also counts the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return found / 1024


def main() -> None:
    """Report that this process is ready, run a job, and print its result."""

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    print("ready", flush=True)
    say(run(RecoveryJob(**json.loads(sys.stdin.readline())), say))


if __name__ == "__main__":
    main()
