"""The policy in docs/serving.md runs as printed."""

import re
from pathlib import Path


def test_example_of_serving_docs_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(code, "docs/serving.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) <= 1
