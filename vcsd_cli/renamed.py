"""Names of commands and options before release 0.2.0. They still work, with a warning, until release 0.3.0."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vcsd.progress import note

REMOVED_IN = "0.3.0"  # as in csd_spec.renamed, which takes longer to import

COMMANDS = {
    "bench": {
        "crash": "power-loss",
        "faults": "drive-kill",
        "flips": "bit-flips",
        "objects": "gather-fork",
        "plan": "planner",
        "reopen": "recovery",
        "simulate": "fault-simulation",
    },
    "eval": {
        "families": "architectures",
        "front": "pareto",
        "oracle": "selection-accuracy",
        "prefixes": "prefix-cache",
        "reuse": "prefix-reuse",
        "selectors": "methods",
        "tiers": "tiered-serving",
    },
}
"""Old and new names of commands, by group."""

OPTIONS = {
    "--aging": "--aging-factor",
    "--all-layers": "--simulate-all-layers",
    "--attention": "--method",
    "--chunk": "--prefill-chunk-tokens",
    "--convention": "--budget-convention",
    "--cuts": "--min-power-cuts",
    "--depths": "--iodepths",
    "--device-mib": "--device-kv-mib",
    "--drift": "--token-correlation",
    "--drive": "--drive-config",
    "--durability": "--flush-durability",
    "--embedding-bits": "--layout",
    "--erase-mean": "--target-pe-cycles",
    "--files": "--file-tier",
    "--fill": "--prefill-fraction",
    "--first": "--first-seed",
    "--flips": "--count",
    "--flush-every": "--flush-interval-steps",
    "--force": "--allow-overwrite",
    "--full": "--utilization",
    "--gap": "--mip-gap",
    "--gaussian": "--with-random-data",
    "--host-memory-mib": "--page-buffer-mib",
    "--host-mib": "--host-kv-mib",
    "--hosts": "--hosts-file",
    "--input": "--prompt-tokens",
    "--k": "--sparf-tokens",
    "--keep": "--data-dir",
    "--l": "--sparf-recent",
    "--layers": "--layers-file",
    "--limit": "--timeout-s",
    "--limit-mib": "--memory-limit-mib",
    "--longest": "--max-request-tokens",
    "--max-context": "--max-model-len",
    "--methods": "--methods-file",
    "--mib": "--total-mib",
    "--out": "--output-dir",
    "--output": "--output-format",
    "--output-tokens": "--new-tokens",
    "--page": "--markdown-out",
    "--parameter": "--cdw",
    "--patience": "--max-paused-steps",
    "--plant": "--inject-bug",
    "--policies": "--policies-file",
    "--progress-dir": "--checkpoint-dir",
    "--prompt": "--prompt-tokens",
    "--qd": "--iodepth",
    "--queries": "--q-heads-per-kv-head",
    "--queue": "--max-queued-requests",
    "--r": "--sparf-channels",
    "--relatives": "--forks",
    "--report": "--holdout-text",
    "--residency": "--policy",
    "--rounds": "--repeats",
    "--seconds": "--interval-s",
    "--sequences": "--num-passages",
    "--share": "--tier-fraction",
    "--size-mb": "--size-mib",
    "--slice-tokens": "--time-slice-tokens",
    "--slots": "--max-batch-size",
    "--storage": "--kv-dtype",
    "--threads": "--kernel-threads",
    "--timed": "--timed-instances",
    "--trips": "--round-trips",
    "--warm": "--warmup-steps",
    "--ways": "--variants",
    "--window": "--window-device",
}
"""Old and new names of options; a command with the new option, and none of the old name, accepts both."""


KEYS = {
    "bytes_per_token_per_layer": "bytes_per_token_and_layer",
    "corrected_over_best_baseline_max": "mended_over_better_of_both_most",
    "corrected_over_oracle_min": "mended_over_oracle_least",
    "deadline_attainment": "deadlines_met",
    "deadline_attainment_incl_rejected": "deadlines_met_of_all",
    "direct_io_engine": "past_by",
    "drive_copies": "in_drives",
    "false_infeasible": "infeasible_wrongly",
    "fastest_llamacpp_cache": "llamacpp_is",
    "fastest_preallocated_cache": "preallocated_is",
    "fork_slowdown_with_many_forks": "fork_over_alone",
    "free_slowdown_with_many_forks": "free_over_alone",
    "kv_cache": "residency",
    "kv_fraction_in_drives": "kv_share_in_drives",
    "kv_layout": "stored",
    "max_queue_wait_s": "longest_wait_s",
    "max_token_gap_s": "longest_pause_s",
    "reject_reasons": "reasons",
    "simulated_busy_ns": "modelled_busy_ns",
    "simulated_bytes": "modelled_bytes",
    "simulated_ms": "modelled_ms",
    "simulated_ns": "modelled_ns",
    "simulated_time": "modelled",
    "ssd_offload_baseline_per_step": "plain_offload_per_step",
    "step_with_gpu_memory_s": "step_beside_gpu_memory_s",
    "step_with_link_s": "step_beside_link_s",
    "tbt_slo_attainment": "tbt_attained_by_gaps",
    "tbt_slo_attainment_buffered": "tbt_attained_with_deposit",
    "tbt_slo_attainment_step": "tbt_attained",
    "tokens_not_in_reference": "tokens_chosen_otherwise",
    "top1_match_rate": "top1_rate",
    "tpot_slo_attainment": "tpot_attained_by_gaps",
    "tpot_slo_attainment_step": "tpot_attained",
    "useful_read_fraction": "useful_byte_share",
}
"""Old names of JSON keys by new ones. Results have both."""

TOKENS = "--new-tokens"
"""New name of `--output` in commands where it was a number of tokens."""


def new_command(group: str, name: str) -> str:
    """Current name of a command; warns about an old one."""
    new = COMMANDS.get(group, {}).get(name)
    if new is None:
        return name
    _warn(f"{group} {name}", f"{group} {new}")
    return new


def new_options(args: Sequence[str], known: Collection[str]) -> list[str]:
    """Arguments of a command with current names of options; warns about old ones.

    Args:
        args: Arguments of the command.
        known: Names of its options.
    """
    found = list[str]()
    for at, arg in enumerate(args):
        if arg == "--":
            return [*found, *args[at:]]
        name, equals, value = arg.partition("=")
        new = TOKENS if name == "--output" and TOKENS in known else OPTIONS.get(name, "")
        if new in known and name not in known:
            _warn(name, new)
            arg = f"{new}{equals}{value}"
        found.append(arg)
    return found


def with_old_keys(result: Any) -> Any:
    """A JSON result with each renamed key under its old name, too, and `deprecated_keys`: new names by old ones."""
    used = dict[str, str]()
    found = _with_old_keys(result, used)
    return found | {"deprecated_keys": used} if used and isinstance(found, dict) else found


def _with_old_keys(result: Any, used: dict[str, str]) -> Any:
    if isinstance(result, list | tuple):
        return [_with_old_keys(each, used) for each in result]
    if not isinstance(result, dict):
        return result
    found = {name: _with_old_keys(value, used) for name, value in result.items()}
    for name in KEYS.keys() & found.keys():
        if found.setdefault(KEYS[name], found[name]) is found[name]:
            used[KEYS[name]] = name
    return found


def _warn(old: str, new: str) -> None:
    note(f"vcsd: warning: {old} is now {new}; the old name ends with release {REMOVED_IN}")
