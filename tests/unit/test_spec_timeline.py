"""Timelines: the message of every check, and Chrome traces that read back to the last bit."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.spec.timeline import Event, Timeline

LOOKUP = Event(id=1, name="lookup", kind="compute", rank=0, lane="main", step=0, start=0.1, end=0.3, flops=7)
SEND = Event(
    id=2,
    name="send",
    kind="communicate",
    rank=0,
    lane="ids",
    step=0,
    start=0.3,
    end=0.7,
    bytes_=9,
    after=(1,),
)
DENSE = Event(id=3, name="dense", kind="compute", rank=1, lane="main", step=0, micro=2, start=0.7, end=1.0, after=(2,))
TIMELINE = Timeline("predicted", (LOOKUP, SEND, DENSE))

seconds = st.floats(0, 1e9)
events = st.builds(
    Event,
    id=st.integers(0, 9),
    name=st.text(),
    kind=st.text(),
    rank=st.integers(0, 3),
    lane=st.sampled_from(["main", "ids", "é"]),
    step=st.integers(0),
    micro=st.integers(0, 3),
    start=seconds,
    end=seconds,
    bytes_=st.integers(0),
    flops=st.integers(0),
    after=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
sources = st.sampled_from(["predicted", "measured", "emulated"])


@given(st.builds(Timeline, sources, st.lists(events, max_size=5).map(tuple)))
def test_a_chrome_trace_reads_back_exactly(timeline):
    assert Timeline.from_chrome(timeline.to_chrome()) == timeline


def test_the_chrome_trace_has_ranks_lanes_slices_and_arrows():
    trace = json.loads(TIMELINE.to_chrome())
    assert trace["otherData"] == {"source": "predicted"}
    by_phase = {phase: [e for e in trace["traceEvents"] if e["ph"] == phase] for phase in "MXsf"}
    assert len(trace["traceEvents"]) == sum(map(len, by_phase.values()))
    names = [(e["name"], e["pid"], e.get("tid"), e["args"]["name"]) for e in by_phase["M"]]
    assert names == [
        ("process_name", 0, None, "rank 0"),
        ("process_name", 1, None, "rank 1"),
        ("thread_name", 0, 0, "main"),
        ("thread_name", 0, 1, "ids"),
        ("thread_name", 1, 0, "main"),
    ]
    send = by_phase["X"][1]
    assert (send["name"], send["cat"], send["pid"], send["tid"]) == ("send", "communicate", 0, 1)
    assert (send["ts"], send["dur"]) == (pytest.approx(3e5), pytest.approx(4e5))
    assert (send["args"]["bytes_"], send["args"]["start"], send["args"]["after"]) == (9, 0.3, [1])
    ends = [
        (s["id"], s["pid"], s["tid"], f["pid"], f["tid"]) for s, f in zip(by_phase["s"], by_phase["f"], strict=True)
    ]
    assert ends == [(0, 0, 0, 0, 1), (1, 0, 1, 1, 0)]
    assert all(f["bp"] == "e" for f in by_phase["f"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [}', "run/trace.json: bad JSON: Expecting value at line 1 column 18"),
        ("[]", "run/trace.json: not a trace of a shardwright Timeline"),
        (
            '{"traceEvents": [{"ph": "X"}]}',
            "run/trace.json: not a trace of a shardwright Timeline (KeyError('name'))",
        ),
        (
            TIMELINE.to_chrome().replace('"step": 0', '"step": "x"'),
            "run/trace.json: events.0.step: wanted a valid int",
        ),
        (
            TIMELINE.to_chrome().replace("predicted", "dreamt"),
            'run/trace.json: source: "dreamt" is not allowed; ',
        ),
    ],
)
def test_other_traces_are_refused(text, message):
    with pytest.raises(UserError) as caught:
        Timeline.from_chrome(text, origin="run/trace.json")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (replace(LOOKUP, end=0.0), 'event 1 "lookup" ends at 0.0, before its start at 0.1'),
        (replace(LOOKUP, end=float("nan")), 'event 1 "lookup" ends at nan'),
        (replace(LOOKUP, id=2), 'event id "2" appears 2 times'),
        (replace(LOOKUP, after=(9,)), 'event 1 "lookup" comes after event 9, which does not exist'),
        (replace(LOOKUP, bytes_=-1), 'event 1 "lookup": bytes_ is -1; wanted 0 or more'),
        (replace(LOOKUP, end=0.4), 'event 2 "send" starts at 0.3, before the end of event 1 at 0.4'),
    ],
)
def test_errors_in_timelines(event, message):
    TIMELINE.verify()
    with pytest.raises(UserError) as caught:
        replace(TIMELINE, events=(event, SEND, DENSE)).verify()
    assert message in str(caught.value)


def test_measured_clocks_may_disagree():
    Timeline("measured", (replace(LOOKUP, end=0.4), SEND, DENSE)).verify()
