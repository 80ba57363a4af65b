"""Pages and traces of a run show all of it, load anywhere, and need nothing else."""

import html.parser
import io
import json
import re

import numpy as np
import pytest

from jaxsched.simulation import overview_html as overview_html_module
from jaxsched.simulation import overview_trace
from jaxsched.simulation.metrics import metrics
from jaxsched.simulation.overview import draw_overview
from jaxsched.simulation.overview_html import overview_html
from jaxsched.simulation.overview_series import series
from jaxsched.simulation.replay import replay
from jaxsched.simulation.replay_clock import NEVER_PS
from test_timeline import CONFIG, workload

LIMITS = {"ttft_ms": 40.0, "tpot_ms": 5.0}


@pytest.fixture(scope="module")
def run():
    return replay(workload(15), CONFIG)


@pytest.fixture(scope="module")
def events(run):
    # Only what JSON can hold comes back.
    return json.loads(json.dumps(overview_trace.trace_events(run)))["traceEvents"]


def of(events, phase, pid=None):
    return [e for e in events if e["ph"] == phase and pid in (None, e["pid"])]


def test_series_keep_every_token_and_every_second(run):
    found = series(run, num_slices=37)
    width = np.diff(found.edges)
    prefill = np.sum(run.step_prefill_tokens * run.step_repeats)
    assert np.sum(found.prefill_per_s * width) == pytest.approx(float(prefill))
    decode = np.sum(run.step_decode_tokens * run.step_repeats)
    assert np.sum(found.decode_per_s * width) == pytest.approx(float(decode))
    got = run.first_token != NEVER_PS
    spent = np.sum((run.finish[got] - run.first_token[got]) / 1e12)
    assert np.sum(found.decoding * width) == pytest.approx(float(spent))
    left = np.minimum(run.admitted, run.finish)
    waited = np.sum((left - run.arrival)[left != NEVER_PS] / 1e12)
    assert np.sum(found.waiting * width) == pytest.approx(float(waited))
    used = found.budget_use[~np.isnan(found.budget_use)]
    assert len(used) and np.all((used > 0) & (used <= 1 + 1e-9))
    cached = np.sum(found.cached_per_s * width)
    assert cached == pytest.approx(float(metrics(run)["num_cached_tokens"]))


def test_the_picture_has_every_panel(run):
    figure = draw_overview(run, LIMITS)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(titles) == 7 and all(titles)
    words = " ".join(text.get_text() for text in figure.texts)
    assert "15 requests" in words and "within limits" in words
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG") and len(buffer.getvalue()) > 20_000


class Reader(html.parser.HTMLParser):
    """Collects open tags, and everything that would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.sources, self.cells = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_whole_and_needs_no_network(run):
    page = overview_html(run, LIMITS)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert len(reader.sources) == 2
    assert all(one.startswith("data:image/png;base64,") for one in reader.sources)
    assert not re.search(r"https?://|@import|<script|<link", page)
    assert "limit ttft_ms" in reader.cells and "snapshot_interval" in reader.cells
    slowest = int(np.nanargmax(series(run).ttft_ms))
    name = run.workload.requests[slowest].request_id
    assert reader.cells.count(name) >= 1


def test_names_cannot_become_markup_and_no_limits_give_no_table(run, monkeypatch):
    monkeypatch.setattr(overview_html_module, "_picture", lambda figure, what: "")
    monkeypatch.setitem(run.workload.__dict__, "name", "<b>&'\"")
    page = overview_html(run)
    assert "<title>&lt;b&gt;&amp;&#x27;&quot;: 15 requests</title>" in page
    assert "limit ttft_ms" not in page


def test_every_event_has_what_the_format_asks_for(events):
    for event in events:
        assert event["ph"] in ("M", "X", "C", "i") and isinstance(event["pid"], int)
        assert event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["tid"], int)
        if event["ph"] == "i":
            assert event["s"] == "t"


def test_chunks_decodes_snapshots_and_requests_are_all_there(run, events):
    names = [e["name"] for e in of(events, "X", 2)]
    chunks = [name for name in names if name.startswith("prefill")]
    assert len(chunks) == len(run.chunk_end) > 15
    decoded = (run.first_token != NEVER_PS) & (run.finish > run.first_token)
    assert names.count("decode") == int(np.sum(decoded)) > 0
    waited = np.minimum(run.admitted, run.finish) > run.arrival
    waited &= run.finish != NEVER_PS
    assert names.count("waiting") == int(np.sum(waited)) > 0
    snapshots = [e for e in of(events, "i", 2) if e["name"] == "snapshot"]
    assert len(snapshots) == int(np.sum(run.chunk_points >= 0)) > 0
    for index in range(15):
        assert names.count(f"r{index}") == 1
    assert len(of(events, "X", 1)) == len(run.step_start)


def nested(slices):
    """Whether slices of one track lie inside of each other or apart."""
    ends = []
    for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            return False
        ends.append(end)
    return True


@pytest.mark.parametrize("most", [500, 3])
def test_slices_of_a_track_nest(run, most, monkeypatch):
    monkeypatch.setattr(overview_trace, "MAX_TRACKS", most)
    events = overview_trace.trace_events(run)["traceEvents"]
    tracks = {}
    for event in of(events, "X"):
        start = round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        tracks.setdefault((event["pid"], event["tid"]), []).append((start, end))
    assert all(nested(slices) for slices in tracks.values())
    labels = {
        e["args"]["name"] for e in of(events, "M", 2) if e["name"] == "thread_name"
    }
    if most == 3:
        assert len(labels) < 15 and all(name.startswith("track") for name in labels)
    else:
        assert labels == {f"r{index}" for index in range(15)}


def test_the_counter_falls_to_zero_when_nothing_runs(run, events):
    counters = of(events, "C")
    assert counters[-1]["args"] == {"prefill": 0, "decode": 0}
    times = [e["ts"] for e in counters]
    assert times == sorted(times)
    busy = [e["args"]["prefill"] for e in counters]
    assert max(busy) == int(run.step_prefill_tokens.max())
