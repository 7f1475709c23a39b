"""`python -m csd_firmware.process FILE PID`: serve the drives in FILE (`ServedDrives.to_json`) for process PID."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from csd_firmware.process.supervisor import Supervisor, print_to_stderr
from csd_link.served_drive import ServedDrives


def main() -> None:
    """Serve the private drives of a run; exits and cleans up when the run's process has exited."""
    file = Path(sys.argv[1])
    drives = ServedDrives.from_json(file.read_text(encoding="utf-8"))
    supervisor = Supervisor(drives, print_to_stderr, owner=int(sys.argv[2]))
    code = supervisor.run()
    if supervisor.orphaned:
        shutil.rmtree(file.parent, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
