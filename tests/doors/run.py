"""Opens doors on the ranks of an engine, and compares their results with those of one device."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.doors.stage import Setting

#: of floats, by the largest element of a value
TOLERANCE = 1e-5


def run(tasks: Sequence[tuple[str, Setting]], folder: str) -> list[dict[str, Any]]:
    """Run on every rank; a result for each door and setting.

    `status` is right, refused, wrong or crash; "raises" where one device raises the same, so that nothing is compared.

    Args:
        tasks: doors, each with its setting.
        folder: one for all ranks.
    """
    return [_opened(door, setting, Path(folder) / f"{number}") for number, (door, setting) in enumerate(tasks)]


def _opened(door: str, setting: Setting, folder: Path) -> dict[str, Any]:
    from keras_flow import FlowError
    from keras_flow.runtime import env

    begun = time.monotonic()
    result: dict[str, Any] = {"door": door, "setting": setting.name}
    expected, error = None, ""
    if env.process_index() == 0:  # one device needs nobody else
        try:
            expected = _numbers(door, setting, Path(tempfile.mkdtemp(prefix="door-")), distributed=False)
        except Exception as failure:
            error = _text(failure)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _numbers(door, setting, folder, distributed=True)
    except FlowError as failure:
        result |= {"status": "refused", "detail": str(failure)}
    except Exception as failure:
        same = _text(failure) == error
        result |= {"status": "raises" if same else "crash", "detail": _text(failure) + traceback.format_exc()[-1800:]}
    else:
        over = differences(expected, found) if env.process_index() == 0 and not error else []
        result |= {"status": "wrong" if over or error else "right", "detail": "; ".join(over) or error}
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def _numbers(door: str, setting: Setting, folder: Path, distributed: bool) -> Any:
    from tests.doors.cases import CASES, MAKERS
    from tests.doors.stage import staged

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with staged(setting, folder, MAKERS.get(door), distributed) as stage:
            return _plain(CASES[door](stage))


def _plain(value: Any) -> Any:
    """Numbers as NumPy arrays, in the tree that they are in."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, str) else np.asarray(value)


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Where two trees differ: texts, shapes, or floats by more than the tolerance."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(expected) != list(found):
            return [f"{where}: {list(expected)} are {list(found)}"]
        return [text for name in expected for text in differences(expected[name], found[name], f"{where}.{name}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{where}: {len(expected)} entries are {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [text for number, (a, b) in pairs for text in differences(a, b, f"{where}[{number}]")]
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        return _differ(expected, found, where)
    same = type(expected) is type(found) and expected == found
    return [] if same else [f"{where}: {expected!r} is {found!r}"]


def _differ(expected: np.ndarray, found: np.ndarray, where: str) -> list[str]:
    if expected.shape != found.shape:
        return [f"{where}: shape {expected.shape} is {found.shape}"]
    if expected.dtype.kind not in "fc":
        return [] if np.array_equal(expected, found) else [f"{where}: {expected!r} is {found!r}"]
    a, b = expected.astype("float64"), found.astype("float64")
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return [f"{where}: nan in other places"]
    off = float(np.nanmax(np.abs(a - b), initial=0.0))
    limit = TOLERANCE * max(1.0, float(np.nanmax(np.abs(a), initial=0.0)))
    return [] if off <= limit else [f"{where}: off by {off:.3g}, {off / limit:.3g} times the limit"]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1500]
