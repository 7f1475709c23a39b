"""vLLM with prefixes in drives, compared with vLLM alone: the cases of `vcsd bench vllm`."""

import pytest

from vcsd_eval.bench.vllm import PREFIX, VllmLoad, experiment


@pytest.mark.usefixtures("own_run_dir")
def test_vllm_cases_have_hits_and_equal_tokens(vllm_python):
    """A second request, a restart, a drive that is killed, four requests at once, BF16.

    Whether a load was in flight when the drive was killed (`recomputed`) depends on the speed of the machine.
    """
    found = experiment(VllmLoad(python=vllm_python)).result
    assert list(found) == ["shared_prefix", "restarted", "drive_killed", "four_at_once", "bfloat16"]
    for name, case in found.items():
        assert (case["external_hits"], case["tokens_equal"]) == (PREFIX * case["requests"], True), name
