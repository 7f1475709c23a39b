"""Traffic summed over all steps, and that of the last step."""

from collections import Counter

from host_driver.traffic import KEPT_STEPS, Traffic


def test_sums_are_of_all_steps_and_memory_is_bounded():
    traffic, steps = Traffic(), KEPT_STEPS + 10
    for number in range(steps):
        traffic.begin_step()
        traffic.current.link_bytes += number
        traffic.end_step(2 * number, Counter(flash_token=number))
    assert (traffic.step_count, len(traffic.steps)) == (steps, KEPT_STEPS)
    sum_of_numbers = steps * (steps - 1) // 2
    assert (traffic.total.ns, traffic.total.link_bytes) == (2 * sum_of_numbers, sum_of_numbers)
    assert traffic.total.breakdown_ns == {"flash_token": sum_of_numbers}
    assert traffic.steps[-1].ns == 2 * (steps - 1)


def test_traffic_sums_steps_and_waits_by_context():
    traffic = Traffic()
    for context, ns, wait_ns in ((5, 10, 0), (127, 20, 4), (128, 30, 0), (300, 40, 40)):
        traffic.begin_step()
        traffic.count_decode([], 0, context)
        traffic.end_step(ns, Counter(flash_token=ns - wait_ns, flash_program=wait_ns))
    assert traffic.by_context == {0: (2, 30, 1, 10), 128: (1, 30, 1, 30), 256: (1, 40, 0, 0)}
    assert traffic.total.wait_ns == 44


def test_unfinished_step_is_not_counted():
    traffic = Traffic()
    traffic.begin_step()
    traffic.current.link_bytes += 5
    traffic.begin_step()
    traffic.end_step(1, Counter())
    assert (traffic.step_count, traffic.total.link_bytes) == (1, 0)
