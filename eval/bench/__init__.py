"""Benchmarks of the emulator, compared with baselines."""
