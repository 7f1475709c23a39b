"""Constants of the model of Tutti (arXiv 2605.03375) that the paper does not print."""

from __future__ import annotations

from vcsd_eval.papers.machines import constant
from vcsd_eval.papers.paper import Constant

FEW_TOKENS = "tutti-few-tokens"  # overlay for few tokens after a long prefix
FLOPS = constant("tutti", "prefill_tflops")
FLOPS_FEW = constant("tutti", "prefill_tflops", FEW_TOKENS, "prefill_tflops_few")
GDS_PATH = Constant("gds_gb_per_s", 5, "GB/s", "GDS under requests; t8 prints 11.9 at its best", "t1a")
SSD_PATH = Constant("ssd_gb_per_s", 1.21, "GB/s", "LMCache-SSD: file system, host memory and GPU in turn", "t6c")
DRAM_PATH = Constant("dram_gb_per_s", 20, "GB/s", "LMCache-DRAM, of a link of 50", "t6b")
SSD_LONG = Constant("ssd_long_gb_per_s", 3.4, "GB/s", "LMCache-SSD at 112K: no one rate fits t6 and t12", "t12a")
CALIBRATED = (FLOPS, FLOPS_FEW, GDS_PATH, SSD_PATH, DRAM_PATH, SSD_LONG)

START = constant("tutti", "start_ms")
LEVAL = Constant("leval_tokens", 16_340, "tokens", "mean length of a document of LEval, by other papers")
LOOGLE = Constant("loogle_tokens", 21_613, "tokens", "mean length of a document of LooGLE, by other papers")
SIGMA = Constant("sigma", 0.6, "of ln tokens", "lognormal lengths")
QUESTION = Constant("question", 256, "tokens", "behind a document, never stored")
RATE_STEP = Constant("rate_step", 0.25, "1/s", "between tested rates, up to 1.5 (t2)")
HALVINGS = Constant("halvings", 6, "shares", "stored in t16a, 1/2 to 63/64: which were meant is not printed")
SSD_TB = Constant("ssd_tb", 14, "TB a GPU", "beside 256 GB of pinned DRAM, which Tutti does without (t20)")
ASSUMED = (START, LEVAL, LOOGLE, SIGMA, QUESTION, RATE_STEP, HALVINGS, SSD_TB)
