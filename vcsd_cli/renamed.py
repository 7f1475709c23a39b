"""Names of commands and options before release 0.2.0. They still work, with a warning, until release 0.3.0."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
        "prefixes": "prefix-cache",
        "reuse": "prefix-reuse",
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


def _warn(old: str, new: str) -> None:
    note(f"vcsd: warning: {old} is now {new}; the old name ends with release {REMOVED_IN}")
