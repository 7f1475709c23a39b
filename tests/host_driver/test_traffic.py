"""Sums over all steps, and the last of them."""

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


def test_a_step_that_did_not_end_leaves_nothing():
    traffic = Traffic()
    traffic.begin_step()
    traffic.current.link_bytes += 5
    traffic.begin_step()
    traffic.end_step(1, Counter())
    assert (traffic.step_count, traffic.total.link_bytes) == (1, 0)
