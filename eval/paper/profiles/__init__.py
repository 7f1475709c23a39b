"""Hardware and models to evaluate, as YAML files with units in their keys, checked on load."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from csd_spec import ModelShape

FOLDER = Path(__file__).parent
T = TypeVar("T", bound="Profile")


def _between(low: float, high: float) -> Any:
    """A number that lies in this range in every machine of our days: what is outside is a mistake of unit."""
    return field(metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Something with a name and numbers; raises ValueError naming the one that is off."""

    name: str

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.metadata:
                low, high = each.metadata["low"], each.metadata["high"]
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise ValueError(f"{each.name} = {value!r}: must be a number")
                if not low <= value <= high:
                    raise ValueError(
                        f"{each.name} = {value:g}: must lie between {low:g} and {high:g}, in the key's unit"
                    )

    @classmethod
    def load(cls: type[T], name: str) -> T:
        """A shipped profile by name, or one from a file (a name that ends in .yaml)."""
        folder = FOLDER / cls.__name__.lower()
        path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))
            raise ValueError(f"{cls.__name__.lower()} = {name!r}: must be a YAML file or one of {known}")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("needs keys and values")
            wanted = [each.name for each in fields(cls)]
            for key in values:
                if key not in wanted:
                    near = difflib.get_close_matches(str(key), wanted, 1, 0.5)
                    raise ValueError(f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
            for key in wanted:
                if key not in values:
                    raise ValueError(f"{key} is missing")
            return cls(**values)
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Profile):
    """A GPU's memory and its rates."""

    memory_gib: float = _between(1, 1024)
    memory_gb_per_s: float = _between(20, 20_000)
    fp16_tflops: float = _between(1, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Profile):
    """A host's memory, and its link to the GPU."""

    dram_gib: float = _between(4, 8192)
    gpu_link_gb_per_s: float = _between(1, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssd(Profile):
    """A plain SSD."""

    read_gb_per_s: float = _between(0.1, 50)
    write_gb_per_s: float = _between(0.1, 50)
    random_read_us: float = _between(5, 500)
    random_write_us: float = _between(1, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Profile):
    """A decoder in FP16."""

    layers: int = _between(1, 1000)
    q_heads: int = _between(1, 1024)
    kv_heads: int = _between(1, 1024)
    head_dim: int = _between(8, 512)
    parameters_billion: float = _between(0.001, 5000)

    @property
    def shape(self) -> ModelShape:
        """Its attention."""
        return ModelShape(
            name=self.name,
            layers=self.layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return 2e9 * self.parameters_billion
