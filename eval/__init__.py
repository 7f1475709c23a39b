"""Measurements, in subpackages that can be read independently.

`bench` measures the emulator, `verify` checks it under faults, `papers` recomputes published figures, `accuracy`
evaluates attention methods on models, `model` trains the shipped checkpoint, `rtl` reports the engine's resources, and
`baselines` holds third-party systems. `bench` uses `baselines`, and `papers` uses recordings of `accuracy`. An
experiment is one file (`vcsd_eval.experiment`).

The package's name is `vcsd_eval`, a link to this folder: a package `eval` could be that of another distribution.
"""

if __name__ != "vcsd_eval":  # under two names there would be two of each class
    raise ImportError(f"{__name__}: import it as vcsd_eval, from the folder above")
