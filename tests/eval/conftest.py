"""Tests run side by side: one thread each, or they wait for each other."""

import torch

torch.set_num_threads(1)
