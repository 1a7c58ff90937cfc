"""Converts recorded events to a Chrome trace, the JSON format that Perfetto and vizviewer open.

The format is the "Trace Event Format" of Chromium. In the trace, each process of the run is a
process, and each track (see `Event.track`) is a thread. Times are microseconds since the beginning
of the recording.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.common.files import read_regular
from polopt.common.tracer import Event

#: Name of the trace file in the trial's directory.
TRACE_FILE = "trace.json"
#: `read_trace` refuses larger files.
_MOST_BYTES = 2 << 30
#: Name for the time of a worker outside all spans.
IDLE = "idle"
#: Name for the time of the driver outside all spans.
OTHER = "other"
_REQUEST = "request "
_US = 1e6
#: Times that differ by at most this are treated as equal, because the sum of a start and a duration
#: is rounded.
_RESOLUTION_S = 1e-7


def chrome_trace(
    processes: Mapping[str, Sequence[Event]], window_s: tuple[float, float], **other: Any
) -> dict[str, Any]:
    """Returns the trace of one recording.

    Events are cut off at the ends of the window. The time of a worker outside all spans becomes
    spans named `idle`. Requests to one worker that overlap are drawn on separate tracks. For each
    request that returned a gradient, an arrow (a flow event) leads from the end of the worker's
    span `gradient` to the driver's next span `apply`.

    Args:
        processes: the events of each process. The names of the processes are `driver` and
            `worker N`. All events have times of the same clock.
        window_s: begin and end of the recording.
        other: further JSON values, which the trace contains as `otherData`.
    """
    begun_s, ended_s = window_s
    trace: list[dict[str, Any]] = []
    cut = {name: _cut(events, begun_s, ended_s) for name, events in processes.items()}
    for pid, (name, events) in enumerate(cut.items()):
        trace.append(_meta("process_name", pid, 0, name))
        tracks = _tracks(events)
        if name != "driver":
            worker = tracks.pop("worker", [])
            idle = [Event("worker", IDLE, at_s, gap_s) for at_s, gap_s in _gaps(worker, window_s)]
            tracks = {"worker": [*worker, *idle], **tracks}
        for tid, (track, spans) in enumerate(tracks.items()):
            trace.append(_meta("thread_name", pid, tid, track))
            trace += [_span(event, pid, tid, begun_s) for event in spans]
        counters = [event for event in events if not event.track] + _in_flight(events)
        trace += [
            {
                "ph": "C",
                "name": event.name,
                "pid": pid,
                "ts": _US * (event.at_s - begun_s),
                "args": {event.name: event.value},
            }
            for event in counters
        ]
    trace += _arrows(cut, begun_s)
    other["duration_s"] = ended_s - begun_s
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": other}


def _cut(events: Iterable[Event], begun_s: float, ended_s: float) -> list[Event]:
    """Returns the events between two times. Spans that reach beyond these times are shortened."""
    kept = []
    for event in events:
        if not event.track:
            if begun_s <= event.at_s <= ended_s:
                kept.append(event)
        elif event.at_s < ended_s and _end_s(event) > begun_s:
            at_s = max(event.at_s, begun_s)
            kept.append(event._replace(at_s=at_s, value=min(_end_s(event), ended_s) - at_s))
    return kept


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(event: Event, pid: int, tid: int, start_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": IDLE if event.name == IDLE else "phase",
        "pid": pid,
        "tid": tid,
        "ts": _US * (event.at_s - start_s),
        "dur": _US * event.value,
        **({} if event.event is None else {"args": {"event": event.event}}),
    }


def _tracks(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Returns the spans of each track, in order of time.

    Requests to one worker that overlap are spread over several tracks. The number of these tracks
    is the largest number of requests that were pending at the same time.
    """
    tracks: dict[str, list[Event]] = {}
    spans = sorted((e for e in events if e.track), key=lambda e: (e.at_s, -e.value))
    for event in spans:
        track = event.track
        if track.startswith(_REQUEST):
            names = (f"{track} #{number}" for number in itertools.count(1))
            track = next(name for name in names if _is_free(tracks.get(name), event.at_s))
        tracks.setdefault(track, []).append(event)
    return dict(sorted(tracks.items(), key=lambda item: (item[0].startswith(_REQUEST), item[0])))


def _is_free(spans: list[Event] | None, at_s: float) -> bool:
    return not spans or _end_s(spans[-1]) <= at_s + _RESOLUTION_S


def _gaps(spans: Iterable[Event], window_s: tuple[float, float]) -> list[tuple[float, float]]:
    """Returns begin and duration of each gap between the spans. Spans may be nested."""
    gaps = []
    end_s, ended_s = window_s
    for at_s, until_s in [*((event.at_s, _end_s(event)) for event in spans), (ended_s, ended_s)]:
        if at_s > end_s + _RESOLUTION_S:
            gaps.append((end_s, at_s - end_s))
        end_s = max(until_s, end_s)
    return gaps


def _in_flight(events: Iterable[Event]) -> list[Event]:
    """Returns a counter event for each change of the number of pending requests."""
    requests = [event for event in events if event.track.startswith(_REQUEST)]
    changes = sorted([(e.at_s, 1) for e in requests] + [(e.at_s + e.value, -1) for e in requests])
    counts = itertools.accumulate(change for _, change in changes)
    return [
        Event("", "requests in flight", at_s, count)
        for (at_s, _), count in zip(changes, counts, strict=True)
    ]


def _arrows(processes: Mapping[str, Sequence[Event]], start_s: float) -> list[dict[str, Any]]:
    """Returns flow events from each gradient of a worker to the driver's next span `apply`.

    Both ends are on track 0 of their process. This track holds the phases of the driver, or of the
    worker.
    """
    pids = {name: pid for pid, name in enumerate(processes)}
    driver = processes.get("driver", ())
    updates = sorted(event.at_s for event in driver if event.name == "apply")
    gradients = {
        name: sorted(_end_s(event) for event in events if event.name == "gradient")
        for name, events in processes.items()
    }
    arrows: list[dict[str, Any]] = []
    for request in sorted((e for e in driver if e.track.startswith(_REQUEST)), key=_end_s):
        worker = f"worker {request.track.removeprefix(_REQUEST)}"
        ends = gradients.get(worker, [])
        done = bisect.bisect_right(ends, _end_s(request))
        update = bisect.bisect_left(updates, _end_s(request))
        if done == 0 or ends[done - 1] < request.at_s or update == len(updates):
            continue
        arrow = {"name": "gradient", "cat": "flow", "id": len(arrows) // 2, "tid": 0}
        # The arrow begins within the span of the gradient, because viewers attach it to that span.
        begin_us = _US * (ends[done - 1] - start_s) - 0.5
        end_us = _US * (updates[update] - start_s)
        arrows.append({**arrow, "ph": "s", "pid": pids[worker], "ts": begin_us})
        arrows.append({**arrow, "ph": "f", "bp": "e", "pid": pids["driver"], "ts": end_us})
    return arrows


def _end_s(event: Event) -> float:
    return event.at_s + event.value


def self_times_s(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the seconds of the spans of each name, without the seconds of spans nested in them.

    Args:
        trace: a trace that `chrome_trace` returned.

    Returns:
        For each process, the seconds by name of the span. Spans of requests are not counted.
    """
    names: dict[tuple[str, int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    processes = (name for (kind, *_), name in names.items() if kind == "process_name")
    times: dict[str, dict[str, float]] = {process: {} for process in processes}
    open_spans: dict[tuple[int, int], list[dict[str, Any]]] = {}
    spans = (event for event in trace["traceEvents"] if event["ph"] == "X")
    for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        pid, tid = span["pid"], span["tid"]
        if names["thread_name", pid, tid].startswith(_REQUEST):
            continue
        own = times[names["process_name", pid, 0]]
        own[span["name"]] = own.get(span["name"], 0.0) + span["dur"] / _US
        outer = open_spans.setdefault((pid, tid), [])
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= span["ts"] + _US * _RESOLUTION_S:
            outer.pop()
        if outer:
            own[outer[-1]["name"]] -= span["dur"] / _US
        outer.append(span)
    return times


def percentages(trace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Returns the share of each span name in the recorded time, as an integer percentage.

    Time without a span has the name `other`. The percentages of a process sum to 100: each value is
    rounded down, and the values with the largest remainders are then raised by 1.

    Args:
        trace: a trace that `chrome_trace` returned.

    Returns:
        For each process, the percentages by name of the span, in descending order.
    """
    duration_s = trace["otherData"]["duration_s"]
    found = {}
    for process, times in self_times_s(trace).items():
        rest_s = duration_s - sum(times.values())
        exact = {name: 100.0 * time_s / duration_s for name, time_s in times.items()}
        if rest_s > _RESOLUTION_S or not exact:
            exact[OTHER] = 100.0 * rest_s / duration_s
        whole = {name: int(value) for name, value in exact.items()}
        by_remainder = sorted(exact, key=lambda name: whole[name] - exact[name])
        for name in by_remainder[: 100 - sum(whole.values())]:
            whole[name] += 1
        found[process] = dict(sorted(whole.items(), key=lambda item: -exact[item[0]]))
    return found


def read_trace(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Reads a trace file.

    Returns:
        The trace's `otherData` and `percentages`.

    Raises:
        ConfigError: if the file cannot be read, or is not a trace of polopt.
    """
    try:
        recorded = json.loads(read_regular(path, _MOST_BYTES))
        return recorded["otherData"], percentages(recorded)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(f"{str(path)!r} is not a trace of polopt: {error!r}") from error
