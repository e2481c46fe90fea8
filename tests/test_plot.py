"""Curves of runs: what is drawn, and that the report needs no other file."""

import json
import math
import re
import struct
import sys
import xml.etree.ElementTree as ET

import pytest

from fdel import cli, plot

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(tmp_path):
    for name, scale in (("first", 1.0), ("second", 2.0)):
        rows = [{"step": i, "loss": scale / i, "grad_norm": scale, "note": "x"} for i in range(1, 11)]
        rows[4]["loss"] = math.nan
        rows[9]["eval_loss"] = scale / 4
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 11, "lo')
    return [tmp_path / "first", tmp_path / "second"]


def test_both_files_are_written_and_need_no_other(runs, tmp_path, capsys):
    out = tmp_path / "new" / "curves"
    assert cli.main(["plot", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.split() == [f"{out}.html", f"{out}.png"]
    png = (out.parent / "curves.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", png[16:24])) > 300
    page = (out.parent / "curves.html").read_text()
    assert re.findall(r"https?://[^\s\"<]+", page) == ["http://www.w3.org/2000/svg"] * 3  # a namespace, not a link
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(|\s(href|src)=", page)
    assert re.findall(r'font-size="14">([^<]*)<', page) == ["loss", "eval_loss", "grad_norm"]
    assert "<td>second</td><td>10</td><td>0.2</td><td>0.2</td><td>2</td>" in page


def test_curves_are_where_their_numbers_are(runs):
    curves = plot.read(runs, ["loss"])
    assert list(curves) == ["loss"] and list(curves["loss"]) == ["first", "second"]
    assert curves["loss"]["first"] == [(i, 1.0 / i) for i in range(1, 11) if i != 5]  # NaN is a gap
    root = ET.fromstring(plot.svg("loss <1>", curves["loss"]))
    lines = [
        [tuple(map(float, p.split(","))) for p in e.attrib["points"].split()] for e in root.findall(f"{SVG}polyline")
    ]
    (x0, y0), (x1, y1) = lines[1][0], lines[0][-1]  # the highest point, 2 at step 1, and the lowest, 0.1 at step 10
    assert (x0, y0, x1, y1) == (64, 36, 624, 288)
    for line, scale in zip(lines, (1.0, 2.0), strict=True):
        for (x, y), step in zip(line, [1, 2, 3, 4, 6, 7, 8, 9, 10], strict=True):
            assert abs(x - (64 + 560 * (step - 1) / 9)) < 0.06
            assert abs(y - (288 - 252 * (scale / step - 0.1) / 1.9)) < 0.06
    assert root.findall(f"{SVG}text")[0].text == "loss <1>"


def test_one_file_of_one_metric(runs, tmp_path):
    out = tmp_path / "only.html"
    assert cli.main(["plot", str(runs[0] / "metrics.jsonl"), "--out", str(out), "--metric", "grad_norm"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "only.html", "second"]
    assert out.read_text().count("<svg") == 1 and "<title>first</title>" in out.read_text()


def test_a_run_of_samples_shows_the_last_ones(runs, tmp_path):
    """With their rewards, as text and nothing else; curves of samples come first."""
    for name in (
        "clip_ratio/region_mean",
        "frac_reward_zero_std",
        "reward",
        "kl",
        "entropy",
        "completions/mean_length",
        "cispo_clip_ratio",
        "objective/kl",
        "eval_reward",
    ):
        with (runs[0] / "metrics.jsonl").open("a") as f:
            f.write("\n" + json.dumps({"step": 11, name: 0.5}))
    line = lambda step, said, reward: {"step": step, "task": 1, "prompt": "2 <b>+</b> 2?", "completion": said,
        "finish": "stop", "reward": reward, "rewards": {"exact": reward, "<x>": None}}  # fmt: skip
    lines = [line(3, "old", 0.0), line(5, "<script>alert(1)</script>\nfour & more", 1.0), line(5, "f" * 5000, 0.25)]
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (runs[0] / "completions.jsonl").write_text(text + '{"step": 5, "comp')
    out = tmp_path / "page.html"
    assert cli.main(["plot", *map(str, runs), "--out", str(out)]) == 0
    page = out.read_text()
    titles = re.findall(r'font-size="14">([^<]*)<', page)
    assert titles[: 1 + len(plot.SAMPLED)] == [*plot.SAMPLED, "loss"]
    found = page[page.index("<h1>first</h1>") :]
    assert "Completions, step 5" in found and "old" not in found and found.count("<h1>") == 1 and "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\nfour &amp; more" in found and "2 &lt;b&gt;+&lt;/b&gt; 2?" in found
    assert "<th>reward</th><th>exact</th><th>&lt;x&gt;</th><th>finish</th>" in found and "f" * 4001 not in found
    assert "<tr><td>0.25</td><td>0.25</td><td></td>" in found
    (runs[0] / "completions.jsonl").write_text("[1]\n{}\n" + '{"rewards": [1], "reward": "a"}\n')
    assert len(plot.completions(runs[0] / "metrics.jsonl")) == 2 and "the last ones" in plot.table(
        plot.completions(runs[0])
    )


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    other = tmp_path / "elsewhere" / "first"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    assert list(plot.read([runs[0], other])["loss"]) == [str(runs[0]), str(other)]


def test_long_curves_are_thinned(tmp_path):
    points = [(i, float(i)) for i in range(100_000)]
    root = ET.fromstring(plot.svg("loss", {"a": points}))
    assert len(root[-1].attrib["points"].split()) == 2000


@pytest.mark.parametrize(
    "low,high,want",
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3, 7, [-2, 0, 2, 4, 6]),
        (1e-5, 9e-5, [2e-5, 4e-5, 6e-5, 8e-5]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round(low, high, want):
    assert plot.ticks(low, high) == pytest.approx(want)


@pytest.mark.parametrize(
    "arguments,message",
    [(["--metric", "lss"], "no run has lss; there are eval_loss, grad_norm, loss"), (["nowhere"], "nowhere")],
)
def test_what_is_not_there_is_named(runs, capsys, arguments, message):
    assert cli.main(["plot", str(runs[0]), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_page_is_still_written(runs, tmp_path, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plot", str(runs[0]), "--out", str(tmp_path / "c")]) == 2
    assert "pip install 'fdel[plot]'" in capsys.readouterr().err and (tmp_path / "c.html").exists()
