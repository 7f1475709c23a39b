"""What is measured, in wings: `bench` the emulator, `paper` the paper's figures, `accuracy` a model's work, `model` what is
measured with, `rtl` its resources, `rivals` what stands beside. A wing needs none but `rivals`, and `paper` what `accuracy`
has recorded. An experiment is one file (`eval.experiment`).
"""
