"""vLLM with prefixes in drives, compared with vLLM alone."""

import pytest

from tests.real.vllm_cases import PREFIX, run_cases


@pytest.mark.usefixtures("own_run_dir")
def test_vllm_cases_have_hits_and_equal_tokens(vllm_python):
    """A second request, a restart, a drive that is killed, four requests at once, BF16.

    Whether a load was in flight when the drive was killed (`recomputed`) depends on the speed of the machine.
    """
    cases = run_cases(vllm_python, 2, lambda _: None)
    assert list(cases) == ["shared_prefix", "restarted", "drive_killed", "four_at_once", "bfloat16"]
    for name, case in cases.items():
        assert (case["external_hits"], case["tokens_equal"]) == (PREFIX * case["requests"], True), name
