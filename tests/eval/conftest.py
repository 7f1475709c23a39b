"""Limits parallel tests to one thread each; otherwise they wait for each other."""

import torch

torch.set_num_threads(1)
