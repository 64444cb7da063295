"""The page: what is in its text, and how a real browser takes it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from time import monotonic

import pytest

import fmtprop as fp
from fmtprop.report import Comparison
from fmtprop.report.sketch import EdgeRow, NodeRow
from tests.report.browser import CHROMIUM, browsing
from tests.report.test_comparison import report as made_up

HOSTILE = "</script><script>document.title='stolen'</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


@pytest.fixture(scope="module")
def measured():
    return fp.compile("concat", policy="naive", tune="model").report(repeats=1)


def hostile(report):
    row = replace(report.reorders[0], name=HOSTILE, origin=HOSTILE, reason=HOSTILE, producer=HOSTILE)
    step = replace(report.steps[0], name=HOSTILE, origin=HOSTILE)
    node = replace(report.nodes[0], name=HOSTILE, op=HOSTILE)
    return replace(
        report, model=HOSTILE, reorders=(row, *report.reorders[1:]), steps=(step, *report.steps[1:]),
        nodes=(node, *report.nodes[1:]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


def shown(browser, folder, text, **how):
    """Return the page in a browser, which must not complain, nor ask for anything."""
    (folder / "page.html").write_text(text, encoding="utf-8")
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(folder / "page.html", **how)
    assert (browser.complaints, browser.requests) == ([], [])
    return browser


def test_a_page_has_all_that_it_needs(measured, tmp_path):
    text = measured.to_html(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == text.rstrip("\n") + "\n"
    assert not re.search(r"<(?:link|iframe|script[^>]* src|img[^>]* src=.https?)", text)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#x27;none&#x27;") and "unsafe" not in policy
    for place in re.findall(r'<div class="(?:scroll|chart)[^>]*>', text):
        assert 'tabindex="0"' in place or 'aria-label="' in place, "for keyboards, and for screen readers"
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert data["policies"][0]["reorders"] == json.loads(measured.to_json())["reorders"]
    assert data["pictures"]["formats"]["f32:acdb"].startswith("data:image/svg+xml;base64,")
    measured.to_html(tmp_path / "r.html")  # a report is replaced by a report


def test_names_are_text(measured):
    text = hostile(measured).to_html()
    assert HOSTILE not in text and text.count("<script") == made_up("plain").to_html().count("<script") == 3


def test_a_notebook_gets_a_fragment(measured):
    text = hostile(measured)._repr_html_()
    assert "&lt;script&gt;" in text and "<script" not in text and "style" not in text
    assert "reorders take" in text and "<table>" in text
    assert "No run executes a reorder." in made_up("plain")._repr_html_()
    both = Comparison.of([hostile(measured), made_up("plain")], [1.0, 0.0])._repr_html_()
    assert both.count("<table>") == 1 and "<script" not in both and "outputs are off by 1.0e+00" in both


def test_a_trace_has_each_step(measured, tmp_path):
    data = json.loads(measured.to_trace(tmp_path / "t.json"))
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == [row.name for row in measured.steps], "each once"
    ends = [event["ts"] + event["dur"] for event in events]
    assert all(end <= event["ts"] + 0.01 for end, event in zip(ends, events[1:], strict=False)), "one after the other"
    moved = [event["name"] for event in events if event["cat"] == "reorder"]
    assert moved == [event["name"] for event in events if event["tid"] == 1] == [row.name for row in measured.reorders]
    assert data["baseTimeNanoseconds"] > 1.6e18
    measured.to_trace(tmp_path / "t.json")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_it_without_complaint(browser, measured, tmp_path, width, dark):
    comparison = Comparison.of([made_up("plain"), measured], [0.0, 1e-7])
    name = measured.reorders[0].name
    page = shown(browser, tmp_path, comparison.to_html(), place=f"#{name}", width=width, dark=dark)
    assert page.value("document.querySelectorAll('canvas').length") == 5
    assert page.value("document.querySelector('#detail h3').textContent") == name
    assert page.value("document.querySelectorAll('#detail figure img').length") == 2
    figures = "[...document.querySelectorAll('#detail figure')]"
    wide = page.value(f"{figures}.map((one) => [one.dataset.wide, one.scrollWidth - one.clientWidth])")
    assert all(hint == str(beyond > 1).lower() for hint, beyond in wide)
    assert any(hint == "true" for hint, _ in wide) == (width == 390)
    assert page.value("document.querySelectorAll('#rows tbody tr').length") == len(measured.reorders)
    assert page.value("document.getElementById('note').textContent") == "errors are relative to PyTorch"
    assert page.value("document.querySelectorAll('#rows th[aria-sort=descending]').length") == 1
    assert page.value("document.documentElement.scrollWidth") <= width, "nothing is beyond the window"
    assert page.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )


#: the texts of all charts, each with whether it lies within its chart
TEXTS = """[...document.querySelectorAll('.chart')].map((place) => echarts.getInstanceByDom(place)).filter(Boolean)
  .flatMap((chart) => chart.getZr().storage.getDisplayList().filter((shape) => shape.type === 'tspan' && !shape.ignore)
    .map((shape) => {
      const box = shape.getBoundingRect().clone();
      if (shape.transform) box.applyTransform(shape.transform);
      const [right, bottom] = [chart.getWidth() + 1, chart.getHeight() + 1];
      return [shape.style.text, box.x > -1 && box.y > -1 && box.x + box.width < right && box.y + box.height < bottom];
    }))"""


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("model", ["chain", "concat", "row"])
def test_no_label_of_a_chart_is_cut(browser, measured, tmp_path, model, width):
    report = measured if model == "row" else fp.compile(model, tune="model").report(repeats=1)
    if model == "row":
        nodes = tuple(replace(node, x=float(i), y=0.0) for i, node in enumerate(report.nodes))
        report = replace(report, nodes=nodes)
    path = "a.path.of.modules.that.no.phone.has.the.width.for.conv"
    report = replace(report, steps=(replace(report.steps[0], origin=path), *report.steps[1:]))
    page = shown(browser, tmp_path, report.to_html(), width=width)
    texts = page.value(TEXTS)
    labels = (
        {"MiB", "ms", "step"} if model == "row" else {"MiB", "ms", "step", "input"}
    )  # a crowded row leaves out names
    assert labels <= {text for text, _ in texts}
    assert [text for text, whole in texts if not whole] == []


def test_an_edge_without_a_reorder_has_its_format(browser, tmp_path):
    report = fp.compile("concat", policy="plain", tune="model").report(repeats=1)
    page = shown(browser, tmp_path, report.to_html())
    names = {row.name for row in report.reorders}
    edge = next(edge for edge in report.edges if not names & {edge.producer, edge.reader})
    data = json.dumps({"source": edge.producer, "target": edge.reader, "value": asdict(edge)})
    chart = "echarts.getInstanceByDom(document.getElementById('graph-chart'))"
    page.value(f"void {chart}.trigger('click', {{dataType: 'edge', data: {data}}})")
    text = page.value("document.getElementById('detail').innerText")
    assert f"{edge.producer} → {edge.reader}.{edge.operand}" in text and edge.format in text
    assert page.value("document.querySelectorAll('#detail figure img').length") == 1


def test_a_browser_takes_names_as_text(browser, measured, tmp_path):
    page = shown(browser, tmp_path, hostile(measured).to_html())
    assert page.value("document.querySelectorAll('canvas').length") == 4, "all charts of one policy"
    assert page.value("document.title") != "stolen" and page.value("document.scripts.length") == 3
    text = page.value("document.body.innerText")
    assert (
        "onerror=alert" in text and "\u202e" not in text and page.value("document.querySelector('img[src=x]')") is None
    )


def test_the_policy_of_the_page_forbids_what_it_does_not_need(browser, measured, tmp_path):
    """A script or a request that came in all the same would not run."""
    page = shown(browser, tmp_path, measured.to_html())
    page.value(
        "void document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))"
    )
    page.value("void document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    page.value("void fetch('https://example.org/').catch(() => 0)")
    end = monotonic() + 10
    while len(page.complaints) < 3 and monotonic() < end:
        assert page.value("document.title") != "1"
    assert len(page.complaints) >= 3 and all("Content Security Policy" in told for told in page.complaints)


def test_the_keyboard_sorts_opens_and_changes_the_policy(browser, measured, tmp_path):
    page = shown(browser, tmp_path, Comparison.of([made_up("plain"), measured], [0.0, 0.0]).to_html())
    focus = "document.activeElement.textContent"
    reached = []
    while len(reached) < 60 and (not reached or "seconds" not in reached[-1]):
        page.press("Tab", 9)
        reached.append(page.value(focus))
        if reached[-1].startswith("time"):
            break
    assert reached[0] == "Skip to the verdict" and reached[1:3] == ["plain", "naive"]
    page.press("Enter", 13)
    assert page.value("document.querySelector('#rows th[aria-sort=ascending]').textContent").startswith("time")
    assert page.value(focus).startswith("time"), "the focus stays"
    first = page.value("document.querySelector('#rows tbody td').textContent")
    while page.value(focus) != first:
        page.press("Tab", 9)
    page.press("Enter", 13)
    assert page.value("document.activeElement.id") == "detail"
    assert page.value("document.querySelector('#detail h3').textContent") == first
    page.value("document.querySelector('#policies button').focus()")
    page.press("Enter", 13)
    assert page.value("document.querySelector('[aria-pressed=true]').textContent") == "plain"


def test_a_screen_reader_gets_everything(browser, measured, tmp_path):
    page = shown(browser, tmp_path, measured.to_html())
    found = page.accessible()
    assert {"Verdict", "Ledger of reorders", "Graph", "Modules", "Memory over time"} <= {
        name for role, name in found if role == "heading"
    }
    charts = [name for role, name in found if role in ("image", "img")]
    assert len(charts) == 4 and all(name and name != "Chart" for name in charts)
    assert sum(role == "columnheader" for role, _ in found) >= 13
    assert [name.strip() for role, name in found if role in ("searchbox", "textbox")] == ["Search"]
    assert not [role for role, name in found if role == "button" and not name]


def test_it_prints(browser, measured, tmp_path):
    page = shown(browser, tmp_path, measured.to_html(), dark=True)
    paper = page.pdf()
    assert paper.startswith(b"%PDF-") and 2 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 8


def test_a_large_graph_opens_soon(browser, measured, tmp_path):
    count = 5000
    nodes = tuple(
        NodeRow(
            f"n{i}", "convolution", "jit", "onednn", f"block{i // 9}.conv", "f32:acdb", float(i % 90), float(i // 90)
        )
        for i in range(count)
    )
    edges = tuple(EdgeRow(f"n{i}", f"n{i + 1}", "src", "f32:acdb", 1024) for i in range(count - 1))
    steps = tuple(replace(measured.steps[0], name=f"n{i}", origin=f"block{i // 9}.conv") for i in range(count))
    text = replace(measured, nodes=nodes, edges=edges, steps=steps).to_html()
    before = browser.cpu_seconds()
    page = shown(browser, tmp_path, text)
    assert "Graph of 5000 nodes" in page.value("document.getElementById('graph-chart').ariaLabel")
    drawn_seconds = int(page.value("document.documentElement.dataset.drawn")) / 1e3
    # whoever else uses the machine makes it slower, but takes no time of the page's thread
    assert min(drawn_seconds, page.cpu_seconds() - before) < 3
    print(f"drawn after {drawn_seconds:.1f} s, {page.cpu_seconds() - before:.1f} s of the page's thread")
