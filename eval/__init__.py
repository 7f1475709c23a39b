"""What is measured, in wings that can be read alone.

`bench` measures the emulator, `paper` works out the paper's figures, `accuracy` looks at a model's work, `model` makes
what is measured with, `rtl` counts the engine's resources, `rivals` is what stands beside. `bench` uses `rivals`, and
`paper` what `accuracy` has recorded. An experiment is one file (`eval.experiment`).
"""
