"""Guest VM: a Debian kernel in QEMU with a root file system made from this project's packages, and an NVMe drive.

The drive is QEMU's `nvme` device on a raw file, or NVMeVirt's module on reserved memory. Both are memory that the
firmware outside maps, so that the guest's NVMe driver and the firmware communicate through windows in it.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nvmevirt_config.module import Reservation

QEMU, MAKE_FS = "qemu-system-x86_64", "mke2fs"
MODULES = Path("/lib/modules")
SERIAL = "vcsd"
MDTS = 6  # 256 KiB per command, typical of data center drives
QEMU_MODEL, NVMEVIRT_MODEL = "QEMU", "CSL_Virt"

_NEEDED = "numpy", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions", "zlib_ng"

# Parts of the standard library that are not needed
_LEFT_OUT = (
    *("site-packages", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "pydoc_data"),
    *("config-*", "*.a", "*.opt-[12].pyc", "*.pyi", "*.h", "*.c", "*.pyx"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A guest VM.

    Attributes:
        kernel: Kernel image.
        root: Image of a file system with /init.
        memory: File that backs the guest's memory.
        drive: Raw file of the NVMe drive; None with NVMeVirt's module.
        scratch: Raw file of another namespace of the same controller, for direct I/O; deallocation punches holes.
        kernel_args: Arguments on the kernel command line for /init.
        reservation: Memory and cores for NVMeVirt.
        network: Whether it has a network card, through which this machine's loopback is 10.0.2.2.
    """

    kernel: Path
    root: Path
    memory: Path
    drive: Path | None
    scratch: Path | None
    kernel_args: tuple[str, ...]
    reservation: Reservation
    cpus: int = 3
    network: bool = False

    def command(self, accelerator: str) -> list[str]:
        """QEMU command line. All namespaces belong to one controller, in the order in which Linux numbers them."""
        total = self.reservation.end_bytes
        files = [file for file in (self.drive, self.scratch, self.root) if file]
        line = [
            "console=ttyS0",
            f"root=/dev/nvme0n{len(files)}",
            "ro",
            "init=/init",
            "edd=off",
            "panic=-1",
            "loglevel=4",
        ]
        line += [self.reservation.kernel_argument, *self.kernel_args]
        devices = ["-device", f"nvme,serial={SERIAL},id=nvme,mdts={MDTS}"]
        more = {self.root: ",readonly=on", self.scratch: ",discard=unmap"}
        for number, file in enumerate(files, 1):
            form = f"file={file},format=raw,if=none,id=disk{number},cache=writeback"
            devices += ["-drive", form + more.get(file, "")]
            blocks = "logical_block_size=4096,physical_block_size=4096"
            devices += ["-device", f"nvme-ns,drive=disk{number},bus=nvme,nsid={number},{blocks}"]
        if self.network:
            devices += ["-netdev", "user,id=net,restrict=no", "-device", "virtio-net-pci,netdev=net"]
        return [
            QEMU,
            *("-machine", "q35,memory-backend=ram", "-accel", accelerator, "-cpu", "max", "-smp", str(self.cpus)),
            *("-m", f"{total >> 20}M"),
            *("-object", f"memory-backend-file,id=ram,size={total},mem-path={self.memory},share=on"),
            *("-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"),
            *("-kernel", str(self.kernel), "-append", " ".join(line)),
            *devices,
        ]

    def run(self, accelerator: str, timeout_s: float, silence_s: float, answer: str) -> list[str] | None:
        """Boot, and wait until the guest has powered off; returns its console, or None if it never printed anything.

        Args:
            accelerator: QEMU accelerator, kvm or tcg.
            timeout_s: Limit on the whole run, seconds.
            silence_s: Limit on the time to the first output, seconds.
            answer: Prefix of the last relevant line; the guest is stopped after it.

        Raises:
            TimeoutError: The guest was not done in time.
        """
        began, console = time.monotonic(), bytearray()
        machine = subprocess.Popen(self.command(accelerator), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert machine.stdout is not None
        try:
            while True:
                limit = timeout_s if console else min(silence_s, timeout_s)
                left = began + limit - time.monotonic()
                if left <= 0 or not select.select([machine.stdout], [], [], left)[0]:
                    if not console:
                        return None
                    last = console.decode(errors="replace").strip().splitlines()[-1:]
                    raise TimeoutError(
                        f"the guest machine was not done after {timeout_s:g} s; its last output was: {last}"
                    )
                part = os.read(machine.stdout.fileno(), 1 << 16)
                console += part
                lines = console.decode(errors="replace").splitlines()
                if not part or any(line.startswith(answer) for line in lines[:-1]):
                    return lines
        finally:
            machine.kill()
            machine.wait()
            machine.stdout.close()


def find_kernel() -> Path:
    """Find the newest Debian cloud kernel; raises FileNotFoundError with the command that installs it."""
    kernels = sorted(Path("/boot").glob("vmlinuz-*cloud*"), key=_version)
    if not kernels:
        raise FileNotFoundError("no kernel for the guest machine: apt-get install linux-image-cloud-amd64")
    return kernels[-1]


def _version(kernel: Path) -> list[int]:
    """Numbers of a kernel's name, which order versions: 6.1.0-9 is before 6.1.0-10."""
    return [int(number) for number in re.findall(r"\d+", kernel.name)]


def kernel_modules(kernel: Path, names: Iterable[str]) -> list[Path]:
    """List modules of a kernel, each after its dependencies; raises FileNotFoundError if one is missing.

    Source: the format of modules.dep, depmod(8).
    """
    folder = MODULES / kernel.name.removeprefix("vmlinuz-")
    listed = (folder / "modules.dep").read_text().splitlines() if (folder / "modules.dep").exists() else []
    needs = {Path(at).name: (at, after.split()) for at, _, after in (line.partition(":") for line in listed)}
    paths = list[str]()
    for name in names:
        at, after = needs.get(f"{name}.ko", ("", []))
        if not at:
            raise FileNotFoundError(f"{folder} has no {name}.ko: apt-get install linux-image-cloud-amd64")
        paths += [*reversed(after), at]
    return [folder / path for path in dict.fromkeys(paths)]


def make_root(image: Path, packages: Iterable[Path], files: Mapping[str, Path]) -> None:
    """Create a file system with this Python, numpy, this project's packages and /init.

    Args:
        image: Image file to create.
        packages: Packages of this project.
        files: Additional files by their path in the guest; libraries of programs among them are added.

    Raises:
        FileNotFoundError: A tool is missing.

    Files keep the paths that they have on this machine, so that no search path has to be set.
    """
    if not shutil.which(MAKE_FS):
        raise FileNotFoundError(f"{MAKE_FS} is missing: apt-get install e2fsprogs")
    stage = image.with_suffix(".root")
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("proc", "sys", "dev", "tmp", "vcsd"):
        (stage / name).mkdir(parents=True)
    _copy_tree(library, stage / library.relative_to("/"))
    for package in (*packages, *_wheels()):
        (shutil.copyfile if package.is_file() else _copy_tree)(package, stage / "vcsd" / package.name)
    binaries = [python, *files.values(), *(path for path in stage.rglob("*.so*") if path.is_file())]
    for needed in _libraries(binaries):
        _copy_file(needed, stage)
    _copy_file(python, stage)
    for at, source in files.items():
        (stage / at).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, stage / at)
    init = stage / "init"
    init.write_text(
        f"#!{python} -B\nimport sys\nsys.path.insert(0, '/vcsd')\nfrom host_driver.in_guest import main\nmain()\n"
    )
    init.chmod(0o755)
    size = sum(path.stat().st_size for path in stage.rglob("*") if path.is_file())
    blocks = str((size * 5 // 4 >> 10) + 16384) + "k"
    command = [MAKE_FS, "-q", "-t", "ext4", "-b", "4096", "-d", str(stage), "-F", str(image), blocks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{MAKE_FS}: {done.stderr.strip()}")
    shutil.rmtree(stage)


def _wheels() -> list[Path]:
    """Third-party packages that are needed in the guest."""
    origins = [Path(find_spec(name).origin) for name in _NEEDED]  # type: ignore[union-attr, arg-type]  # installed
    packages = [path.parent if path.name == "__init__.py" else path for path in origins]
    return [*packages, *packages[0].parent.glob("numpy.libs")]


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEFT_OUT))


def _copy_file(path: Path, stage: Path) -> None:
    target = stage / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(path, target)


def _libraries(binaries: Iterable[Path]) -> set[Path]:
    """Shared libraries of this machine that binaries need, including the loader."""
    libraries: set[Path] = set()
    executables = set(binaries)
    for binary in executables:
        said = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
        words = (word for line in said.splitlines() for word in line.split())
        libraries |= {Path(word) for word in words if word.startswith("/") and not word.endswith(":")}
    return {path for path in libraries if path.exists() and path not in executables}
