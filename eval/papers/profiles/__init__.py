"""Hardware and models to evaluate, as YAML files with units in their keys, checked on load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from csd_spec import ModelShape
from csd_spec.checked import frozen_value
from kv_cache.hardware import Accelerator
from nvmevirt_config.document import read_yaml

FOLDER = Path(__file__).parent
MOST = 64  # GPUs that share a model
T = TypeVar("T", bound="Profile")


@frozen_value
class Profile:
    """A named set of numbers; their ranges cover every current machine, so a value outside is probably in another unit.

    Raises:
        ValueError: A number is out of range; the message names it.
    """

    name: str

    @classmethod
    def load(cls: type[T], name: str) -> T:
        """A shipped profile by name, or one from a file (a name that ends in .yaml)."""
        folder = FOLDER / cls.__name__.lower()
        path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
        if not path.is_file():
            names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            raise ValueError(f"{cls.__name__.lower()} = {name!r}: must be a YAML file or one of {names}")
        return read_yaml(path, cls)


@frozen_value
class Gpu(Profile):
    """A GPU's memory and its rates."""

    memory_gib: Annotated[float, Field(ge=1, le=1 << 16)]
    memory_gb_per_s: Annotated[float, Field(ge=20, le=1 << 20)]
    fp16_tflops: Annotated[float, Field(ge=1, le=1 << 19)]

    @property
    def accelerator(self) -> Accelerator:
        """The same, as the cost model has it."""
        return Accelerator(self.name, self.memory_gib * 2**30, self.memory_gb_per_s * 1e9, self.fp16_tflops * 1e12)

    @classmethod
    def some(cls, name: str) -> Gpu:
        """A profile, or several of one with a part of each layer on each: 8xh100."""
        count, x, one = name.partition("x")
        if not (x and count.isdecimal()):
            return cls.load(name)
        if not 1 <= int(count) <= MOST:
            raise ValueError(f"gpu = {name!r}: the count must be from 1 to {MOST}")
        return cls.load(one).times(int(count))

    def times(self, count: int) -> Gpu:
        """Profile of `count` of these GPUs."""
        if count == 1:
            return self
        return Gpu(
            name=f"{count}x{self.name}",
            memory_gib=self.memory_gib * count,
            memory_gb_per_s=self.memory_gb_per_s * count,
            fp16_tflops=self.fp16_tflops * count,
        )

    def holding(self, nbytes: float) -> Gpu:
        """Smallest number of these GPUs, a power of two, that holds the weights and a tenth more."""
        count = 1
        while 1.1 * nbytes > self.memory_gib * count * 2**30 and count < MOST:
            count *= 2
        return self.times(count)


@frozen_value
class Host(Profile):
    """A host's memory, and its link to the GPU. gpu_link_us: fixed time of a copy, without its bytes."""

    dram_gib: Annotated[float, Field(ge=4, le=8192)]
    gpu_link_gb_per_s: Annotated[float, Field(ge=1, le=1000)]
    gpu_link_us: Annotated[float, Field(ge=0, le=500)] = 0


@frozen_value
class Ssd(Profile):
    """A plain SSD. lba_bytes: size of its logical blocks. capacity_tb: set if it matters."""

    read_gb_per_s: Annotated[float, Field(ge=0.1, le=50)]
    write_gb_per_s: Annotated[float, Field(ge=0.1, le=50)]
    random_read_us: Annotated[float, Field(ge=5, le=500)]
    random_write_us: Annotated[float, Field(ge=1, le=500)]
    lba_bytes: Annotated[int, Field(ge=512, le=1 << 16)] = 512
    capacity_tb: Annotated[float, Field(gt=0, le=1000)] | None = None


@frozen_value
class Model(Profile):
    """A decoder with a KV cache in 16 bits.

    Attributes:
        window_layers: Layers that attend only to the last `window` tokens.
        latent: Heads share a row of head_dim values per token, part of which is V.
        active_billion: Parameters used per token, if experts are selected.
        weight_bits: Bits of a parameter.
    """

    layers: Annotated[int, Field(ge=1, le=1000)]
    q_heads: Annotated[int, Field(ge=1, le=1024)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=8, le=1024)]
    parameters_billion: Annotated[float, Field(ge=0.001, le=5000)]
    window_layers: Annotated[int, Field(ge=0, le=1000)] = 0
    window: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    latent: bool = False
    active_billion: Annotated[float, Field(ge=0.001, le=5000)] | None = None
    weight_bits: Annotated[float, Field(ge=1, le=32)] = 16

    def __post_init__(self) -> None:
        if self.window_layers >= self.layers:
            raise ValueError(f"window_layers = {self.window_layers}: must be fewer than layers = {self.layers}")
        if bool(self.window_layers) != bool(self.window):
            raise ValueError(
                f"window = {self.window}: this and window_layers = {self.window_layers} must both be 0 or both positive"
            )

    @property
    def shape(self) -> ModelShape:
        """Shape of the layers with full attention: the KV cache that drives may hold."""
        return ModelShape(
            name=self.name,
            layers=self.layers - self.window_layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            latent=self.latent,
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return self.parameters_billion * 1e9 * self.weight_bits / 8

    @property
    def active(self) -> float:
        """Parameters that a token passes."""
        return 1e9 * (self.active_billion or self.parameters_billion)

    def window_bytes(self, tokens: float) -> float:
        """KV data of a sequence in the sliding-window layers, bytes."""
        return self.window_layers * min(tokens, self.window) * 2 * self.kv_heads * self.head_dim * 2

    def read_bytes(self, batch: float) -> float:
        """Bytes of weights that a step reads; of experts only the selected ones, random for each token."""
        missed: float = (1 - self.active / (1e9 * self.parameters_billion)) ** batch
        return self.weight_bytes * (1 - missed)
