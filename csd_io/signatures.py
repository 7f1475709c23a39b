"""Detection of file systems and the like on a device, to avoid overwriting them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

LOOK_BYTES = 1 << 17  # covers every offset below

# offset, magic bytes, description: the offsets that blkid(8) checks
_KNOWN = (
    (0, b"XFSB", "an XFS file system"),
    (0, b"hsqs", "a squashfs file system"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (510, b"\x55\xaa", "a partition table"),
    (512, b"EFI PART", "a partition table"),
    (512, b"LABELONE", "an LVM volume"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID"),
    (4096, b"EFI PART", "a partition table"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (0x10040, b"_BHRfS_M", "a Btrfs file system"),
)


def detect_signature(begins: memoryview) -> str | None:
    """Describe the content of a device by its first bytes; None if no signature is known."""
    names = (name for offset, magic, name in _KNOWN if begins[offset : offset + len(magic)] == magic)
    return next(names, None)


def blkid(path: Path) -> str | None:
    """Describe the content of a block device by `blkid -p`; None if it finds nothing or is not installed."""
    if not (program := shutil.which("blkid") or shutil.which("blkid", path="/usr/sbin:/sbin")):
        return None
    done = subprocess.run([program, "-p", "-o", "export", path], capture_output=True, text=True, check=False)
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    kind = values.get("TYPE") or values.get("PTTYPE")
    if done.returncode == 8:  # ambivalent: several signatures
        return "more than one file system"
    return f"{kind} (blkid)" if kind else None
