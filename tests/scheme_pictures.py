"""Draws who waits for whom under each optimizer, for `docs/choose-an-optimizer.md`.

`python tests/generated_files.py` writes a file `docs/images/waits-NAME.svg` for each entry of
`PICTURES`. A picture has its own background, and follows the color scheme of the system.
"""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """What a process does from `start` to `end`, in units of time of the picture."""

    kind: str
    start: float
    end: float
    label: str = ""


class Picture(NamedTuple):
    """One picture.

    Attributes:
        says: the text for people who do not see the picture.
        rows: the processes, and what each of them does. Gaps are times in which a process waits.
        messages: `(row, time, row, time)` of each message.
    """

    says: str
    rows: dict[str, list[Block]]
    messages: list[tuple[str, float, str, float]]


#: Fills of the kinds of blocks, which are legible on a light and on a dark ground with white text,
#: and their names below the picture.
FILLS = {
    "sample": ("#0072b2", "sample"),
    "gradient": ("#b34700", "gradient"),
    "learn": ("#00754a", "learn, apply"),
    "store": ("#7a4f9a", "insert, draw"),
}
#: What is later is not drawn.
END = 11.0


def blocks(*parts: tuple[str, float, float] | tuple[str, float, float, str]) -> list[Block]:
    return [Block(*part) for part in parts]


PICTURES = {
    "async-gradients": Picture(
        "The driver applies each gradient when it arrives and sends new weights to that worker. "
        "Worker 2 is slower and delays nobody",
        {
            "worker 1": blocks(
                ("sample", 0, 2.4), ("gradient", 2.4, 3.8), ("sample", 5, 7.4),
                ("gradient", 7.4, 8.8), ("sample", 10, 12.4), ("gradient", 12.4, 13.8),
                ("sample", 15, 16),
            ),
            "driver": blocks(
                ("learn", 4.1, 4.7, "apply"), ("learn", 6.3, 6.9, "apply"),
                ("learn", 9.1, 9.7, "apply"), ("learn", 13.2, 13.6),
                ("learn", 14.1, 14.7, "apply"),
            ),
            "worker 2": blocks(
                ("sample", 0, 3.8), ("gradient", 3.8, 6), ("sample", 7.2, 11),
                ("gradient", 11, 13), ("sample", 13.9, 16),
            ),
        },
        [
            ("worker 1", 3.8, "driver", 4.1), ("driver", 4.7, "worker 1", 5),
            ("worker 2", 6, "driver", 6.3), ("driver", 6.9, "worker 2", 7.2),
            ("worker 1", 8.8, "driver", 9.1), ("driver", 9.7, "worker 1", 10),
            ("worker 2", 13, "driver", 13.2), ("driver", 13.6, "worker 2", 13.9),
            ("worker 1", 13.8, "driver", 14.1), ("driver", 14.7, "worker 1", 15),
        ],
    ),
    "sync-gradients": Picture(
        "The driver waits for the gradients of all workers. Every worker waits for the slowest "
        "worker and for the update",
        {
            "worker 1": blocks(
                ("sample", 0, 2.4), ("gradient", 2.4, 3.8), ("sample", 7.6, 10),
                ("gradient", 10, 11.4), ("sample", 15.2, 16),
            ),
            "driver": blocks(("learn", 6.3, 7.3, "apply"), ("learn", 13.9, 14.9, "apply")),
            "worker 2": blocks(
                ("sample", 0, 3.8), ("gradient", 3.8, 6), ("sample", 7.6, 11.4),
                ("gradient", 11.4, 13.6), ("sample", 15.2, 16),
            ),
        },
        [
            ("worker 1", 3.8, "driver", 6.3), ("worker 2", 6, "driver", 6.3),
            ("driver", 7.3, "worker 1", 7.6), ("driver", 7.3, "worker 2", 7.6),
            ("worker 1", 11.4, "driver", 13.9), ("worker 2", 13.6, "driver", 13.9),
            ("driver", 14.9, "worker 1", 15.2), ("driver", 14.9, "worker 2", 15.2),
        ],
    ),
    "sync-samples": Picture(
        "All workers sample with the same weights. The driver learns from the whole batch, and the "
        "workers wait meanwhile",
        {
            "worker 1": blocks(("sample", 0, 2.8), ("sample", 8.4, 11.2)),
            "driver": blocks(("learn", 4.1, 8.1, "epochs, minibatches"), ("learn", 12.5, 16)),
            "worker 2": blocks(("sample", 0, 3.8), ("sample", 8.4, 12.2)),
        },
        [
            ("worker 1", 2.8, "driver", 4.1), ("worker 2", 3.8, "driver", 4.1),
            ("driver", 8.1, "worker 1", 8.4), ("driver", 8.1, "worker 2", 8.4),
            ("worker 1", 11.2, "driver", 12.5), ("worker 2", 12.2, "driver", 12.5),
        ],
    ),
    "async-samples": Picture(
        "Workers sample all the time. The driver learns from the fragments that arrive first, and "
        "a worker gets new weights with its next request",
        {
            "worker 1": blocks(*(("sample", 3 * n, 3 * n + 2.9) for n in range(5))),
            "driver": blocks(
                ("learn", 4.2, 6.9), ("learn", 8.3, 11), ("learn", 12.5, 15.2)
            ),
            "worker 2": blocks(*(("sample", 4 * n, 4 * n + 3.9) for n in range(4))),
        },
        [
            ("worker 1", 2.9, "driver", 4.2), ("worker 2", 3.9, "driver", 4.2),
            ("worker 1", 5.9, "driver", 8.3), ("worker 2", 7.9, "driver", 8.3),
            ("driver", 6.9, "worker 1", 9), ("driver", 6.9, "worker 2", 8),
            ("worker 1", 8.9, "driver", 12.5), ("worker 1", 11.9, "driver", 12.5),
            ("driver", 11, "worker 1", 12), ("driver", 11, "worker 2", 12),
        ],
    ),
    "sync-replay": Picture(
        "All workers sample into a replay buffer. Then the driver learns from as many batches of "
        "the buffer as the training intensity allows, and the workers wait",
        {
            "worker 1": blocks(("sample", 0, 1.8), ("sample", 8.4, 10.2)),
            "driver": blocks(
                ("store", 2.9, 3.9, "insert"), ("learn", 3.9, 6), ("learn", 6, 8.1),
                ("store", 11.3, 12.3, "insert"), ("learn", 12.3, 14.4), ("learn", 14.4, 16),
            ),
            "worker 2": blocks(("sample", 0, 2.6), ("sample", 8.4, 11)),
        },
        [
            ("worker 1", 1.8, "driver", 2.9), ("worker 2", 2.6, "driver", 2.9),
            ("driver", 8.1, "worker 1", 8.4), ("driver", 8.1, "worker 2", 8.4),
            ("worker 1", 10.2, "driver", 11.3), ("worker 2", 11, "driver", 11.3),
        ],
    ),
    "async-replay": Picture(
        "Samplers, replay shards and the learner run at the same time. Samplers wait only if the "
        "learner is too slow for the training intensity",
        {
            "sampler": blocks(*(("sample", 2.7 * n, 2.7 * n + 2.6) for n in range(6))),
            "shard": blocks(
                ("store", 2.9, 3.9, "insert"), ("store", 4.1, 5, "draw"),
                ("store", 5.6, 6.6, "insert"), ("store", 7, 7.9, "draw"),
                ("store", 8.3, 9.3, "insert"), ("store", 10, 10.9, "draw"),
                ("store", 11, 12, "insert"), ("store", 13, 13.9, "draw"),
            ),
            "driver": blocks(
                ("learn", 5.3, 8), ("learn", 8.2, 10.9), ("learn", 11.2, 13.9), ("learn", 14.2, 16)
            ),
        },
        [
            ("sampler", 2.6, "shard", 2.9), ("shard", 5, "driver", 5.3),
            ("sampler", 5.3, "shard", 5.6), ("shard", 7.9, "driver", 8.2),
            ("sampler", 8, "shard", 8.3), ("shard", 10.9, "driver", 11.2),
            ("sampler", 10.7, "shard", 11), ("shard", 13.9, "driver", 14.2),
            ("driver", 8, "shard", 10), ("driver", 10.9, "shard", 13),
        ],
    ),
    "decentralized-allreduce": Picture(
        "Every worker samples, computes gradients and applies them. After each minibatch, "
        "all-reduce sums the gradients, so the ranks wait for each other",
        {
            "rank 0": blocks(
                ("sample", 0, 3), ("gradient", 4, 6), ("learn", 6.6, 7.4, "apply"),
                ("gradient", 7.4, 9.4), ("learn", 10, 10.8, "apply"), ("sample", 10.8, 13.8),
                ("gradient", 14.6, 16),
            ),
            "rank 1": blocks(
                ("sample", 0, 4), ("gradient", 4, 6), ("learn", 6.6, 7.4, "apply"),
                ("gradient", 7.4, 9.4), ("learn", 10, 10.8, "apply"), ("sample", 10.8, 14.6),
                ("gradient", 14.6, 16),
            ),
            "driver": blocks(("store", 11, 12, "count")),
        },
        [
            ("rank 0", 6, "rank 1", 6.6), ("rank 1", 6, "rank 0", 6.6),
            ("rank 0", 9.4, "rank 1", 10), ("rank 1", 9.4, "rank 0", 10),
            ("rank 1", 10.8, "driver", 11),
        ],
    ),
}  # fmt: skip

_LEFT, _WIDTH, _ROW, _BAR, _TOP = 80, 560, 52, 28, 14
_SCALE = (_WIDTH - _LEFT - 14) / END
_STYLE = """
  .ground { fill: #ffffff } .line, .head { stroke: #777777; fill: none }
  .head { fill: #777777; stroke: none } .wait { fill: #e9e9e9 } .name, .note { fill: #333333 }
  text { font: 14px system-ui, sans-serif } .in { fill: #ffffff; text-anchor: middle }
  .note { font-size: 13px }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1b1d22 } .line { stroke: #a5a5a5 } .head { fill: #a5a5a5 }
    .wait { fill: #34373f } .name, .note { fill: #e6e6e6 }
  }"""


def svg(picture: Picture) -> str:
    """Returns the text of a picture."""
    height = _TOP + _ROW * len(picture.rows) + 22
    center = {row: _TOP + _ROW * n + _BAR / 2 for n, row in enumerate(picture.rows)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{picture.says}.</title>",
        f"<style>{_STYLE}</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>',
        f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="6"/>',
    ]
    for row, found in picture.rows.items():
        y = center[row] - _BAR / 2
        lines.append(f'<text class="name" x="10" y="{y + 18:g}">{row}</text>')
        lines.append(_bar("wait", 0.0, END, y))
        for block in found:
            if block.start >= END:
                continue
            start, end = _x(block.start), _x(min(block.end, END))
            lines.append(_bar("", block.start, min(block.end, END), y, FILLS[block.kind][0]))
            label = block.label or block.kind
            if 7.3 * len(label) < end - start:
                lines.append(
                    f'<text class="in" x="{(start + end) / 2:.1f}" y="{y + 18:g}">{label}</text>'
                )
    for source, sent, target, arrived in picture.messages:
        if arrived > END - 0.3:
            continue
        down = 1 if center[target] > center[source] else -1
        lines.append(
            f'<line class="line" marker-end="url(#head)" x1="{_x(sent):.1f}" '
            f'y1="{center[source] + down * _BAR / 2:g}" x2="{_x(arrived):.1f}" '
            f'y2="{center[target] - down * _BAR / 2:g}"/>'
        )
    used = {block.kind for found in picture.rows.values() for block in found}
    kinds = [kind for kind in FILLS if kind in used]
    x = _LEFT
    for fill, name in [*(FILLS[kind] for kind in kinds), ("", "waits")]:
        colored = f'fill="{fill}"' if fill else 'class="wait"'
        lines.append(f'<rect {colored} x="{x}" y="{height - 23}" width="12" height="12" rx="2"/>')
        lines.append(f'<text class="note" x="{x + 17}" y="{height - 12}">{name}</text>')
        x += 36 + 7 * len(name)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(time: float) -> float:
    return _LEFT + time * _SCALE


def _bar(style: str, start: float, end: float, y: float, fill: str = "") -> str:
    colored = f'class="{style}"' if style else f'fill="{fill}"'
    width = _x(end) - _x(start) - (0 if style else 1)
    return (
        f'<rect {colored} x="{_x(start):.1f}" y="{y:g}" width="{width:.1f}" height="{_BAR}" '
        'rx="3"/>'
    )


def file_name(name: str) -> str:
    return f"waits-{name}.svg"
