"""The two ways a run can end badly, as exceptions that cross every layer.

:class:`ConfigError` is a mistake of the person who configured the run: it is shown as one short
paragraph, never with a traceback. Everything else is a failure *in* the run and travels as a
:class:`dpexp.records.ErrorRecord`.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A refusal: which key, which value, what is allowed, and the override that would fix it.

    Args:
        key: the config key, as typed on the command line (``parallel.timeout_s``).
        value: the offending value; shown with ``repr`` unless it is :data:`NO_VALUE`.
        problem: what is wrong with it, as a clause without a full stop.
        allowed: what would be accepted, or "" when `problem` says it.
        fix: an override or an action that would make the run go through.
    """

    def __init__(
        self, key: str, value: object, problem: str, *, allowed: str = "", fix: str = ""
    ) -> None:
        self.key = key
        self.value = value
        self.problem = problem
        self.allowed = allowed
        self.fix = fix
        super().__init__(self.paragraph())

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions.
        shown = "" if self.value is NO_VALUE else _show(self.value)
        return _rebuild, (type(self), self.key, shown, self.problem, self.allowed, self.fix)

    def paragraph(self) -> str:
        """The refusal as one paragraph for a person."""
        shown = "" if self.value is NO_VALUE else f"={_show(self.value)}"
        end = "" if self.problem.endswith((".", "?", "!")) else "."
        text = f"{self.key}{shown}: {self.problem}{end}"
        if self.allowed:
            text += f" Allowed: {self.allowed}."
        if self.fix:
            text += f" Try: {self.fix}"
        return text


class SkippedCellError(ConfigError):
    """A combination of a sweep's grid that means nothing, as opposed to a mistake."""


class RefusedInRankError(ConfigError):
    """A refusal that a rank came to, once it had looked at the data or the classes.

    Args:
        paragraph: the refusal, as the rank put it.
        trace: the rank's traceback, for who asks for it.
    """

    def __init__(self, paragraph: str, trace: str) -> None:
        super().__init__("", NO_VALUE, paragraph)
        self.trace = trace

    def paragraph(self) -> str:
        return self.problem


class _Verbatim:
    """A value that was already turned into text in another process."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


NO_VALUE = _Verbatim("")


class NonFiniteLossError(ArithmeticError):
    """The loss of a step is NaN or infinite; the steps before it are kept."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(step)

    def __str__(self) -> str:
        return f"non-finite loss at step {self.step}"


def _rebuild(
    kind: type[ConfigError], key: str, shown: str, problem: str, allowed: str, fix: str
) -> ConfigError:
    value = NO_VALUE if shown == "" else _Verbatim(shown)
    return kind(key, value, problem, allowed=allowed, fix=fix)


def _show(value: object) -> str:
    # As it is typed on the command line, not as Python writes it.
    text = {True: "true", False: "false"}.get(value, "") if isinstance(value, bool) else repr(value)
    text = "null" if value is None else text
    return text if len(text) <= 200 else text[:197] + "..."
