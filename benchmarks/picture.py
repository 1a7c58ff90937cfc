"""Draws the picture at the top of the README: learning curves and speed on HalfCheetah-v5.

    python benchmarks/picture.py    # writes docs/images/overview.png, and needs Chrome

The left plot shows the curves in `benchmarks/results/tasks.jsonl`, as interquartile mean over five
seeds. The bar at the end of a curve is the 95 percent interval of its last point. The right plot
shows the rates in the table of `docs/benchmarks.md`. The script does not measure anything itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from intervals import interquartile_mean, interval
from plotly.subplots import make_subplots
from results import COLORS, IMAGES, PAGE, POINTS, SEEDS, STORE, TASKS
from stored_runs import read_runs

NAME = "HalfCheetah-v5"
IMAGE = IMAGES / "overview.png"
#: Name in the picture and color of each trainer with a curve, in the order of `results.TASKS`.
TRAINERS = {
    "halfcheetah_ppo": ("SyncPPO", COLORS[0]),
    "halfcheetah_ddppo": ("DDPPO", COLORS[2]),
    "halfcheetah_decoupled_ppo": ("decoupled PPO", COLORS[1]),
    "sb3:result-halfcheetah": ("Stable-Baselines3 PPO", "#777777"),
}
#: Texts of the table rows from which the rates come. The rates of peers come from rows of `SYNC`.
SYNC = "SyncSamples, PPO on HalfCheetah-v5, 2,048 rows"
ASYNC = "AsyncSamples, decoupled PPO on HalfCheetah-v5, 2,048 rows"
PEERS = {
    "sb3": "Stable-Baselines3",
    "cleanrl": "single file (CleanRL)",
    "sample_factory": "Sample Factory",
    "rllib": "RLlib",
}


def rates() -> dict[str, float]:
    """Returns the environment steps per second by name, the fastest first."""
    found: dict[str, float] = {}
    for line in (PAGE.parent / "benchmarks.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or cells[1] not in (SYNC, ASYNC):
            continue
        own, peer = (float(cell.split()[0].replace(",", "")) for cell in (cells[2], cells[4]))
        found["polopt, SyncPPO" if cells[1] == SYNC else "polopt, decoupled PPO"] = own
        if cells[1] == SYNC:
            found[PEERS[cells[3].split()[0]]] = peer
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def add_curves(figure: Any, store: dict[str, Any]) -> None:
    """Adds the curve of each trainer to the left plot, with interval and name at its end."""
    task = TASKS[NAME]
    grid = np.linspace(0, task.env_steps, POINTS + 1)
    ends: list[tuple[float, str, str]] = []
    for source, (name, color) in TRAINERS.items():
        curves = []
        for seed in SEEDS:
            run = store[f"{NAME}/{source}/{seed}"]
            steps, means = np.array([*run["curve"], [run["env_steps"], run["return"]]]).T
            curves.append(np.interp(grid, steps, means, left=np.nan))
        shown = ~np.isnan(curves).any(axis=0)
        mean = interquartile_mean(np.array(curves)[:, shown])
        low, high = interval([curve[-1] for curve in curves])
        line = {"color": color, "width": 3.5}
        figure.add_scatter(x=grid[shown], y=mean, mode="lines", line=line, showlegend=False)
        x, last = (1.0 + 0.012 * (1 + len(ends))) * task.env_steps, mean[-1]
        error = {"array": [high - last], "arrayminus": [last - low], "thickness": 2}
        error = {**error, "color": color, "type": "data", "symmetric": False}
        marker = {"color": color, "size": 6}
        mode = {"mode": "markers", "showlegend": False, "cliponaxis": False}
        figure.add_scatter(x=[x], y=[last], marker=marker, error_y=error, **mode)
        ends.append((float(last), name, color))
    at = -np.inf
    for end, name, color in sorted(ends):
        at = max(at + 330.0, end)  # so names do not overlap
        label = {"text": name, "font": {"color": color, "size": 14}, "showarrow": False}
        figure.add_annotation(x=1.0, y=at, xanchor="left", xref="x domain", yref="y", **label)


def add_bars(figure: Any) -> None:
    """Adds the rates to the right plot."""
    found = dict(reversed(rates().items()))
    colors = {"polopt, SyncPPO": COLORS[0], "polopt, decoupled PPO": COLORS[1]}
    bars = go.Bar(
        x=list(found.values()),
        y=list(found),
        orientation="h",
        marker={"color": [colors.get(name, "#aaaaaa") for name in found]},
        text=[f"{rate:,.0f}" for rate in found.values()],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
    )
    figure.add_trace(bars, row=1, col=2)


def main() -> None:
    """Writes the picture."""
    titles = (
        "Return while learning, five seeds each",
        "Environment steps per second on two cores",
    )
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.56, 0.44],
        horizontal_spacing=0.27,
        subplot_titles=titles,
    )
    add_curves(figure, read_runs(STORE))
    add_bars(figure)
    figure.update_layout(
        template="plotly_white",
        width=1200,
        height=430,
        margin={"t": 78, "b": 55, "l": 75, "r": 55},
        title={"text": f"PPO on {NAME}", "x": 0.02, "y": 0.96},
    )
    figure.update_xaxes(title_text="environment steps", range=[0, 1.06e6], row=1, col=1)
    figure.update_yaxes(
        title_text="mean return of the last 100 episodes", range=[0, 6000], row=1, col=1
    )
    figure.update_xaxes(showgrid=False, showticklabels=False, range=[0, 32_000], row=1, col=2)
    figure.update_yaxes(ticksuffix=" ", row=1, col=2)
    figure.write_image(IMAGE, scale=1.5)


if __name__ == "__main__":
    main()
