"""The errors that keras_flow raises: one root, so that a program can catch them all. And its warnings."""

from __future__ import annotations

import functools
import inspect
import site
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class FlowError(Exception):
    """Root of every error of keras_flow.

    The text says what was asked, what was found, what is legal and what to do.

    Example:
        >>> try:
        ...     raise FlowError("asked for 4 ranks, found 2")
        ... except FlowError as error:
        ...     print(error)
        asked for 4 ranks, found 2
    """


class LayoutError(FlowError):
    """Layout problems of a model, collected and raised together.

    Example:
        >>> str(LayoutError("rules: 'kernle' matched no variable"))
        "rules: 'kernle' matched no variable"
        >>> issubclass(LayoutError, FlowError)
        True
    """


class MissingName(FlowError, AttributeError):
    """A name of another library that a program asks its counterpart in keras_flow for, which does not have it."""


class LostServerError(FlowError):
    """A parameter server is gone.

    Attributes:
        name: what it is called.
    """

    def __init__(self, name: str = "a parameter server"):
        super().__init__(
            f"{name} is gone, and the variables that it held with it: start the job again, and go on from the last "
            "checkpoint (kf.callbacks.Checkpoint)"
        )
        self.name = name


class LaunchError(FlowError):
    """A job could not be started, or one of its ranks failed.

    Example:
        >>> try:
        ...     raise LaunchError("rank 2 of 4 failed")  # as kf.run does
        ... except LaunchError as error:
        ...     print(error)
        rank 2 of 4 failed
    """


class FlowWarning(UserWarning):
    """Something legal that the user should know: a fallback, or work done on every rank.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", FlowWarning)  # a program that wants none stops at the first
        ...     try:
        ...         warnings.warn("kernel: broadcast", FlowWarning)
        ...     except FlowWarning as warning:
        ...         print(warning)
        kernel: broadcast
    """


class LayoutFallback(FlowWarning):
    """A split that does not divide, or that the engine cannot hold, became broadcast; the numbers stay the same."""


class ComputedWhole(FlowWarning):
    """Rows, or a model, that every rank computes whole; the numbers stay the same, nothing is gained."""


#: beginnings of paths of code that is not the user's: ours (the backends by their own folder too), Python's, installed
_HERE = Path(__file__).parent
_OWN = (f"{_HERE}/", f"{_HERE.resolve().parent / 'backends'}/")
#: it only calls what it wraps, and Keras leaves its own frames below out
_WRAPPERS = "backends/hooking.py"
_NOT_OF_USER = (
    *(*_OWN, "<frozen"),
    *(sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()),
)
#: parts of paths of Keras and the engines, and of what TensorFlow makes of functions that it traces
_LIBRARIES = ("/site-packages/", "/dist-packages/", "__autograph_generated_file")


def is_of_user(file: str) -> bool:
    """Whether a file of source is neither installed, nor Python's, nor ours."""
    return not file.startswith(_NOT_OF_USER) and not any(part in file for part in _LIBRARIES)


def frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of the user's code that an error came through; the last one is the innermost."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_user(frame.filename)]


def without_library_frames(error: Exception) -> Exception:
    """An error whose traceback has no frames but the user's, as Keras's own errors have."""
    return _with_frames(error, is_of_user)


def shorten(error: Exception) -> None:
    """Leave the frames of keras_flow out of an error, so that the user's line and the engine's stand together.

    A `FlowError` says itself what to do: it keeps the user's frames alone. The frame that raised an error stays even if
    it is of keras_flow: then the error may be a mistake of ours, and its report needs the line.
    """
    if isinstance(error, LayoutError):  # it names variables and says what to do: its cause would only bury it
        error.__cause__, error.__suppress_context__ = None, True
    if isinstance(error, FlowError):
        without_library_frames(error)
    else:
        _with_frames(error, lambda file: not file.startswith(_OWN), keeps_last=True)


def _with_frames(error: Exception, is_kept: Callable[[str], bool], keeps_last: bool = False) -> Exception:
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_kept(file) or (keeps_last and trace.tb_next is None and not file.endswith(_WRAPPERS)):
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(kept)


def require_file(file: Path, who: str) -> None:
    """Refuse what is no file.

    Args:
        file: its path.
        who: what was asked for it, for the error.

    Raises:
        FlowError: it is not there, or is a folder.
    """
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "is not a file" if file.exists() else "does not exist"
        raise FlowError(f"{who} was asked for {file}, which {found}.")


def shown_briefly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise a `FlowError` at the line of its caller; a notebook shows its text alone."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except FlowError as error:
            if type(error) is not FlowError:  # what says itself how it is shown
                raise
            text = f"{type(error).__name__}: {error}"
            vars(error)["_render_traceback_"] = lambda: [text]  # which IPython asks for
            raise without_library_frames(error) from None

    return call


def warn(text: str, kind: type[Warning] = FlowWarning) -> None:
    """Warn, at the line of the user's program from which this was called, through however many layers.

    Args:
        text: what to say.
        kind: class of the warning.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level if frame is not None else 2)
