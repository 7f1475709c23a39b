"""Choice of the guest machine's kernel; tests/vcsd/test_guest.py boots it."""

from pathlib import Path

from nvmevirt_config import guest


def test_kernel_versions_are_ordered_as_numbers():
    names = ["vmlinuz-6.1.0-9-cloud-amd64", "vmlinuz-6.1.0-10-cloud-amd64", "vmlinuz-6.12.3-1-cloud-amd64"]
    assert sorted(map(Path, reversed(names)), key=guest._version) == list(map(Path, names))
