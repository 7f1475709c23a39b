"""vLLM with prefixes in drives, compared with vLLM alone: the cases of `vcsd bench vllm`."""

import pytest

from eval.bench.vllm import PREFIX, Load, experiment


@pytest.mark.usefixtures("own_run_dir")
def test_vllm_cases_have_hits_and_equal_tokens(vllm_python):
    """A second request, restarts, a drive that is killed, four requests at once, BF16."""
    found = experiment(Load(python=vllm_python))
    assert not found.failed, found.result
    assert found.result["shared_prefix"] == {"external_hits": PREFIX, "tokens_equal": True, "requests": 1}
