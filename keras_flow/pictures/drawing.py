"""`Drawing`: a picture that a notebook shows and that is written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from keras_flow import atomic
from keras_flow.errors import FlowError
from keras_flow.pictures.svg import FONT

#: in a PNG: the first that the machine has
_FONTS = "Arial,Helvetica,DejaVu Sans,Liberation Sans,Noto Sans,sans-serif"


@dataclass(frozen=True)
class Drawing:
    """A picture.

    Attributes:
        svg: an SVG element.
        words: what it shows, as text.

    Example:
        >>> from keras_flow.pictures.svg import picture
        >>> Drawing(picture(10, 10, [], "nothing"), "nothing to see")
        nothing to see
    """

    svg: str
    words: str

    def save(self, path: str | Path, scale: float = 2.0) -> None:
        """Write it to a file that ends with `.svg` or `.png`.

        Args:
            path: the file.
            scale: pixels for each unit of the picture (`.png` only).

        Raises:
            FlowError: another ending, or what makes a PNG is not installed.
        """
        target = Path(path)
        if target.suffix == ".svg":
            atomic.write_text(target, self.svg)
        elif target.suffix == ".png":
            atomic.write_bytes(target, self._png(scale))
        else:
            raise FlowError(f"a picture can be written to a file that ends with .svg or .png, not to {target.name!r}")

    def _png(self, scale: float) -> bytes:
        if find_spec("resvg_py") is None:
            raise FlowError(
                "a PNG is made by resvg_py, which is not installed: `pip install 'keras-flow[plots]'`, or write "
                "an .svg file"
            )
        import resvg_py

        # a page's text colour is that of a white page; without Arial, its sans-serif, resvg leaves words out
        told = self.svg.replace("currentColor", "#222").replace(FONT, FONT.replace("sans-serif", _FONTS))
        return bytes(resvg_py.svg_to_bytes(svg_string=told, zoom=scale, background="white"))

    def _repr_html_(self) -> str:
        return f"<div style='overflow-x:auto'>{self.svg}</div>"

    def __repr__(self) -> str:
        return self.words
