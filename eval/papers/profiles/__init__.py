"""Hardware and models to evaluate, as YAML files with units in their keys, checked on load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from csd_spec import ModelShape
from csd_spec.checked import value
from nvmevirt_config.document import read_yaml

FOLDER = Path(__file__).parent
T = TypeVar("T", bound="Profile")


@value
class Profile:
    """Something with a name and numbers, in ranges that hold every machine of our days: outside is another unit.

    Raises ValueError naming the one that is off.
    """

    name: str

    @classmethod
    def load(cls: type[T], name: str) -> T:
        """A shipped profile by name, or one from a file (a name that ends in .yaml)."""
        folder = FOLDER / cls.__name__.lower()
        path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))
            raise ValueError(f"{cls.__name__.lower()} = {name!r}: must be a YAML file or one of {known}")
        return read_yaml(path, cls)


@value
class Gpu(Profile):
    """A GPU's memory and its rates."""

    memory_gib: Annotated[float, Field(ge=1, le=1024)]
    memory_gb_per_s: Annotated[float, Field(ge=20, le=20_000)]
    fp16_tflops: Annotated[float, Field(ge=1, le=10_000)]


@value
class Host(Profile):
    """A host's memory, and its link to the GPU. gpu_link_us: what a copy takes without its bytes."""

    dram_gib: Annotated[float, Field(ge=4, le=8192)]
    gpu_link_gb_per_s: Annotated[float, Field(ge=1, le=1000)]
    gpu_link_us: Annotated[float, Field(ge=0, le=500)] = 0


@value
class Ssd(Profile):
    """A plain SSD. lba_bytes: of its logical blocks. capacity_tb: where it matters."""

    read_gb_per_s: Annotated[float, Field(ge=0.1, le=50)]
    write_gb_per_s: Annotated[float, Field(ge=0.1, le=50)]
    random_read_us: Annotated[float, Field(ge=5, le=500)]
    random_write_us: Annotated[float, Field(ge=1, le=500)]
    lba_bytes: Annotated[int, Field(ge=512, le=1 << 16)] = 512
    capacity_tb: Annotated[float, Field(gt=0, le=1000)] | None = None


@value
class Model(Profile):
    """A decoder in FP16."""

    layers: Annotated[int, Field(ge=1, le=1000)]
    q_heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=8, le=512)]
    parameters_billion: Annotated[float, Field(ge=0.001, le=5000)]

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
