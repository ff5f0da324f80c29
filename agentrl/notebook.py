"""What the chapters show their results with: recorded values, figures, colours, a progress bar.

This module is written by hand; the others in this package are generated from the chapters. The
plotting and notebook libraries are imported on first use, so that importing this stays light.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLORS", "draw_episode", "figure", "progress", "record"]

T = TypeVar("T")

# One meaning per colour in every chapter, from the colour-blind safe palette of Okabe and Ito. The
# two lightest are darkened until each stands out, 3 to 1, on white and on the dark theme.
COLORS = {
    "policy": "#0072B2",  # tokens that the policy sampled
    "context": "#3F9AD2",  # prompt and tool tokens, which it did not
    "padding": "#919191",
    "accent": "#CC79A7",
    "fault": "#D55E00",
    "repair": "#009E73",
}

_INK = "#7a7a7a"  # contrast above 4:1 on white and on the dark theme's background

_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.facecolor": "none",
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so text has the same size everywhere
    "font.size": 10,
    "grid.color": _INK,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "agentrl",  # ids that do not change from run to run
    "svg.id": "agentrl",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def record(**values: object) -> None:
    """Print each value on a line of its own, and keep it for the prose under its name.

    Args:
        **values: formatted strings or integers. `record(share="0.74")` prints `share  0.74`, and
            prose quotes it with the role `{glue:text}` and the name `share`. A chapter uses a name
            once.
    """
    width = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")
    if not _in_kernel():
        return
    from myst_nb import glue

    for name, value in values.items():
        glue(name, str(value), display=False)


def figure(width: float = 6.4, height: float = 3.2, **subplots: Any) -> tuple[Figure, Any]:
    """Make a figure in the style of the book: SVG, transparent, the same bytes in every run.

    Args:
        width, height: size in inches; a page shows 100 px per inch, at most 4 inches high.
        **subplots: passed on to `matplotlib.pyplot.subplots`.

    Returns:
        What `matplotlib.pyplot.subplots` returns: the figure and its axes.
    """
    import matplotlib.pyplot as plt

    plt.rcParams.update(_STYLE)
    if _in_kernel():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None, "Creator": None})
    return plt.subplots(figsize=(width, height), **subplots)


def draw_episode(
    words: Sequence[str], by_policy: Sequence[bool], per_line: int = 14
) -> tuple[Figure, Any]:
    """Draw an episode token by token, filled where the policy chose; below each its mask entry.

    Args:
        words: the T tokens as text.
        by_policy: T entries, true where the policy chose the token.
        per_line: tokens on a line.
    """
    lines = -(-len(words) // per_line)
    fig, ax = figure(6.4, min(0.55 * lines + 0.2, 4))
    for i, (word, mine) in enumerate(zip(words, by_policy, strict=True)):
        x, y = i % per_line, -1.5 * (i // per_line)
        color = COLORS["policy" if mine else "context"]
        ax.bar(x, 0.6, 0.9, y - 0.3, facecolor=color if mine else "none", edgecolor=color)
        text = {"ha": "center", "va": "center", "fontsize": 7.5}
        ax.text(x, y, repr(word)[1:-1], color="white" if mine else color, **text)
        if i + 1 < len(words):
            color = COLORS["policy" if by_policy[i + 1] else "padding"]
            ax.text(x, y - 0.6, f"{bool(by_policy[i + 1]):d}", color=color, **text)
    ax.set(xlim=(-0.6, per_line - 0.4), ylim=(-1.5 * lines + 0.5, 0.4))
    ax.axis("off")
    return fig, ax


def progress(
    iterable: Iterable[T], desc: str | None = None, total: int | None = None
) -> Iterable[T]:
    """Show a progress bar on stderr to a person, at a terminal or in Jupyter, and to nobody else.

    Args:
        iterable: what to go through; returned as it is where no bar is shown.
        desc: a short label in front of the bar.
        total: the number of items, where `iterable` has no length.
    """
    # A notebook run by a tool looks like one run by a person, so the tools say so by this variable.
    if os.environ.get("AGENTRL_PROGRESS") == "0" or not (_in_kernel() or sys.stderr.isatty()):
        return iterable
    from tqdm import tqdm

    return tqdm(iterable, desc=desc, total=total, leave=False)


def _in_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
