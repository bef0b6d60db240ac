"""The errors that keras_flow raises: one root, so that a program can catch them all."""


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
