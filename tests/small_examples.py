"""The examples in a small size, as a part of an engine's job."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "examples"


def main() -> Iterator[tuple[str, str]]:
    """Each name, with what its main printed."""
    import keras

    model = os.path.join(tempfile.gettempdir(), "digits.keras")
    arguments = {"bytes_lm": (128, 1, 4), "custom_rules": (1,), "finetune_lora": (model, 1)}
    for name, given in arguments.items():
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        keras.utils.clear_session()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            example.main(*given)
        yield name, out.getvalue()
