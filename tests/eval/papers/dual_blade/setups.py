"""Dual-Blade's setup, and a small one."""

from vcsd_eval.papers.dual_blade.machine import EdgeSetup
from vcsd_eval.papers.profiles import Gpu, Host, Model


def paper_setup(model="opt-6.7b", gpu="rtx5060ti-16gb"):
    return EdgeSetup(model=Model.load(model), gpu=Gpu.load(gpu), host=Host.load("pcie5x8"))


def small_setup(layers=8, **more):
    """A model whose K or V of a layer is 16 KiB a token."""
    model = Model(name="small", layers=layers, q_heads=32, kv_heads=32, head_dim=128, parameters_billion=0.1)
    hardware = {"gpu": Gpu.load("rtx5060ti-16gb"), "host": Host.load("pcie5x8")}
    return EdgeSetup(model=model, **hardware, **({"batch": 2, "input": 64, "output": 8} | more))
