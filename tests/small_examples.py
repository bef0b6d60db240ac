"""The examples in a small size."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    """What the `main` of an example prints."""
    model = os.path.join(tempfile.gettempdir(), "digits.keras")
    arguments = {"bytes_lm": (128, 1, 4), "custom_rules": (1,), "finetune_lora": (model, 1), "pipeline": (1,)}
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        example.main(*arguments[name])
    return out.getvalue()
