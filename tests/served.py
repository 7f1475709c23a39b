"""Served drives in processes of their own, for tests; and a decode step to run on them."""

import os
import random
import signal
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from csd_link.connect import connect, find_server
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import pid_path, window_path
from csd_link.served_drive import DEFAULT, ServedDrive
from csd_spec import AttentionConfig, CompressionBudget, ModelShape
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from host_driver.driver import Driver
from vcsd.transport import FACTORY

SHAPE = ModelShape(name="small", layers=2, q_heads=4, kv_heads=4, head_dim=16)


def window_of(name, tenant=DEFAULT):
    """What connects to a served drive."""
    return partial(connect, window_path(name, tenant))


@contextmanager
def serving(folder, *names, flash=None, **fields):
    """Serve drives of these names during a `with` block. folder: of the server; flash: parent of drive folders."""
    drives = [
        ServedDrive(name=name, path=flash / name if flash else None, **{"spec": INSTCSD_ZYNQ7045_8CH} | fields)
        for name in names
    ]
    placed = [ServerEndpoint(drive, window_of(drive.name, drive.tenants[0])) for drive in drives]
    with own_server(placed, folder, FACTORY.server) as server:
        for drive in drives:
            until(lambda name=drive.name: find_server(name))  # its administrator's window comes last
        yield server


HANG_S = 400  # a guard: nothing that tests wait for takes as long, however loaded the machine is


def until(condition):
    """Wait until `condition()` is true; fails after HANG_S seconds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def free_port(count=1):
    """First of `count` free consecutive ports.

    They are below those that the kernel gives to connections and to servers without a port, so nothing takes one of
    them before the test does, unless another test draws the same.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        first = random.SystemRandom().randrange(min(10_000, below // 2), below - count)  # tests share a seed
        with ExitStack() as bound, suppress(OSError):
            for port in range(first, first + count):
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no port is free")


def pid(name):
    return int(pid_path(name).read_text())


def kill(name):
    """Kill a drive's process; if it has just died and is not restarted yet, kill the next one."""

    def killed():
        try:
            os.kill(pid(name), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    until(killed)


def decoder(devices, tokens=50, **options):
    """A driver with a sequence of `tokens` tokens, and a function that runs one decode step and returns its output."""
    driver, generator = (
        Driver(devices, SHAPE, AttentionConfig("sparf", CompressionBudget(4)), **options),
        np.random.default_rng(0),
    )

    def half(*shape):
        return generator.standard_normal(shape).astype(np.float16)

    batch = driver.create(1, tokens + 206)
    for layer in range(SHAPE.layers):
        rows = half(tokens, 4, 16), half(tokens, 4, 16)
        driver.append(batch, slice(None), layer, np.array([tokens]), lambda rows=rows: rows)
    driver.settle()

    def step():
        with driver.step(1) as (part,):
            each = [
                driver.decode(batch, slice(None), part, layer, half(1, 4, 16), half(1, 4, 16), half(1, 4, 16))
                for layer in range(SHAPE.layers)
            ]
        return np.stack(each)

    return driver, batch, step
