"""A host that stores prompts in served drives and is killed by itself at a given command: `killed_host.py COMMAND LEFT
TENANT DRIVE...`."""

import os
import signal
import sys

from host_driver.prefixes.async_store import connected
from tests.host_driver.prefixes.prompts import NAMES, rows
from tests.served import window_of


def main(command, left, tenant, *drives):
    """Store one prompt and flush, then a longer one, during which the host dies."""
    store = connected([window_of(drive, tenant) for drive in drives], NAMES)
    first, longer = list(range(20)), list(range(40))
    store.store(NAMES.keys(first), *rows(first))
    store.flush()
    store.devices[-1] = KillsHostAtCommand(store.devices[-1], command, int(left))
    store.store(NAMES.keys(longer), *rows(longer))


class KillsHostAtCommand:
    """A drive whose host exits instead of sending a command of kind `command`, after `left` of them."""

    def __init__(self, device, command, left):
        self.device, self.command, self.left = device, command, left

    def submit(self, command, submit_ns):
        if type(command).__name__ == self.command:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.device.submit(command, submit_ns)


if __name__ == "__main__":
    main(*sys.argv[1:])
