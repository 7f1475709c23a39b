"""`vcsd doctor`: requirements of the transports."""

from __future__ import annotations

import sys

from vcsd_cli.guest import as_dict, findings_table
from vcsd_cli.shared import Output, OutputOption, print_json, stdout


def doctor(output: OutputOption = Output.NORMAL) -> None:
    """Check the requirements of each transport, and print fixes for missing ones. Exit code 1: one is not ready."""
    from vcsd.doctor import examine

    findings = examine()
    if output is Output.JSON:
        print_json({"ways": [as_dict(finding) for finding in findings]})
    else:
        stdout().print(findings_table("Transports", findings))
    if not all(finding.ok for finding in findings):
        sys.exit(1)
