import json
import re
from dataclasses import replace

import pytest

from hyperslab.testing.browser import CHROMIUM, brightness_of, browse, colours_of, screenshot
from hyperslab.testing.traces import Made, MadeRun, write_random_trace, write_trace
from hyperslab.trace import Category, Tier, report
from hyperslab.trace.analysis.figures import draw_report
from hyperslab.trace.analysis.lanes import COLOURS
from hyperslab.trace.analysis.page import to_html

RUN = MadeRun(num_ranks=3, slowness=1.3)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture
def found(tmp_path):
    write_trace(tmp_path / "trace", RUN.spans())
    return report(tmp_path / "trace", "run")


def test_the_page_needs_nothing_but_itself(found):
    page = to_html([found, found])
    assert found.verdict in page
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert page.count('<section class="run"') == 2


def test_names_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>"
    made = [Made(Category.read, 0, 1, evil, nbytes=1), Made(Category.compute, 1, 2, evil, step=0)]
    write_trace(tmp_path, [made], threads=[evil])
    page = report(tmp_path, evil).to_html()
    assert "<script>alert" not in page
    assert page.count("</script>") == 2


def test_pages_of_many_spans_stay_small(tmp_path):
    write_random_trace(tmp_path / "many", 300_000, num_ranks=4)
    write_random_trace(tmp_path / "few", 3_000, num_ranks=4)
    many, few = (len(report(tmp_path / name).to_html()) for name in ("many", "few"))
    assert many < 1_500_000
    assert few < many


def test_a_report_is_a_picture_too(found, tmp_path):
    draw_report(found, tmp_path / "report.png")
    assert len({*colours_of(tmp_path / "report.png")}) > 20
    write_trace(tmp_path / "empty", [[Made(Category.read, 0, 1)]])
    draw_report(report(tmp_path / "empty"), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


ACTS = """
addEventListener("load", () => {
  const told = {}, run = document.getElementById("run-0");
  const [whole, iteration] = run.querySelectorAll("canvas.timeline");
  const painted = (canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  };
  const view = (canvas) => [+canvas.dataset.start, +canvas.dataset.stop];
  const point = (name, canvas, part, more = {}) => {
    const box = canvas.getBoundingClientRect();
    const Kind = name === "wheel" ? WheelEvent : PointerEvent;
    canvas.dispatchEvent(new Kind(name, { bubbles: true, cancelable: true, pointerId: 1,
      clientX: box.left + part * box.width, clientY: box.top + 30, ...more }));
  };
  const choose = (name, value) => {
    const select = run.querySelector("select." + name);
    select.value = value;
    select.dispatchEvent(new Event("change"));
  };
  const bars = () => [...run.querySelectorAll(".epochs .bar")].map((bar) => bar.children.length);
  told.painted = [...run.querySelectorAll("canvas")].map(painted);
  told.bars = bars();
  told.before = view(whole);
  point("wheel", whole, 0.5, { deltaY: -400 });
  told.zoomed = view(whole);
  point("pointerdown", whole, 0.5);
  point("pointermove", whole, 0.4);
  point("pointerup", whole, 0.4);
  told.dragged = view(whole);
  told.tip = document.querySelector(".tip").textContent;
  told.lines = run.querySelector("canvas.lines").dataset.lines;
  whole.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  told.reset = view(whole);
  told.rows = [whole.dataset.rows, iteration.dataset.rows];
  const row = () => run.querySelector(".categories tr td:nth-child(2)").textContent;
  told.seconds = [row()];
  choose("rank", "2");
  told.chosen = [whole.dataset.rows, iteration.dataset.rows, run.dataset.rank];
  told.threads = run.querySelectorAll(".threads tr").length;
  told.seconds.push(row());
  choose("epoch", "1");
  told.seconds.push(row());
  document.body.dataset.told = JSON.stringify(told);
});
"""


@pytest.mark.slow
@needs_browser
def test_charts_are_drawn_and_zoom_and_the_choice_of_a_rank_work(found, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(found.to_html().replace("<body>", f"<body><script>{ACTS}</script>"))
    shown = browse(page, "--dump-dom")
    assert shown.console == []
    assert 'data-ready="yes"' in shown.dom
    packed = re.search(r'data-told="([^"]*)"', shown.dom).group(1)
    told = json.loads(packed.replace("&quot;", '"'))
    assert len(told["painted"]) == 3
    assert min(told["painted"]) > 10
    assert told["bars"] == [5, 5, 5, 1]  # and that of what is outside of epochs
    whole = told["before"][1]
    assert whole == pytest.approx((found.analysis.stop - found.analysis.start) / 1e9)
    start, stop = told["zoomed"]
    assert stop - start == pytest.approx(whole * 0.3679, rel=0.01)  # e to the -1
    assert told["dragged"][0] > start
    assert told["dragged"][1] - told["dragged"][0] == pytest.approx(stop - start)
    assert told["tip"].startswith("rank 0: loop at ")
    assert told["reset"] == told["before"]
    assert told["lines"] == "3"
    assert told["rows"] == ["3", "18"]
    assert told["chosen"] == ["9", "6", "2"]
    assert told["threads"] == 4
    own = found.analysis.ranks[2]
    wanted = [found.analysis.total, own.total, own.epochs[1]]
    for text, period in zip(told["seconds"], wanted, strict=True):
        seconds = period.categories[Category.compute].seconds
        assert float(text.split()[0]) == pytest.approx(seconds, rel=0.01)


@pytest.mark.slow
@needs_browser
def test_the_page_of_several_runs_in_light_and_dark(found, tmp_path):
    write_trace(tmp_path / "alone", replace(RUN, num_ranks=1).spans())
    page = tmp_path / "page.html"
    page.write_text(to_html([found, report(tmp_path / "alone")]))
    for dark in (False, True):
        picture = tmp_path / f"{dark}.png"
        assert screenshot(page, picture, dark=dark).console == []
        assert len({*colours_of(picture)}) > 50
        assert brightness_of(picture) < 90 if dark else brightness_of(picture) > 200
    assert browse(page, "--dump-dom").dom.count("<polyline") == 1


@pytest.mark.slow
@needs_browser
def test_a_category_has_one_colour_in_all_charts(tmp_path):
    moved = [Category.read, Category.exchange, Category.copy, Category.halo, Category.all_reduce]
    made = [Made(each, i, i + 1, nbytes=100, epoch=0) for i, each in enumerate(moved)]
    made += [Made(Category.read, 9, 10, nbytes=100, epoch=0, tier=Tier.file)]
    write_trace(tmp_path, [made])
    page = tmp_path / "page.html"
    page.write_text(report(tmp_path).to_html())
    dom = browse(page, "--dump-dom").dom
    found = dict(map(reversed, re.findall(r'data-colour="(#\w+)"></span>([\w -]+)', dom)))
    names = ["read", "read from file", "exchange", "copy", "halo", "all-reduce"]
    assert found == {each: COLOURS[each.split()[0].replace("-", "_")] for each in names}


@pytest.mark.slow
@needs_browser
def test_an_error_of_the_script_would_be_seen(found, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(found.to_html().replace('"use strict";', "nothing.at.all;"))
    assert any("nothing is not defined" in each for each in browse(page, "--dump-dom").console)
