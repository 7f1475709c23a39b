"""Drives with a process of their own, for tests."""

import os
import signal
from functools import partial

from csd_link.connect import connect
from csd_link.own_server import Placed, own_server
from csd_link.run_dir import pid_path, window_path
from csd_link.served_drive import DEFAULT, ServedDrive
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.transport import FACTORY


def window_of(name, tenant=DEFAULT):
    """What connects to a served drive."""
    return partial(connect, window_path(name, tenant))


def serving(folder, *names, flash=None, **fields):
    """Serve drives of these names for the time of a block; `folder` is for the server, `flash` for what they keep."""
    drives = [
        ServedDrive(name=name, path=flash / name if flash else None, **{"spec": INSTCSD_ZYNQ7045_8CH} | fields)
        for name in names
    ]
    return own_server([Placed(each, window_of(each.name, each.tenants[0])) for each in drives], folder, FACTORY.server)


def pid(name):
    return int(pid_path(name).read_text())


def kill(name):
    os.kill(pid(name), signal.SIGKILL)
