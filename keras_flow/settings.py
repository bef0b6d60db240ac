"""The environment variables of keras_flow: what each is for, its legal values, and its value here."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keras_flow.errors import FlowError

_PREFIX = "KERAS_FLOW_"
#: similarity, by `difflib`, from which an unknown variable is reported as a misspelt one of ours
_ALIKE = 0.8


@dataclass(frozen=True)
class Setting:
    """An environment variable.

    Args:
        name: its name.
        what: what it is for.
        legal: its values, in words.
        fits: whether a text is one of them.
        by_launcher: a launcher sets it for its processes; users leave it alone.
    """

    name: str
    what: str
    legal: str
    fits: Callable[[str], bool]
    by_launcher: bool = False


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()


_SECONDS = "a number of seconds above 0"

#: seconds that everything which waits for other processes may take
TIMEOUT = "KERAS_FLOW_TIMEOUT"
#: seconds that processes with `kf.on_preemption` have before they are killed
GRACE = "KERAS_FLOW_GRACE"
#: the random draws of a distribution that was made without `random=`
RANDOM = "KERAS_FLOW_RANDOM"
#: whether versions are taken in which a place is another one than keras_flow wraps
UNTESTED = "KERAS_FLOW_UNTESTED"
#: the secret by which the processes and the launchers of a job know each other
TOKEN = "KERAS_FLOW_TOKEN"
#: the number of ranks of the job
DEVICES = "KERAS_FLOW_DEVICES"
#: how often the job was restarted
RESTARTS = "KERAS_FLOW_RESTARTS"
#: the private folder of the job
JOB = "KERAS_FLOW_JOB"
#: a launcher has given each process accelerators of its own (Ray does)
OWN_ACCELERATORS = "KERAS_FLOW_OWN_ACCELERATORS"

SETTINGS: Mapping[str, Setting] = {
    each.name: each
    for each in (
        Setting(
            TIMEOUT, "how long processes wait for one another, and a job for progress (1800)", _SECONDS, _is_seconds
        ),
        Setting(GRACE, "how long a callback of `kf.on_preemption` may take (30)", _SECONDS, _is_seconds),
        Setting(
            RANDOM,
            "where random numbers come from: `logical` draws the same on every engine and layout, `stock` as the "
            "engine itself does; a distribution's `random=` goes first (logical)",
            "logical or stock",
            ("logical", "stock").__contains__,
        ),
        Setting(
            UNTESTED,
            "go on with versions of Keras or an engine that do not fit, at your own risk (not set)",
            "allow",
            ("allow",).__contains__,
        ),
        Setting(
            TOKEN,
            "the secret by which launchers of several hosts, objects of `kf.comm` and torch's parameter servers know "
            "each other",
            "any text",
            bool,
        ),
        Setting(
            DEVICES,
            "the number of ranks",
            "a whole number of at least 1",
            lambda text: _is_whole(text) and int(text) > 0,
            by_launcher=True,
        ),
        Setting(
            RESTARTS, "how often the job was restarted", "a whole number of at least 0", _is_whole, by_launcher=True
        ),
        Setting(JOB, "the private folder of the job", "a folder", bool, by_launcher=True),
        Setting(
            OWN_ACCELERATORS, "each process sees its own accelerators only", "1", ("1",).__contains__, by_launcher=True
        ),
    )
}


def read(name: str) -> str | None:
    """The value of a variable; None where it is empty or not set.

    Raises:
        FlowError: it has a value that is not legal.
    """
    text, setting = os.environ.get(name), SETTINGS[name]
    if not text:
        return None
    if not setting.fits(text):
        raise FlowError(f"the environment variable {name} is {text!r}; legal is {setting.legal}.")
    return text


def allows_untested() -> bool:
    """Whether KERAS_FLOW_UNTESTED=allow takes versions whose places are other ones, at the user's risk."""
    return read(UNTESTED) == "allow"


def given() -> dict[str, str]:
    """The variables that the user has set, for processes that do not inherit them; without the secret."""
    names = (each.name for each in SETTINGS.values() if not each.by_launcher and each.name != TOKEN)
    return {name: text for name in names if (text := read(name))}


def seconds(name: str, otherwise: float) -> float:
    """The value of a variable that holds seconds, or another number where it is not set.

    Raises:
        FlowError: it is no number above 0.
    """
    return float(read(name) or otherwise)


def check() -> None:
    """Check all variables at once, before anything is started, so that none is taken in silence.

    Raises:
        FlowError: a value is not legal, or a name is one of ours but for a slip of the keys.
    """
    for name in os.environ:
        if not name.startswith(_PREFIX):
            continue
        if name in SETTINGS:
            read(name)
        elif near := _nearest(name):
            raise FlowError(
                f"the environment variable {name} is none that keras_flow reads; did you mean {near}? "
                f"Its value is {SETTINGS[near].legal}."
            )


def _nearest(name: str) -> str | None:
    """The variable that a name was meant to be; None for a name that is like none."""
    names = [each.removeprefix(_PREFIX) for each in SETTINGS]
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), names, 1, _ALIKE)
    return _PREFIX + near[0] if near else None
