"""Setups of the paper's evaluation, and systems on them."""

from vcsd_eval.papers.instinfer.runs import InStorageCase, simulate
from vcsd_eval.papers.instinfer.systems import Setup
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd


def setup_of(model="opt-13b", gpu="a6000", **more):
    """Shipped profiles, by name."""
    return Setup(model=Model.load(model), gpu=Gpu.load(gpu), host=Host.load("pcie4"), ssd=Ssd.load("980pro"), **more)


def small_setup(layers=1, **more):
    """A small model whose heads can be spread over 20 drives."""
    model = Model(name="small", layers=layers, q_heads=20, kv_heads=20, head_dim=128, parameters_billion=0.1)
    hardware = {"gpu": Gpu.load("a6000"), "host": Host.load("pcie4"), "ssd": Ssd.load("980pro")}
    return Setup(model=model, **hardware, **({"input": 64, "output": 64} | more))


def in_storage(setup, systems, batch, drives):
    """Results of systems at one batch size."""
    runs = simulate(setup, [InStorageCase(systems, batch, drives)])
    return [runs.drive(system, batch, drives) for system in systems]
