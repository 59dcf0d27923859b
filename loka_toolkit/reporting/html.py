"""The page: a view and the templates in, one self-contained HTML document out."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from loka_toolkit.errors import MissingDependencyError
from loka_toolkit.reporting import figures
from loka_toolkit.reporting.palette import css_variables
from loka_toolkit.reporting.view import ReportView

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("templates")


def render(view: ReportView) -> str:
    """Return the page of a view: no request is made by it, whatever the artifacts say.

    Raises:
        MissingDependencyError: If Jinja2 or Matplotlib is absent.
    """
    environment = _environment()
    from markupsafe import Markup

    svgs: dict[str, str] = {}
    if view.overview.bars is not None:
        svgs["flop-bars"] = figures.flop_bars(view.overview.bars, "flop-bars")
    if not isinstance(view.calibration, str):
        svgs["calibration"] = figures.calibration(view.calibration, "calibration")
    for card in view.details.cards:
        for index, histogram in enumerate(card.histograms):
            key = f"{card.anchor}-histogram-{index}"
            svgs[key] = figures.histogram(histogram, key)
        for index, series in enumerate(card.series):
            key = f"{card.anchor}-series-{index}"
            svgs[key] = figures.series(series, key)
    theme, behaviour, style = (
        (TEMPLATES / name).read_text(encoding="utf-8")
        for name in ("theme.js", "report.js", "report.css")
    )
    style = style.replace("/*LIGHT*/", css_variables("light"))
    style = style.replace("/*DARK*/", css_variables("dark"))
    scripts = " ".join(f"'{_digest(script)}'" for script in (theme, behaviour))
    return environment.get_template("report.html.j2").render(
        view=view,
        svgs={key: Markup(svg) for key, svg in svgs.items()},
        style=Markup(style),
        theme=Markup(theme),
        behaviour=Markup(behaviour),
        policy=(
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
    )


def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError:
        raise MissingDependencyError("jinja2", "analyze", "the report") from None
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _digest(script: str) -> str:
    """Return the source expression that allows exactly this inline script."""
    content = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(content).decode()}"
