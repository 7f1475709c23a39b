"""The same bits on every processor: each variant of four products and a sum, in a process of its own.

partner of: attention_engine/_dot4.py
"""

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

CODE = """
import sys
import zlib
import numpy as np
import attention_engine._dot4 as dot4
from attention_engine.coarse import Scores, attend_coarse, score
from attention_engine.methods.progressive import progressive
from tests.attention_engine.low_bit_drive import Drive

print(dot4.WAY)
for d, layout, G in ((64, "progressive", 7), (96, "progressive4-bf16", 4), (80, "progressive-latent", 3)):
    drive = Drive(d, layout, [500, 333], alone=3)
    view = drive.ftl.view(drive.handles, 0)
    for name in ("scores", "values"):  # codes at random
        slots = view.maps[name][view.maps[name] < 1 << 31]
        body = drive.ftl.nand.content[slots].view(np.uint8)
        body[:, 768:] = np.random.default_rng(1).integers(0, 256, body[:, 768:].shape, np.uint8)
        drive.ftl.nand.content[slots] = body.view(drive.ftl.nand.content.dtype)
    step = drive.step(G, 4)
    logits, variances = (each.copy() for each in score(step.view, step.q))
    scores = [logits[stream, :, :length] for stream, length in enumerate(step.seq_lens)]
    out = progressive(step)
    for each in (*scores, variances, out, step.rows, step.lost, step.errors):
        assert np.isfinite(each).all()
        print(zlib.crc32(np.ascontiguousarray(each).tobytes()))
"""
LEAST = "+sse4.2,+ssse3,+avx,+f16c,+fma"  # FP16 is widened by an instruction everywhere
BASE = f"{LEAST},+avx2,+bmi,+bmi2"
FEATURES = {
    "none": LEAST,
    "avx2": BASE,
    "avxvnni": f"{BASE},+avxvnni",
    "avx512vnni": f"{BASE},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni",
}


def bits_of(cache, **environment):
    """Output of a separate process: its kernel variant, then sums of bits."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    way, *bits = done.stdout.split()
    return way, bits


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The bits of this processor's own form."""
    way, bits = bits_of(tmp_path_factory.mktemp("own"))
    assert way in FEATURES and len(bits) == 3 * (4 + 5) and len(set(bits)) > 20
    return bits


@pytest.mark.long
@pytest.mark.parametrize("way", FEATURES)
def test_every_instruction_set_gives_same_bits(tmp_path, own, way):
    """For the variants whose instructions this processor has."""
    has = {f"+{name}" for name, there in llvm.get_host_cpu_features().items() if there}
    if not set(FEATURES[way].split(",")) <= has:
        pytest.skip(f"this processor has not all of {FEATURES[way]}")
    cpu = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": FEATURES[way]}
    assert bits_of(tmp_path, **cpu) == (way, own)
