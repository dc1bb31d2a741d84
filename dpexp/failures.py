"""From an exception in a rank to an :class:`ErrorRecord` that tells a person what to do."""

from __future__ import annotations

import errno
import re
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

import dpexp
from dpexp.batches import leading_sizes
from dpexp.build import UserCodeError
from dpexp.device import is_out_of_memory
from dpexp.errors import ConfigError, NonFiniteLossError
from dpexp.lifeline import Interrupted
from dpexp.loop import Progress
from dpexp.parallel.replicas import ReplicaError
from dpexp.plan import RunPlan
from dpexp.records import ErrorRecord
from dpexp.schema import Precision
from dpexp.texts import first_line

# Words of gloo, NCCL, torch's store and the system for a rank that is gone or cannot be reached.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "Software caused connection abort",
    "No route to host",
    "Network is unreachable",
    "Network is down",
    "Broken pipe",
    "Socket closed",
    "failed to connect",
    "recvBytes failed",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",
)
# And for one that does not come. What waits when a first operation gives up is told that it did.
_LATE = (
    "Timed out",
    "Application timeout caused pair closure",
    "wait timeout after",
    "collective operation timeout",
)
# A failure inside gloo's connections; not its check that both sides send the same amount.
_GLOO = re.compile(r"(?<!enforce fail at )(?<=\[)\S*gloo/transport/\S+:\d+\] ")
_OWN = Path(dpexp.__file__).parent
_IN_LOADER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal Traceback")
_IN_LOSS = " (in the loss"
# Python's words for a call whose arguments do not fit.
_CALL = re.compile(r"forward\(\) (got an unexpected keyword|missing \d|takes )")
_UNUSED = (
    "ddp waits for the gradient of every parameter, and some got none in the step before: the "
    "model does not use them. Try: parallel.find_unused_parameters=true"
)
# ErrorRecord.type of a rank that failed because another one had left, or did not come in time.
LOST_PEER = "LostPeer"
LATE_PEER = "LatePeer"
# The place where files are written is at fault, not the code that wrote.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def describe(error: BaseException, plan: RunPlan, rank: int, progress: Progress) -> ErrorRecord:
    """What happened, of which kind, where, and in whose code."""
    step = progress.current_step()
    full = "".join(traceback.format_exception(error))
    kind, name, message = _classify(error, plan, rank)
    during = f" of {progress.during}" if progress.during else ""
    where = (
        ""
        if progress.phase == "set-up" or kind in ("config", "interrupted", "nonfinite")
        else (f" [rank {rank}, step {step}, {progress.phase}{during}]")
    )
    if kind == "user_error":
        layer = _layer(error)
        message += layer
        if progress.step == 0 and progress.phase == "forward":
            message += _hint(error, layer, plan)
    frames = None if kind == "config" else user_frames(error)
    return ErrorRecord(
        kind,
        name,
        message + where,
        rank,
        step,
        full,
        frames,
        progress.phase,
        progress.during or None,
    )


def user_frames(error: BaseException) -> str | None:
    """The traceback's frames outside of dpexp, torch and the other libraries; None if none."""
    lines: list[str] = []
    current: BaseException | None = error
    while current is not None:
        frames = [f for f in traceback.extract_tb(current.__traceback__) if is_user(f.filename)]
        if frames:
            lines = traceback.format_list(frames)
        current = current.__cause__
    return "".join(lines) or None


def is_user(filename: str) -> bool:
    """Whether a file is the user's own code, as far as one can tell."""
    path = Path(filename)
    return (
        path.is_file()
        and _OWN not in path.parents
        and "site-packages" not in path.parts
        and not path.is_relative_to(Path(traceback.__file__).parent)
    )


def _classify(  # noqa: PLR0911  # a table of cases, one line each
    error: BaseException, plan: RunPlan, rank: int
) -> tuple[str, str, str]:
    inner = error.__cause__ if isinstance(error, (ReplicaError, UserCodeError)) else error
    name = type(inner or error).__name__
    if isinstance(inner, ConfigError):
        return "config", name, str(inner)
    if isinstance(error, NonFiniteLossError):
        return "nonfinite", name, str(error)
    if isinstance(error, Interrupted):
        return "interrupted", name, str(error)
    if isinstance(inner, SystemExit):
        return "crash", name, f"the model or dataset called sys.exit({inner.code!r})"
    if isinstance(inner, KeyboardInterrupt):  # a signal comes as Interrupted
        return "user_error", name, "the model or dataset raised KeyboardInterrupt"
    if isinstance(inner, OSError) and inner.errno in _NO_ROOM and user_frames(error) is None:
        return "crash", name, _unwritten(inner)
    if inner is not None and is_out_of_memory(inner):
        return "oom", name, _told(inner)
    text = _text(error)
    loader = loader_failure(text, plan)
    if loader is not None:
        return loader[0], name, loader[1]
    if "Expected to have finished reduction in the prior iteration" in text:
        return "user_error", name, _UNUSED
    if plan.num_processes > 1 and any(sign in text for sign in _LATE):
        limit = f"{plan.config.parallel.timeout_s:g} s"
        return (
            "hang",
            LATE_PEER,
            (
                f"rank {rank} waited {limit} for another rank (parallel.timeout_s={limit[:-2]}): "
                f"{_told(error)}"
            ),
        )
    if plan.num_processes > 1 and is_lost(text):
        return "crash", LOST_PEER, f"rank {rank} lost the connection to another rank"
    if isinstance(error, (ReplicaError, UserCodeError)):
        return "user_error", name, text
    text = _without_traceback(text, name)
    return "user_error", name, f"{name}: {text}" if text else name


def is_lost(text: str) -> bool:
    """Whether an error says that another rank could not be reached any more."""
    return any(sign in text for sign in _LOST) or _GLOO.search(text) is not None


def _without_traceback(text: str, name: str) -> str:
    """The user's own words in what torch makes of an error of a loader process."""
    if not _IN_LOADER.match(text):
        return text
    lines = text.rstrip().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("  "))
    return "\n".join(lines[last + 1 :]).removeprefix(f"{name}: ") + " (in a loader process)"


def _unwritten(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    reason = (error.strerror or str(error)).lower()
    return (
        f"a file of the run cannot be written: {reason}{where}. "
        "Try: another hydra.run.dir (in a sweep hydra.sweep.dir)"
    )


def loader_failure(text: str, plan: RunPlan) -> tuple[str, str] | None:
    """The kind and the message of a failure of a loader process, from torch's text; else None."""
    workers = plan.config.loader.workers
    setting = f"loader.workers={workers}"
    if not workers:
        return None
    if "DataLoader timed out" in text:
        limit = f"{plan.config.loader.timeout_s:g}"
        return "hang", (
            f"a loader process gave no batch for {limit} s (loader.timeout_s={limit}, {setting}). "
            "Try: loader.timeout_s=<more>, or loader.workers=0 to see where the dataset waits"
        )
    full = any(sign in text for sign in ("shared memory", "Bus error", "No space left on device"))
    if full and ("DataLoader worker" in text or "shared memory" in text):
        return "crash", (
            f"a loader process found no room in shared memory: /dev/shm is too small for batches "
            f"from {setting} processes, loader.prefetch={plan.config.loader.prefetch} batches each."
            " Try: a larger /dev/shm (docker run --shm-size=8g), a smaller loader.prefetch or "
            "batch_size, or loader.workers=0"
        )
    if "DataLoader worker" in text and ("exited unexpectedly" in text or "killed" in text):
        return "crash", (
            f"a loader process died ({setting}): {_from('DataLoader worker', text)}. Try: "
            "loader.workers=0 to see the error in the rank itself"
        )
    return None


def _from(start: str, text: str) -> str:
    """The sentence of `text` that begins with `start`."""
    return text[text.index(start) :].partition(". ")[0].strip(" .")


def _told(error: BaseException) -> str:
    return first_line(_text(error)) or type(error).__name__


def _text(error: BaseException) -> str:
    """The error's own text; a class whose `__str__` fails must not hide that it was raised."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001  # whatever the user's class does
        return f"its text cannot be shown: {type(second).__name__}"


def _layer(error: BaseException) -> str:
    """Which layer of the model was being called, and with which shapes; "" outside of a model."""
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    trace: TracebackType | None = inner.__traceback__
    layer, root, frame_of_layer = None, None, None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            if root is None and not isinstance(
                owner, (nn.DataParallel, nn.parallel.DistributedDataParallel)
            ):
                root = owner
            layer, frame_of_layer = owner, trace.tb_frame
        trace = trace.tb_next
    if layer is None or root is None or frame_of_layer is None:
        return ""
    name = next((name for name, module in root.named_modules() if module is layer), "")
    where = _IN_LOSS if isinstance(root, _Loss) else f" (in layer {name or 'model'}"
    got = ", ".join(str(list(shape)) for shape in _arguments(frame_of_layer))
    return f"{where}: {_brief(layer)}, which got {got or 'no tensor'})"


def _hint(error: BaseException, layer: str, plan: RunPlan) -> str:
    """What to look at when the very first call of the model fails."""
    if not layer and _CALL.search(_text(error)):
        return (
            ". What of a batch the model gets is chosen by batch.inputs: an entry, [a,b] in order, "
            "or {keyword: entry}"
        )
    if not layer:
        return ""
    if layer.startswith(_IN_LOSS):
        return "; does the loss fit the model's output and the target? Try: another loss=…"
    if plan.config.precision is not Precision.fp32:
        short = plan.config.precision.value
        return f"; can all layers work with precision={short}? Try: precision=fp32"
    model, dataset = plan.config.model["_target_"], plan.config.dataset["_target_"]
    return (
        f"; does model={model} fit dataset={dataset}? Try: other arguments (model.<name>=…, "
        "dataset.<name>=…)"
    )


def _arguments(frame: FrameType) -> list[torch.Size]:
    count = frame.f_code.co_argcount
    names = [name for name in frame.f_code.co_varnames[:count] if name != "self"]
    return leading_sizes([frame.f_locals.get(name) for name in names])


def _brief(layer: nn.Module) -> str:
    text = repr(layer).splitlines()[0]
    return text if text.endswith(")") else type(layer).__name__
