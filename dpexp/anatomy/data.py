"""What a run would do, as plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """A number that was computed, or None with the reason in `note`.

    Args:
        value: None where it cannot be known. A 0 is a real 0.
        note: what the number leaves out or assumes, or why there is none.
        at_least: something that adds to it could not be counted.
    """

    value: int | None
    note: str = ""
    at_least: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """The model as a single device has it."""

    name: str
    parameters: int  # numbers, each shared parameter once
    trainable: int
    buffers: int
    parameter_bytes: int
    gradient_bytes: int  # of the trainable parameters
    buffer_bytes: int
    bytes_by_dtype: dict[str, int]  # of parameters and buffers
    built_on: str  # meta, or cpu where the constructor does not work on meta


@dataclass(frozen=True)
class Layout:
    """How the batch is spread."""

    label: str
    strategy: str
    task: str
    precision: str
    device: str
    num_devices: int
    num_processes: int
    emulated: bool
    batch_rows: int  # global
    batch_rows_per_device: int  # of the largest chunk
    micro_batches: int  # that a device's rows of a full batch are cut into
    dataset_rows: int | None  # None: a stream
    steps: int | None


@dataclass(frozen=True)
class Exchange:
    """What devices send each other in a full step.

    Args:
        step_bytes: size of the tensors that each device puts in or gets, per step.
        sent_bytes: what a device then sends if the library uses a ring; None where it does not.
        formula: how it was computed.
    """

    what: str
    step_bytes: int
    sent_bytes: int | None
    formula: str


@dataclass(frozen=True)
class Bucket:
    """Gradients that DDP sends together."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Buckets:
    """DDP's gradient buckets, in the order in which they are sent."""

    first_step: tuple[Bucket, ...]
    later: tuple[Bucket, ...]
    order: str  # where the order of the gradients comes from


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together."""

    name: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class DeviceShapes:
    """One device's part of a batch."""

    device: int
    rows: int  # 0: idle
    inputs: str = ""
    target: str = ""  # "": there is none on this device
    output: str = ""  # "": not known


@dataclass(frozen=True)
class BatchShapes:
    """A global batch over the devices."""

    step: int
    rows: int
    devices: tuple[DeviceShapes, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes by part on one device."""

    where: str
    parts: dict[str, Figure]

    @property
    def total(self) -> Figure:
        """All parts that are known."""
        known = [part.value for part in self.parts.values() if part.value is not None]
        unknown = [name for name, part in self.parts.items() if part.value is None]
        note = f"without {', '.join(unknown)}" if unknown else ""
        short = bool(unknown) or any(part.at_least for part in self.parts.values())
        return Figure(sum(known), note, at_least=short)


@dataclass(frozen=True)
class Anatomy:
    """What a run would do. Nothing in it was measured."""

    model: ModelFacts
    layout: Layout
    first: BatchShapes
    last: BatchShapes | None  # None: a stream, whose end is not known
    forward_flops: Figure  # of a step over all devices
    step_flops: Figure  # forward and backward when training, else the same
    loss_shape: str  # "": no loss, or not known
    memory: tuple[DeviceMemory, ...]
    exchanges: tuple[Exchange, ...]
    buckets: Buckets | None = None  # ddp when training
    units: tuple[Unit, ...] = ()  # fsdp
    problem: str = ""  # why the model could not be called; "" = it was
    notes: tuple[str, ...] = field(default=())
