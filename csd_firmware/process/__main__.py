"""`python -m csd_firmware.process FILE`: serve the drives of a file that `ServedDrives.to_json` has made."""

from __future__ import annotations

import sys
from pathlib import Path

from csd_firmware.process.supervisor import Supervisor, print_to_stderr
from csd_link.served_drive import ServedDrives


def main() -> None:
    """The process that a run starts for drives of its own."""
    drives = ServedDrives.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(Supervisor(drives, print_to_stderr).run())


if __name__ == "__main__":
    main()
