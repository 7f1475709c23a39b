"""The block namespace against an array of bytes."""

import threading
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_spec import Geometry
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

GEOMETRY = Geometry(
    channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=64, pages_per_block=16, page_bytes=512
)
SMALL = replace(INSTCSD_ZYNQ7045_8CH, name="small", geometry=GEOMETRY, dram_bytes=1 << 20)

operations = st.lists(
    st.tuples(st.sampled_from(["read", "write", "write", "flush"]), st.integers(0, 70_000), st.integers(0, 20_000)),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(operations, st.integers(0, 255))
def test_every_byte_is_the_last_that_was_written(steps, seed):
    namespace = Namespace(Firmware(SMALL), threading.Lock())
    model = bytearray(namespace.size_bytes)
    generator = np.random.default_rng(seed)
    for verb, offset, size in steps:
        if verb == "write":
            data = generator.bytes(size)
            done = namespace.write(offset, data)
            assert done == max(0, min(size, len(model) - offset))
            model[offset : offset + done] = data[:done]
        elif verb == "read":
            assert namespace.read(offset, size) == model[offset : offset + size]
        else:
            namespace.flush()
    assert namespace.read(0, len(model)) == model
    reads = namespace.latency["read"]
    assert reads.total_ns >= reads.requests * SMALL.link.command_ns


def test_what_was_flushed_is_there_after_a_loss_of_power():
    firmware = Firmware(SMALL)
    namespace = Namespace(firmware, threading.Lock())
    namespace.write(100, b"flushed" * 1000)
    namespace.flush()
    namespace.write(100, b"not")
    again = Namespace(Firmware(SMALL, firmware.ftl.nand), threading.Lock())
    assert again.size_bytes == namespace.size_bytes
    assert again.read(100, 7000) == b"flushed" * 1000


def test_counters_of_what_was_flushed_do_not_go_back_with_a_loss_of_power():
    firmware = Firmware(SMALL)
    namespace = Namespace(firmware, threading.Lock())
    for number in range(700):
        namespace.write(512 * (number % 50), b"x" * 512)
        namespace.flush()
    before, journal = firmware.ftl.counters, firmware.ftl.counters.journal
    namespace.flush()
    assert before.journal == journal, "an idle flush writes nothing"
    assert journal == 2 * 700, "any other names what it acknowledges, in two places"
    firmware.ftl.nand.power_on()
    after = Firmware(SMALL, firmware.ftl.nand).ftl.counters
    assert after.blocks == before.blocks == 700
    assert after.host_writes == 700
