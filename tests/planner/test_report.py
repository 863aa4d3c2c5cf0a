import json
import re

import pytest

import hyperslab as hs
from hyperslab.planner.curves import draw_curves
from hyperslab.planner.page import to_html
from hyperslab.planner.report import rows_of, to_dict, to_text
from hyperslab.testing.browser import CHROMIUM, brightness_of, browse, colours_of, screenshot


@pytest.fixture(scope="module")
def found():
    return hs.plan("cosmoflow-256", gpus=8, batch=2, machine="lassen")


def test_the_answer_comes_first(found):
    first, empty, header, *_ = str(found).splitlines()
    best = found.best
    assert first.startswith("cosmoflow-256, 2 samples a step, trains fastest on 8 x NVIDIA V100")
    assert f"with {best}: " in first
    assert f"{best.step_seconds * 1e3:.3g} ms a step" in first
    assert empty == ""
    assert header.split()[:3] == ["mesh", "step", "samples/s"]
    axes = ", ".join(f"{axis}={size}" for axis, size in best.mesh.items())
    assert f"  mesh = hs.init({axes})" in to_text(found)


def test_meshes_that_only_cut_other_dims_are_one_row(found):
    rows = rows_of(found, 1000)
    assert sum(1 + alike for _, alike in rows) == len(found.candidates)
    kinds = [(*each.cut.sizes[:2], *sorted(each.cut.sizes[2:])) for each, _ in rows]
    assert len(rows) < len(found.candidates)
    assert rows[0][0] is found.best
    assert kinds[0] == (*found.best.cut.sizes[:2], *sorted(found.best.cut.sizes[2:]))


def test_json_has_all_that_a_program_needs(found):
    read = json.loads(json.dumps(to_dict(found, 3)))
    assert read["best"] == read["candidates"][0]
    assert len(read["candidates"]) == 3
    for each, candidate in zip(read["candidates"], found.candidates, strict=False):
        assert each["mesh"] == candidate.mesh
        assert each["step_seconds"] == candidate.step_seconds == sum(each["seconds"].values())
        assert each["memory_bytes"] == pytest.approx(sum(each["memory"].values()))
        assert len(each["layers"]) == len(found.job.network.layers)
    layer = read["best"]["layers"][0]
    assert (layer["module"], layer["operator"]) == ("features.0.conv", "conv3d")
    assert {"forward_seconds", "backward_seconds", "exposed_seconds"} <= layer.keys()


def test_json_without_an_answer():
    found = hs.plan("cosmoflow-512", gpus=1, batch=64, machine="lassen")
    read = to_dict(found)
    assert read["best"] is None
    assert read["candidates"] == []
    assert read["infeasible"][0]["why"].startswith("lacks ")
    assert read["answer"].startswith("No partition of cosmoflow-512")


def test_curves_are_a_picture(found, tmp_path):
    draw_curves(found, tmp_path / "curves.png")
    assert len({*colours_of(tmp_path / "curves.png")}) > 20


def test_the_page_needs_nothing_but_itself(found):
    page = to_html(found)
    assert found.sentence in page
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page)
    assert page.count("<svg") == 2
    assert page.count("<tr>") == 2 + len(rows_of(found, 8)) + len(found.job.network.layers)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_in_a_browser_in_light_and_dark(found, tmp_path):
    page = tmp_path / "plan.html"
    page.write_text(to_html(found))
    for dark in (False, True):
        picture = tmp_path / f"{dark}.png"
        assert screenshot(page, picture, dark=dark).console == []
        assert len({*colours_of(picture)}) > 50
        assert brightness_of(picture) < 80 if dark else brightness_of(picture) > 200
    dom = browse(page, "--dump-dom").dom
    assert dom.count("<polyline") == 4
    assert dom.count("</tr>") == to_html(found).count("</tr>")
