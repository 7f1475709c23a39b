"""NVMeVirt's memory reservation: its kernel parameters, and whether it is present."""

import pytest

from nvmevirt_config.module import Reservation, _run, check, load


def machine(tmp_path, command_line="quiet", isolated="", online="0-3", module=None):
    files = {"proc/cmdline": command_line}
    files |= {f"sys/devices/system/cpu/{name}": text for name, text in (("isolated", isolated), ("online", online))}
    if module:
        files["sys/module/nvmev/parameters/memmap_size"] = module
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return tmp_path


def states(findings):
    return {finding.what: finding.ok for finding in findings}


def test_reservation_gives_kernel_and_module_arguments():
    reservation = Reservation(start_bytes=4 << 30, size_bytes=1 << 30, cpus=(2, 3))
    assert reservation.kernel_argument == "memmap=1024M$4096M"
    assert reservation.isolation_argument == "isolcpus=2,3"
    assert reservation.module_options == ("memmap_start=4096M", "memmap_size=1024M", "cpus=2,3")
    assert reservation.end_bytes == 5 << 30
    assert reservation.storage_start_bytes == (4 << 30) + (1 << 20)


@pytest.mark.parametrize(
    "field", [{"size_bytes": 1 << 20}, {"start_bytes": 5}, {"cpus": (1,)}, {"cpus": (1, 1)}, {"cpus": (1, -2)}]
)
def test_invalid_reservation_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        Reservation(**field)


def test_unprepared_machine_gets_all_instructions(tmp_path):
    findings = check(Reservation(), machine(tmp_path))
    assert states(findings) == {
        "memory is reserved": False,
        "cores are online": True,
        "cores are isolated": False,
        "module is loaded": False,
    }
    fixes = " ".join(finding.fix for finding in findings)
    for word in ("memmap=256M\\\\\\$1024M", "isolcpus=1,2", "vcsd guest load", "update-grub"):
        assert word in fixes


@pytest.mark.parametrize("memmap", ["memmap=256M$1024M", "memmap=1G$0x40000000", "ro memmap=1M$1M memmap=2G$1G"])
def test_prepared_machine_has_no_findings(tmp_path, memmap):
    root = machine(tmp_path, memmap, isolated="1-2", module="268435456")
    assert all(states(check(Reservation(), root)).values())


def test_module_of_another_size_is_detected(tmp_path):
    root = machine(tmp_path, "memmap=256M$1024M", isolated="1-2", module="128M")
    assert not states(check(Reservation(), root))["module has the size of the reservation"]


def test_memory_reserved_elsewhere_is_a_finding(tmp_path):
    assert not states(check(Reservation(), machine(tmp_path, "memmap=256M$2048M")))["memory is reserved"]


def test_load_of_missing_module_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nevermore\.ko"):
        load(tmp_path / "nevermore.ko", Reservation())


def test_command_that_fails_is_an_error():
    _run("true")
    with pytest.raises(OSError, match=r"false: 1"):
        _run("false")
