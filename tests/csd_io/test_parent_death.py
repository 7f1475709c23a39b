"""Worker processes exit with the process that started them.

partner of: csd_io/parent_death.py
"""

import signal
import subprocess
import sys

from csd_link.liveness import is_running
from tests.served import until

PARENT = """
import multiprocessing, os, time
from csd_io.parent_death import end_with_parent

def work(parent):
    end_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(600)

child = multiprocessing.get_context("fork").Process(target=work, args=(os.getpid(),))
child.start()
child.join()
"""


def test_end_with_parent_parent_killed_ends_child():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not is_running(child))
    parent.stdout.close()
