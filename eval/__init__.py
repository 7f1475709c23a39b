"""Measurements, in subpackages that can be read independently.

`bench` measures the emulator, `verify` checks it under faults, `papers` recomputes published figures, `accuracy`
evaluates attention methods on models, `model` trains the shipped checkpoint, `rtl` reports the engine's resources, and
`baselines` holds third-party systems. `bench` uses `baselines`, and `papers` uses recordings of `accuracy`. An
experiment is one file (`eval.experiment`).
"""
