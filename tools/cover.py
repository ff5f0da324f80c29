"""Draws the book's cover figure and its favicon: `python -m tools.cover`.

The cover shows one batch of chapter 5 twice, to scale: padded to its longest episode, and packed. A
test draws it again and compares. Link previews take no SVG, so it is there as PNG as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

import agentrl as arl
from agentrl.notebook import COLORS, figure
from tools.export import ROOT

ROW = 256  # tokens that a packed row holds
STATIC = ROOT / "book" / "_static"

# Three episodes in one row, the last cell padding: the cover in small.
FAVICON = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">
<path fill="{COLORS["context"]}" d="M2 3h12v7H2zM2 13h7v7H2zM2 23h9v7H2z"/>
<path fill="{COLORS["policy"]}" d="M15 3h15v7H15zM10 13h12v7H10zM12 23h10v7H12z"/>
<path fill="{COLORS["padding"]}" d="M23 13h7v7h-7zM23 23h7v7h-7z"/>
</svg>
"""


def draw_cover(path: Path) -> None:
    """Write the cover as SVG to `path`, and beside it as PNG of 1200 x 630 pixels."""
    torch.set_num_threads(1)
    tok = arl.build_tokenizer(arl.make_tasks())
    base = arl.make_rl_base(tok)
    draws = torch.Generator().manual_seed(53)
    trajs = arl.sample_step(base, arl.make_tasks("train"), tok, arl.RLConfig(), draws)
    lengths = [len(traj.ids) for traj in trajs]
    plan = arl.packing_plan(lengths, max_tokens=ROW)
    padded, packed = len(trajs) * max(lengths), len(plan) * ROW

    fig, ax = figure(8, 4.2)
    _draw_rows(ax, 0, trajs, [[i] for i in range(len(trajs))], max(lengths))
    left = max(lengths) + 40
    _draw_rows(ax, left, trajs, plan, ROW)
    ax.set(xlim=(-1, left + ROW + 1), ylim=(len(trajs) + 1, -10))
    ax.axis("off")
    text = {"va": "baseline", "fontsize": 11}
    ax.text(0, -2.5, f"{len(trajs)} episodes, padded: {padded:,} positions", **text)
    ax.text(left, -2.5, f"packed: {packed:,} positions, the same gradient", **text)
    labels = {
        "policy": "tokens that the policy sampled: only these have a loss",
        "context": "prompt and tool tokens",
        "padding": "padding: computed, then thrown away",
    }
    for line, (kind, label) in enumerate(labels.items()):
        y = 20 + 6 * line
        ax.add_patch(Rectangle((left, y), 9, 3, color=COLORS[kind], lw=0))
        ax.text(left + 15, y + 1.5, label, va="center", fontsize=10)
    fig.savefig(path, metadata={"Date": None, "Creator": None})
    png = path.with_suffix(".png")
    fig.savefig(png, dpi=150, transparent=False, facecolor="white", metadata={"Software": None})


def _draw_rows(
    ax: Axes, left: int, trajs: list[arl.Trajectory], rows: Sequence[Sequence[int]], width: int
) -> None:
    """Draw rows of episodes from `left`, one unit for each token, one path for each colour."""
    runs: dict[str, list[Outline]] = {kind: [] for kind in ("padding", "context", "policy")}

    def put(kind: str, x: int, y: int, length: int) -> None:
        corners = [(x, y), (x + length, y), (x + length, y + 0.8), (x, y + 0.8), (x, y)]
        runs[kind].append(Outline([(left + x, y) for x, y in corners], closed=True))

    for y, row in enumerate(rows):
        x = 0
        for i in row:
            # action_mask [T - 1] tells of each token but the first
            kinds = torch.cat([torch.zeros(1), trajs[i].action_mask])
            values, counts = torch.unique_consecutive(kinds, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                put("policy" if value else "context", x, y, count)
                x += count
        if x < width:
            put("padding", x, y, width - x)
    for kind, outlines in runs.items():
        path = Outline.make_compound_path(*outlines)
        ax.add_patch(PathPatch(path, color=COLORS[kind], lw=0))


if __name__ == "__main__":
    draw_cover(STATIC / "cover.svg")
    (STATIC / "favicon.svg").write_text(FAVICON, encoding="utf-8")
