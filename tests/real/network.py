"""Two hosts on one machine: network namespaces whose Ethernet devices are joined by a link that loses frames.

Each end of the link is a TAP device in a namespace. A thread passes frames between them: it delays, reorders and loses
some, by a seed, and cuts the link on request. TCP on both ends is the kernel's. TAP devices have no offloads here, so a
frame has at most 1,514 bytes and its checksums are complete. Namespaces and devices have no names outside: the kernel
removes them when this process and those started on the hosts have exited.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_FRAME_BYTES = 1 << 16
LOST, REORDERED = 0.01, 0.02  # fractions of frames
DELAY_S, LATE_S = 0.001, 0.006  # one way; the second one for frames that later ones overtake
CUT_S = 5.0
LOOK_S = 0.1  # how often the thread looks whether it has to end


class Host:
    """A network namespace with a TAP device `eth0`.

    Attributes:
        address: IPv4 address of `eth0`.
        tap: Non-blocking file descriptor: reads return frames that the host sends, writes are frames that it receives.
    """

    def __init__(self, address):
        self.address = address
        with ThreadPoolExecutor(1) as thread:  # a thread can be in another namespace than its process
            self._namespace, self.tap = thread.submit(_new_namespace).result()
        try:
            for words in (f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                subprocess.run(self.command("ip", *words.split()), check=True)
        except BaseException:
            self.close()
            raise

    def command(self, *words):
        """A command line that runs another one on this host."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}", *map(str, words)]

    def tcp_counters(self):
        """TCP counters of this host (RFC 4022)."""
        done = subprocess.run(self.command("cat", "/proc/net/snmp"), capture_output=True, text=True, check=True)
        names, values = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("Tcp:"))
        return Counter(dict(zip(names, map(int, values), strict=True)))

    def set_tcp_retries(self, retries):
        """Retransmissions after which this host gives a TCP connection up (tcp_retries2)."""
        subprocess.run(self.command("sysctl", "-q", f"net.ipv4.tcp_retries2={retries}"), check=True)

    def close(self):
        os.close(self.tap)
        os.close(self._namespace)


def _new_namespace():
    """File descriptors of a new namespace and of the TAP device in it; for a thread that ends afterwards."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare: no network namespace can be made")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), tap


class Link:
    """Passes frames between two hosts, in a thread.

    Attributes:
        lost, reordered: Frames so far; those of a cut do not count.
    """

    def __init__(self, first, second, seed):
        self.lost = self.reordered = 0
        self._other, self._random = {first.tap: second.tap, second.tap: first.tap}, random.Random(seed)
        self._waiting, self._numbers = [], count()  # frames on their way: due time, number, tap, frame
        self._cut_by, self._up_at_s, self._down = None, 0.0, threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @contextmanager
    def cut(self, sender):
        """Lose all frames for CUT_S, beginning with the next one of `sender`: enter when they are, leave afterwards."""
        self._down.clear()
        self._cut_by = sender.tap
        assert self._down.wait(CUT_S), "the host has sent nothing"
        yield
        time.sleep(max(0.0, self._up_at_s - time.monotonic()))

    def close(self):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._ended.is_set():
            wait_s = self._waiting[0][0] - time.monotonic() if self._waiting else LOOK_S
            for tap in select.select([*self._other], (), (), min(max(wait_s, 0.0), LOOK_S))[0]:
                self._take(tap, os.read(tap, _FRAME_BYTES))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(self._waiting)
                os.write(tap, frame)

    def _take(self, tap, frame):
        now, drawn = time.monotonic(), self._random.random()
        if tap == self._cut_by:
            self._cut_by, self._up_at_s, self._waiting = None, now + CUT_S, []
            self._down.set()
        if now < self._up_at_s:
            return
        is_lost, is_late = drawn < LOST, LOST <= drawn < LOST + REORDERED
        self.lost += is_lost
        self.reordered += is_late
        if not is_lost:
            due_s = now + (LATE_S if is_late else DELAY_S)
            heapq.heappush(self._waiting, (due_s, next(self._numbers), self._other[tap], frame))


@contextmanager
def two_hosts(seed):
    """Two hosts and the link between them, for the time of a block."""
    with ExitStack() as undo:
        first, second = (undo.enter_context(closing(Host(f"192.0.2.{number}"))) for number in (1, 2))
        yield first, second, undo.enter_context(closing(Link(first, second, seed)))
