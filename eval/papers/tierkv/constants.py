"""Constants of the model of TierKV (simulated, without authors or code) that the paper does not print."""

from __future__ import annotations

from vcsd_eval.papers.claims import printed
from vcsd_eval.papers.paper import Constant

PRINTED = printed("tierkv")

COMPUTE = Constant("compute_ms", 1.20, "ms", "an iteration that waits for nothing", "t5-oracle")
STEP_TOKENS = Constant("step_tokens", 288, "tokens", "that an iteration makes, at any oversubscription", "t9")
SPREAD = Constant(
    "spread",
    0.25,
    "of the mean",
    "standard deviation of the time of an iteration's copies: the largest error of the rows is least",
    "t5-2, t5-3, t8-4, t8-5, t14-1, t14-2",
)
STALL_SHARE = Constant(
    "stall_share", 0.73, "of a stall", "that tokens/s feel: requests that do not stall go on", "t10-3"
)
COPIES = {
    ratio: Constant(
        f"copies_ms_{ratio}x",
        round(PRINTED[f"t6-{ratio}"] - COMPUTE.value, 2),
        "ms",
        "time of an iteration's copies",
        f"t6-{ratio}",
    )
    for ratio in (2, 3, 4, 5)
}
SWEEP_COPIES = Constant(
    "copies_ms_sweep",
    round(PRINTED["t14-0"] - COMPUTE.value, 2),
    "ms",
    "time of an iteration's copies in table 6",
    "t14-0",
)
MEAN_TOKENS = Constant("mean_tokens", 70, "tokens", "of a request, of whose last block half is empty", "t24a")
CALIBRATED = (COMPUTE, STEP_TOKENS, SPREAD, STALL_SHARE, *COPIES.values(), SWEEP_COPIES, MEAN_TOKENS)
WINDOW = Constant("window", 4, "iterations", "K where it is not said; the SSD's is twice that")
WEIGHTS = Constant("weights_bytes", 2, "bytes a parameter", "FP16; what they leave of 80 GB is for K and V")
UNIFORM = Constant("uniform_tokens", 512 + 256, "tokens", "of a request of the uniform workload, at its end")
ASSUMED = (WINDOW, WEIGHTS, UNIFORM)
