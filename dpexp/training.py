"""What `task=train` adds to a step: the loss, the gradient's way to the optimizer, the update."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dpexp.losses import Loss, has_own_loss, summed_cross_entropy
from dpexp.masking import MaskedTargets
from dpexp.parallel import Strategy


@final
class Training:
    """Loss, backward and update.

    Args:
        scaler: of the loss, for fp16; None for other formats.
        clip_norm: largest norm of the gradient over all parameters; None = no clipping.
        scheduler: moves the learning rate after each step; None = constant.
        masked: counts the targets of a step that a cross-entropy does not leave out.
            `counts` says whether there is anything to count.
        own_loss_first: `loss_of` takes the model's own loss where its output brings one.
    """

    def __init__(
        self,
        loss_of: Loss,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        clip_norm: float | None,
        scheduler: LRScheduler | None,
        masked: MaskedTargets,
        own_loss_first: bool = True,
    ) -> None:
        self.loss_of = loss_of
        self.model = model  # not wrapped
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self._scaler = scaler
        self._clip_norm = clip_norm
        self._scheduler = scheduler
        self._skipped = 0
        self._masked = masked
        self._own_loss_first = own_loss_first
        self.counts = masked.applies

    def counted(self, target: Any, rows: int) -> float | None:
        """The targets of a step that count, over all ranks; None: all do."""
        return self._masked.counted(target, rows)

    def share(
        self,
        output: Any,
        target: Any,
        rows: int,
        global_rows: int,
        counted: float | None,
        strategy: Strategy,
    ) -> torch.Tensor:
        """What a micro-batch adds to the step's loss, weighted so that gradients are right.

        Args:
            rows: of this micro-batch; 0 = borrowed, which adds nothing.
            counted: of the step, as of :meth:`counted`.
        """
        if counted is None or (self._own_loss_first and has_own_loss(output)):
            return strategy.weigh(self.loss_of(output, target), rows, global_rows)
        weight = strategy.loss_divisor / counted if rows else 0.0
        return summed_cross_entropy(output, target) * weight

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradient to the parameters' gradients."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, strategy: Strategy) -> None:
        """One step of the optimizer with the gradients that are there; they are gone after it.

        With a scaler the step is left out when a gradient is not finite, as it happens while the
        scaler finds its scale; the learning rate then stays.
        """
        strategy.check_gradients(self._parameters)
        scaler, optimizer = self._scaler, self.optimizer
        if self._clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        left_out = False
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            left_out = scaler.get_scale() < scale
            self._skipped += left_out
        if self._scheduler is not None and not left_out:
            self._scheduler.step()
        optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Throw the gradients away."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What goes on from step to step besides the model and the optimizer."""
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "skipped": self._skipped,
            "masked": self._masked.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._skipped = state["skipped"]
        self._masked.load(state["masked"])

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result may not expect."""
        masked = self._masked.notes()
        if not self._skipped:
            return masked
        return (
            *masked,
            f"precision=fp16: {self._skipped} updates were left out because a gradient was not "
            "finite; this happens while the scaler finds its scale, and not under every strategy "
            "in the same steps",
        )

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, for the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        """What the loss, and so the gradients, are multiplied by before the next update."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()
