"""Examples of property tests: the same in each run, or more and random ones with `./dev test --random`."""

import os

from hypothesis import settings

RANDOM = "random"  # profile of `./dev test --random`; all other runs take Hypothesis's own profile "ci"
RANDOM_EXAMPLES = int(os.environ.get("VCSD_EXAMPLES", 1000))  # per test


def examples(count: int) -> int:
    """Number of examples of a test: `count`, with random examples `RANDOM_EXAMPLES`."""
    return RANDOM_EXAMPLES if settings.get_current_profile_name() == RANDOM else count
