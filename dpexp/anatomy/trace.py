"""One call of the model: what it gives, its FLOPs, and what autograd keeps of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dpexp.anatomy.data import Figure
from dpexp.anatomy.specimen import short_line
from dpexp.batches import Inputs, map_tensors
from dpexp.errors import ConfigError
from dpexp.losses import Loss
from dpexp.precision import autocast
from dpexp.schema import Precision
from dpexp.shapes import shape_of, show

# Operators that do arithmetic of the order of a matrix product. Those of them that torch's counter
# has no formula for would count as 0. The fused cells' own products are counted apart from them.
_HEAVY = re.compile(
    r"(?<!_thnn_fused_)(?:rnn|lstm|gru)(?:_|$)|mkldnn|attention|transformer|convolution|conv\dd"
    r"|matmul|mm$|_mm_|mv$|dot$|^_fft_|linalg_(?!vector_norm|cross|diagonal|_powsum)|svd|cholesky"
    r"|_solve|cdist|^_trilinear|ctc_loss|^lu_|geqrf|ormqr|^inverse"
)
NO_HEAVY = "no matrix product, convolution or attention in it; other arithmetic is not counted"


@dataclass(frozen=True)
class Counted:
    """A forward call of one device's rows, and its backward when training.

    Args:
        arrival: indices of trainable parameters in the order in which their gradients came.
        problem: why the call failed; "" = it did not. `backward_problem`: loss or backward.
    """

    output: str = ""
    loss: str = ""
    forward: int = 0
    both: int = 0
    uncounted_forward: tuple[str, ...] = ()
    uncounted_both: tuple[str, ...] = ()
    arrival: tuple[int, ...] = ()
    problem: str = ""
    backward_problem: str = ""


class Caller:
    """Calls a model as the loop does.

    Args:
        context: inside it tensors are fake; a null context for real ones. Entered repeatedly.
        device: that autocast is for.
        loss_of: None when not training.
    """

    def __init__(
        self,
        model: nn.Module,
        context: AbstractContextManager[Any],
        device: torch.device,
        precision: Precision,
        loss_of: Loss | None,
    ) -> None:
        self._model, self._context, self._loss_of = model, context, loss_of
        self._device, self._precision = device, precision

    def count(self, inputs: Inputs) -> Counted:
        """Call it and count.

        Raises:
            ConfigError: what a run would refuse as well.
        """
        seen, counter = _Watch(_is_uncounted), FlopCounterMode(display=False)
        counted = Counted()
        # The counter comes first: it sees an operator, and `seen` what it does not take apart.
        with (
            self._context,
            _countable(),
            self._graded(),
            _arrivals(self._model) as arrival,
            seen,
            counter,
        ):
            try:
                with autocast(self._precision, self._device):
                    output = self._call(inputs)
                flops, left_out = counter.get_total_flops(), tuple(sorted(seen.names))
                counted = Counted(show(shape_of(output)), "", flops, flops, left_out, left_out)
                loss = self._backward(output, inputs)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  # the user's code may raise anything
                reason, loss = reason_of(error), None
                called = bool(counted.output)
                counted = (
                    replace(counted, backward_problem=reason) if called else Counted(problem=reason)
                )
        self._model.zero_grad(set_to_none=True)
        if loss is None:
            return counted
        return replace(
            counted,
            loss=show(shape_of(loss)),
            both=counter.get_total_flops(),
            uncounted_both=tuple(sorted(seen.names)),
            arrival=tuple(arrival),
        )

    def kept(self, inputs: Inputs) -> Figure:
        """Bytes that autograd keeps for backward, without parameters, buffers and the batch."""
        if self._loss_of is None:
            return Figure(0, "nothing is kept without a backward pass")
        own = [*self._model.parameters(), *self._model.buffers(), *tensors_in(tuple(inputs))]
        excluded = {tensor.untyped_storage()._cdata for tensor in own}
        # The storages are held on to, so that no later one gets the address of an earlier one.
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            return tensor

        opaque = _Watch(_has_workspace)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        try:
            with (
                self._context,
                self._graded(),
                hooks,
                opaque,
                autocast(self._precision, self._device),
            ):
                output = self._call(inputs)
                self._loss_of(output, inputs.target)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001
            return Figure(None, reason_of(error))
        total = sum(s.nbytes() for key, s in storages.items() if key not in excluded)
        casts = self._precision in (Precision.bf16, Precision.fp16)
        note = "what autograd keeps of one forward and loss"
        note += ", with autocast's copies of weights" if casts else ""
        unknown = bool(opaque.names) and not isinstance(self._context, nullcontext)
        note += f", without the workspace of {', '.join(opaque.names)}" if unknown else ""
        return Figure(total, note, at_least=unknown)

    def _call(self, inputs: Inputs) -> Any:
        return self._model(*inputs.args, **inputs.kwargs)

    def _backward(self, output: Any, inputs: Inputs) -> torch.Tensor | None:
        if self._loss_of is None:
            return None
        with autocast(self._precision, self._device):
            loss = self._loss_of(output, inputs.target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _graded(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], torch.set_grad_enabled(self._loss_of is not None))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operators that are asked for."""

    def __init__(self, wanted: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._wanted = wanted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", func)
        if self._wanted(packet):
            self.names.add(str(packet))
        return func(*args, **(kwargs or {}))


def _is_uncounted(packet: Any) -> bool:
    """Heavy operators without a formula, and all that are not torch's own."""
    space, _, name = str(packet).partition(".")
    foreign = space not in ("aten", "prim", "prims", "profiler", "c10d")
    return packet not in flop_registry and (foreign or _HEAVY.search(name) is not None)


def _has_workspace(packet: Any) -> bool:
    """Operators that keep a workspace for backward whose size only the real ones know."""
    return str(packet) in ("aten.mkldnn_rnn_layer", "aten._cudnn_rnn")


@contextmanager
def _countable() -> Iterator[None]:
    """Inside the block torch takes the plain forms of attention and recurrent layers.

    Their fast kernels have no formula: torch's counter gives 0 for them. The result's sizes and
    the arithmetic are the same.
    """
    mkldnn: Any = torch.backends.mkldnn  # its attributes are typed as descriptors
    cudnn: Any = torch.backends.cudnn
    before = mkldnn.enabled, cudnn.enabled, torch.backends.mha.get_fastpath_enabled()
    mkldnn.enabled, cudnn.enabled = False, False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mkldnn.enabled, cudnn.enabled = before[0], before[1]
        torch.backends.mha.set_fastpath_enabled(before[2])


@contextmanager
def _arrivals(model: nn.Module) -> Iterator[list[int]]:
    """The indices of trainable parameters, as their gradients come."""
    order: list[int] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = []
    for index, parameter in enumerate(trained):

        def note(_: torch.Tensor, index: int = index) -> None:
            order.append(index)

        hook: Any = parameter.register_post_accumulate_grad_hook
        handles.append(hook(note))
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def reason_of(error: BaseException) -> str:
    """Why a call failed, on one line."""
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"it depends on the values of tensors ({short_line(error)}), and there are none here"
    if kind == "AssertionError" and "convert all Tensors to FakeTensors" in str(error):
        return "it uses tensors that torch does not count among the model's"
    return f"{kind}: {short_line(error)}"


def add_up(devices: list[Counted], *, both: bool) -> Figure:
    """The FLOPs of a step from those of its devices.

    Args:
        both: forward and backward, else forward only.
    """
    for counted in devices:
        problem = counted.problem or (counted.backward_problem if both else "")
        if problem:
            return Figure(None, problem)
    total = sum(counted.both if both else counted.forward for counted in devices)
    names = [c.uncounted_both if both else c.uncounted_forward for c in devices]
    left_out = sorted({name for each in names for name in each})
    if left_out and not total:
        return Figure(None, f"torch has no formula for {', '.join(left_out)}")
    if left_out:
        return Figure(total, f"not counted: {', '.join(left_out)}", at_least=True)
    return Figure(total, "" if total else NO_HEAVY)
