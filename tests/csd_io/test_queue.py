"""Many requests at once: all bytes are right, or there is one error and nothing in flight.

partner of: csd_io/queue.py, eval/verify/simulation/queue.py
"""

import errno
import random

import numpy as np
import pytest

from csd_io.queue import IoRequest, aligned, carry_out, check, pieces
from vcsd_eval.verify.simulation.disk import SECTOR, SimDisk
from vcsd_eval.verify.simulation.queue import SimQueue

SIZE = 256 * SECTOR


@pytest.fixture(params=range(5))
def queue(request):
    draw = random.Random(request.param)
    return SimQueue(SimDisk("disk", "process", draw), "blocks", SIZE, draw)


def requests(op, buffer, size=SECTOR):
    return [IoRequest(op, number * size, part) for number, part in enumerate(pieces(buffer, size))]


def filled(seed=0):
    buffer = aligned(SIZE)
    buffer[:] = np.random.default_rng(seed).bytes(SIZE)
    return buffer


def test_data_reads_back_for_any_completion_order(queue):
    written, back = filled(), aligned(SIZE)
    carry_out(queue, requests("write", written))
    carry_out(queue, requests("read", back, 4 * SECTOR))
    assert back == written
    assert queue.most_flying == queue.depth


def test_depth_argument_limits_requests_in_flight(queue):
    carry_out(queue, requests("read", aligned(SIZE)), depth=3)
    assert queue.most_flying == 3


@pytest.mark.parametrize(("fault", "code"), [("bad", errno.EIO), ("short", errno.EIO)])
def test_failed_request_raises_and_leaves_none_in_flight(queue, fault, code):
    setattr(queue, fault, 0.1)
    with pytest.raises(OSError) as raised:
        carry_out(queue, requests("read", aligned(SIZE)))
    assert (raised.value.errno, raised.value.filename) == (code, "disk/blocks")
    assert queue.reap(0) == []
    queue.submit([IoRequest("read", 0, aligned(SECTOR))] * queue.depth)  # exactly the queue depth


def test_full_disk_fails_the_write_that_met_it(queue):
    queue._disk.fault = errno.ENOSPC
    with pytest.raises(OSError) as raised:
        carry_out(queue, requests("write", filled()))
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "disk/blocks")


def test_interrupted_run_waits_for_requests_in_flight(queue):
    def some():
        yield from requests("read", aligned(SIZE))[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(queue, some())
    assert queue.reap(0) == [] and queue.most_flying


@pytest.mark.parametrize(
    ("offset", "size", "shift"),
    [(1, SECTOR, 0), (0, SECTOR - 1, 0), (0, SECTOR, 8), (SIZE, SECTOR, 0), (0, 65 * SECTOR, 0), (-SECTOR, SECTOR, 0)],
)
def test_invalid_request_is_refused_before_submission(queue, offset, size, shift):
    with pytest.raises(ValueError, match="disk/blocks"):
        queue.submit([IoRequest("read", offset, aligned(size + shift)[shift:])])


def test_request_beyond_queue_depth_is_refused(queue):
    one = IoRequest("read", 0, aligned(SECTOR))
    check(queue, [one], queue.depth - 1)
    with pytest.raises(ValueError, match="in flight"):
        check(queue, [one], queue.depth)
