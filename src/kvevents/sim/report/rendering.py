"""Renders matplotlib figures as SVG elements of a page, with its colours and fonts. Equal figures give equal bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Final

from kvevents.errors import MissingDependencyError
from kvevents.sim.report.words import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK: Final = "#010101"
SOFT: Final = "#020202"
LINE: Final = "#030303"
PANEL: Final = "#040404"
SERIES: Final = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")
"""Placeholder colours. They are replaced by the page's variables, which differ in light and dark mode."""
_OF_THE_PAGE: Final = {
    INK: "currentColor",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    PANEL: "var(--panel)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES)},
}
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvevents",
    "text.parse_math": False,
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.color": LINE,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.facecolor": "none",
    "path.simplify": True,
}
_LEFT_OUT: Final = re.compile(
    r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|\sxmlns(?::\w+)?=\"[^\"]*\"", re.DOTALL
)
_FONT: Final = re.compile(r"font: ([\d.]+)px [^;\"]*")
_PLACE: Final = re.compile(r"(\bid=\"|url\(#|xlink:href=\"#)")
_COLOR: Final = re.compile("|".join(_OF_THE_PAGE))
_HEAD: Final = re.compile(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")


def check_matplotlib() -> None:
    """Raise `MissingDependencyError` if matplotlib is not installed."""
    try:
        import matplotlib as _  # noqa: F401, ICN001, PLC0415 - only checked; it belongs to an extra
    except ImportError as error:
        raise MissingDependencyError(
            "a report with figures needs the package matplotlib: pip install 'kvevents[sim]'"
        ) from error


def render_svg(name: str, label: str, width: float, height: float, draw: Callable[[Figure], None]) -> str:
    """Return an `<svg>` element of what `draw` draws on a figure of `width` times `height` inches.

    `name` makes its ids unique in the page; `label` is the description for screen readers. Raises
    `MissingDependencyError`.
    """
    check_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - imported late, since it belongs to an extra

    with _styled():
        figure = Figure((width, height), layout="constrained")
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(written.getvalue(), name, label)


@contextmanager
def _styled() -> Iterator[None]:
    from matplotlib import rc_context, rcdefaults  # noqa: PLC0415 - imported late, since it belongs to an extra

    with rc_context(), warnings.catch_warnings():
        rcdefaults()  # the user's matplotlibrc must not change the report
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser draws the glyphs
        with rc_context(_STYLE):
            yield


def _inline(svg: str, name: str, label: str) -> str:
    svg = _LEFT_OUT.sub("", svg[svg.index("<svg") :])
    svg = "\n".join(map(visible, svg.split("\n")))
    svg = _FONT.sub(r"font-size: \1px", svg)
    svg = _PLACE.sub(rf"\g<1>{name}-", svg)
    svg = _COLOR.sub(lambda found: _OF_THE_PAGE[found[0]], svg)
    return _HEAD.sub(rf'<svg role="img" aria-label="{_safe(label)}" viewBox="\1">', svg, count=1).strip()


def _safe(label: str) -> str:
    return escape(visible(label)).replace("\\", r"\\")
