"""Identity of a model: a digest of everything that the keys and values of a token sequence depend on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

Check = Literal["sampled", "content"]
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TEXTS = (".json", ".py")  # configuration, index of shards, scales, code, tokenizer
HEAD_BYTES = 1 << 20  # start of a weight file: its header with names and shapes of tensors
PIECES, PIECE_BYTES = 64, 4096  # evenly spaced samples of the rest
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One file of a model.

    Attributes:
        name: Path below the model's folder.
        nbytes: Size, bytes.
        mtime_ns: Modification time, ns; None if `digest` covers the whole content.
        digest: Hexadecimal digest of the bytes read.
    """

    name: str
    nbytes: int
    mtime_ns: int | None
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A model as its resolved configuration and its files; the spelling of its path does not matter.

    Attributes:
        name: Display name; not part of the digest.
        config: Resolved configuration as canonical JSON.
        files: Weights and texts, in order of their names.
        check: `sampled`: size, modification time, first MiB and 64 pieces of 4 KiB of weights; `content`: all bytes.
            Texts are always read whole.
    """

    name: str
    config: str = "{}"
    files: tuple[FileIdentity, ...] = ()
    check: Check = "sampled"

    @classmethod
    def from_text(cls, words: str) -> ModelIdentity:
        """An identity in the caller's words, which must change when the model does."""
        return cls(name=words, config=canonical({"words": words}))

    @property
    def digest(self) -> str:
        """Hexadecimal digest of configuration and files."""
        text = json.dumps([self.config, self.check, [asdict(file) for file in self.files]])
        return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Values for a manifest."""
        return {
            "name": self.name,
            "digest": self.digest,
            "check": self.check,
            "config": json.loads(self.config),
            "files": [asdict(file) for file in self.files],
        }


def canonical(config: Mapping[str, Any]) -> str:
    """A configuration as JSON in which equal values have equal text.

    Keys that begin with `_` are dropped: transformers stores the path of a configuration there.
    """
    return json.dumps(_plain(config), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if not str(key).startswith("_")}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(entry), sort_keys=True) for entry in value)
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, str | int | float) else str(value)


def files_of(path: Path, check: Check = "sampled", prefix: str = "") -> tuple[FileIdentity, ...]:
    """Identities of a model's files.

    Args:
        path: A folder, including weights and texts of its subfolders; or one file.
        check: How weights are read.
        prefix: Prefix of each name.

    Raises:
        ValueError: There are no weights.
        OSError: A file cannot be read.
    """
    files = {path.name: path} if path.is_file() else dict(_walk_files(path))
    if not any(name.endswith(WEIGHTS) for name in files):
        raise ValueError(f"{path}: contains no weights ({', '.join(WEIGHTS)})")
    return tuple(_identity(prefix + name, files[name], check) for name in sorted(files))


def _walk_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Weights and texts with their path below a folder; links are followed, each folder is read once."""
    seen = set[str]()
    for at, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            paths = [Path(at, name) for name in names if name.endswith((*WEIGHTS, *TEXTS))]
            yield from ((str(path.relative_to(folder)), path) for path in paths)
        seen.add(real)


def _identity(name: str, path: Path, check: Check) -> FileIdentity:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        sampled = check == "sampled" and name.endswith(WEIGHTS)
        if sampled:
            digest.update(file.read(HEAD_BYTES))
            left = max(0, status.st_size - HEAD_BYTES)
            for piece in range(PIECES if left else 0):
                file.seek(HEAD_BYTES + left * piece // PIECES)
                digest.update(file.read(PIECE_BYTES))
        else:
            while part := file.read(HEAD_BYTES):
                digest.update(part)
    return FileIdentity(name, status.st_size, status.st_mtime_ns if sampled else None, digest.hexdigest())
