"""Tests of Chrome traces of recorded events: idle time, tracks, counters and arrows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from polopt.common.config import ConfigError
from polopt.common.tracer import Event, Tracer
from polopt.dashboards.data.chrome_trace import chrome_trace, percentages, read_trace, self_times_s
from polopt.dashboards.trace_file import clock_shift_s

# Worker 1 computes two gradients. The driver sends the second request before the first reply.
DRIVER = [
    Event("driver", "wait", 10.0, 2.0),
    Event("driver", "apply", 12.0, 0.5),
    Event("request 1", "request", 10.0, 2.0),
    Event("request 1", "request", 11.0, 3.0),
    Event("driver", "apply", 14.0, 0.5),
    Event("", "policy lag", 12.0, 3.0),
]
WORKER = [
    Event("worker", "sample", 10.0, 1.0),
    Event("worker", "gradient", 11.0, 0.5),
    Event("worker", "gradient", 13.0, 0.5),
]


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    return chrome_trace({"driver": DRIVER, "worker 1": WORKER}, (10.0, 15.0), num_steps=2)


def events(trace: dict[str, Any], phase: str, **values: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == phase and all(event[key] == value for key, value in values.items())
    ]


def test_times_are_microseconds_from_the_begin(trace: dict[str, Any]) -> None:
    (sample,) = events(trace, "X", name="sample")
    assert (sample["ts"], sample["dur"]) == (0.0, 1e6)
    assert [event["ts"] for event in events(trace, "X", name="apply")] == [2e6, 4e6]


def test_gaps_of_workers_are_idle(trace: dict[str, Any]) -> None:
    idle = events(trace, "X", name="idle", pid=1)
    assert [(span["ts"], span["dur"]) for span in idle] == [(1.5e6, 1.5e6), (3.5e6, 1.5e6)]
    assert not events(trace, "X", name="idle", pid=0)


def test_spans_are_cut_off_at_the_window() -> None:
    spans = [Event("worker", "sample", 1.0, 2.0), Event("worker", "sample", 4.0, 5.0)]
    outside = [Event("worker", "gradient", 0.0, 1.0), Event("", "policy lag", 9.5, 1.0)]
    trace = chrome_trace({"driver": [], "worker 1": [*outside, *spans]}, (2.0, 9.0))
    assert self_times_s(trace) == {"driver": {}, "worker 1": {"sample": 6.0, "idle": 1.0}}
    assert min(event["ts"] for event in events(trace, "X")) == 0.0
    assert not events(trace, "C")


def test_time_before_the_first_span_is_idle() -> None:
    spans = [Event("worker", "sample", 4.0, 5.0)]
    trace = chrome_trace({"driver": [], "worker 1": spans}, (2.0, 9.0))
    assert self_times_s(trace)["worker 1"] == {"idle": 2.0, "sample": 5.0}


def test_worker_without_a_span_is_idle() -> None:
    trace = chrome_trace({"driver": [], "worker 1": []}, (2.0, 9.0))
    assert self_times_s(trace)["worker 1"] == {"idle": 7.0}


def test_nested_spans_leave_no_gap() -> None:
    spans = [Event("worker", "learn", 0.0, 4.0), Event("worker", "allreduce", 1.0, 1.0)]
    spans.append(Event("worker", "sample", 4.0, 1.0))
    trace = chrome_trace({"worker 1": spans}, (0.0, 5.0))
    assert not events(trace, "X", name="idle")


def test_pending_requests_have_tracks_of_their_own(trace: dict[str, Any]) -> None:
    tids = {event["tid"] for event in events(trace, "X", name="request")}
    names = [e["args"]["name"] for e in events(trace, "M", name="thread_name") if e["tid"] in tids]
    assert {"request 1 #1", "request 1 #2"} <= set(names)


def test_counters_follow_requests_and_lag(trace: dict[str, Any]) -> None:
    counts = [(e["ts"], *e["args"].values()) for e in events(trace, "C", name="requests in flight")]
    assert counts == [(0.0, 1), (1e6, 2), (2e6, 1), (4e6, 0)]
    (lag,) = events(trace, "C", name="policy lag")
    assert (lag["ts"], lag["args"]) == (2e6, {"policy lag": 3.0})


def test_arrows_lead_from_gradients_to_updates(trace: dict[str, Any]) -> None:
    begins, ends = events(trace, "s"), events(trace, "f")
    # An arrow begins half a microsecond before the end of the gradient, within its span.
    assert [begin["ts"] for begin in begins] == [1.5e6 - 0.5, 3.5e6 - 0.5]
    assert [end["ts"] for end in ends] == [2e6, 4e6]
    assert [begin["id"] for begin in begins] == [end["id"] for end in ends]
    assert {begin["pid"] for begin in begins} == {1}


def test_self_times_exclude_nested_spans() -> None:
    spans = [Event("worker", "learn", 0.0, 4.0), Event("worker", "skew", 0.0, 1.0)]
    spans += [Event("worker", "allreduce", 0.0, 0.75), Event("worker", "allreduce", 2.0, 0.5)]
    spans.append(Event("request 1", "request", 0.0, 9.0))
    times = self_times_s(chrome_trace({"driver": [], "worker 1": spans}, (0.0, 4.0)))
    assert times == {"driver": {}, "worker 1": {"learn": 2.5, "skew": 0.25, "allreduce": 1.25}}


@pytest.mark.parametrize("started_s", [50.0, 3e7])  # the machine started just now, or long ago
def test_spans_that_meet_are_not_nested(started_s: float) -> None:
    # Starts and durations are rounded, so some spans begin a rounding step before the end of the
    # previous span.
    rng, at_s = random.Random(0), started_s
    expected = {"wait": 0.0, "apply": 0.0}
    spans = []
    for number in range(200):
        name, duration_s = ("wait", "apply")[number % 2], rng.uniform(1e-4, 1e-2)
        spans.append(Event("worker", name, at_s, duration_s))
        expected[name] += duration_s
        at_s += duration_s
    trace = chrome_trace({"driver": [], "worker 1": spans}, (started_s, at_s))
    assert self_times_s(trace)["worker 1"] == pytest.approx(expected, rel=1e-6)
    assert not events(trace, "X", name="idle")


def test_percentages_of_a_process_sum_to_100(trace: dict[str, Any]) -> None:
    assert percentages(trace) == {
        "driver": {"wait": 40, "other": 40, "apply": 20},
        "worker 1": {"idle": 60, "sample": 20, "gradient": 20},
    }
    thirds = [Event("driver", name, at_s, 1.0) for at_s, name in enumerate("abc")]
    of_driver = percentages(chrome_trace({"driver": thirds}, (0.0, 3.0)))["driver"]
    assert sorted(of_driver.values()) == [33, 33, 34]
    empty = percentages(chrome_trace({"driver": []}, (0.0, 3.0)))
    assert empty == {"driver": {"other": 100}}


@pytest.mark.parametrize(
    ("phase", "key", "value"), [("M", "args", {"name": 3}), ("X", "dur", 1e999)]
)
def test_malformed_trace_is_refused(
    trace: dict[str, Any], tmp_path: Path, phase: str, key: str, value: Any
) -> None:
    content = json.loads(json.dumps(trace))
    events(content, phase)[-1][key] = value
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is not a trace of polopt"):
        read_trace(file)


def test_tracer_keeps_events_between_begin_and_take(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer()
    tracer.count("before", 1)
    tracer.begin()
    assert tracer.span("driver", "wait", 0.0) > 0.0
    tracer.count("lag", 2)
    monkeypatch.setattr("polopt.common.tracer.MAX_EVENTS", 2)
    tracer.count("over the limit", 3)
    assert [event.name for event in tracer.take()] == ["wait", "lag"]
    tracer.count("after", 1)
    assert tracer.take() == []


@pytest.mark.parametrize(("clock_s", "shift_s"), [(10.75, 0.0), (5.0, 5.5), (1e6, 10.5 - 1e6)])
def test_clocks_of_other_machines_are_shifted(clock_s: float, shift_s: float) -> None:
    assert clock_shift_s(clock_s, called_s=10.0, answered_s=11.0) == shift_s
