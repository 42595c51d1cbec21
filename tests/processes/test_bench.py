"""The arithmetic and the tables of the benchmarks, on made-up measurements."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])


def results(**seconds):
    contenders = {
        name: {"label": name, "seconds": times, "start": [100.0], "peak": [150.0]}
        for name, times in seconds.items()
    }
    return {"contenders": contenders}


def test_contenders_use_public_names_only():
    """They run in processes of their own, far from any test, and outlive changes of the package."""
    files = FOLDER.glob("*.py")
    assert [path.name for path in files if re.search(r"macrobatch\._[a-z]", path.read_text())] == []


def test_a_ratio_is_of_times_of_the_same_round():
    import measures

    # The machine was ten times slower in the second round: the ratio does not see it.
    assert measures.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == (2.0, 2.0, 2.0)


def test_the_floor_is_the_faster_of_its_forms():
    import measures

    found = results(
        **{"floor, loop": [3.0, 3.0], "floor, unrolled": [2.0, 2.0], "ours": [3.0, 3.0]}
    )
    assert measures.time_ratio(found, "ours", "floor").median == 1.5


def test_the_line_of_a_line_has_no_residual():
    import measures

    sizes = np.array([32, 64, 4096])
    a, b, residual = measures.line(sizes, 0.5 + 0.01 * sizes)
    assert (a, b) == (pytest.approx(0.5), pytest.approx(0.01))
    assert residual == pytest.approx(0, abs=1e-9)
    assert measures.line([1, 2, 3], [1, 2, 4])[2] > 0.05


def test_a_difference_is_a_part_of_the_distance_moved():
    import measures

    before, expected = np.zeros(2), np.array([3.0, 4.0])
    assert measures.difference(np.array([3.0, 4.5]), expected, before) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("at_least", "value", "verdict"),
    [
        (False, 1.09, "met"),
        (False, 1.21, "**MISSED** by 0.11 x"),
        (True, 1.2, "met"),
        (True, 0.55, "**MISSED** by 0.55 x"),
    ],
)
def test_a_verdict_says_by_how_much(at_least, value, verdict):
    import report
    import sections

    target = sections.Target("", lambda results: value, 1.1, at_least)
    assert report.verdict(target, value) == verdict


def test_a_failed_contender_keeps_its_row_and_loses_no_other():
    import report
    import sections

    section = sections.all_sections()["embedding"]
    found = results(plain=[1.0], macrobatch=[1.0], keras=[2.0])
    found["contenders"]["plain"] = {"label": "plain", "failed": "ValueError: no"}
    rows = report.contender_table(section, found)
    assert rows[1][:2] == ["plain", "failed: ValueError: no"]
    assert [row[0] for row in rows[2:]] == ["macrobatch", "keras"]
    verdicts = {row[0]: row[2:] for row in report.target_table(section, found)}
    assert verdicts["speed against Keras' accumulation"][1] == "met"
    assert verdicts["extra memory over plain: Keras"][0] == "a contender failed"


def first_step_results(again=0, share=0.05):
    """Times of all contenders of the first step: what plain Keras does takes 1 or 2 seconds."""
    import first_step

    contenders = {}
    for name in first_step.contenders():
        is_plain = name.endswith(first_step.PLAIN)
        seconds = (1.0 if "mobilenet" in name else 2.0) * (1.0 if is_plain else 1.5)
        counts = {"traces": [2 if is_plain else 1], "graphs again": [0 if is_plain else again]}
        counts["share of the trial"] = [0.0 if is_plain else share]
        contenders[name] = {"label": name, "seconds": [seconds], **counts}
    return {"contenders": contenders}


def test_a_first_step_is_compared_with_the_plain_one_of_its_model():
    import report
    import sections

    section = sections.all_sections()["first-step"]
    _, *rows = report.contender_table(section, first_step_results())
    assert {row[2].split()[0] for row in rows if row[0].endswith(": plain Keras")} == {"1.00"}
    assert {row[2].split()[0] for row in rows if ": macrobatch" in row[0]} == {"1.50"}
    assert {tuple(row[3:]) for row in rows} == {("2", "0"), ("1", "0")}
    verdicts = {row[0]: row[3] for row in report.target_table(section, first_step_results())}
    missed = [text for text, verdict in verdicts.items() if verdict == "**MISSED** by 0.25 x"]
    assert len(missed) == 8
    assert not any("sequence_axis" in text for text in missed)


@pytest.mark.parametrize(("share", "verdict"), [(0.08, "met"), (0.13, "**MISSED** by 0.030")])
def test_the_trial_takes_a_small_part_of_a_first_step(share, verdict):
    import report
    import sections

    section = sections.all_sections()["first-step"]
    rows = report.target_table(section, first_step_results(share=share))
    verdicts = [row[3] for row in rows if "the trial" in row[0]]
    assert verdicts == [verdict] * 5


@pytest.mark.parametrize(("again", "verdict"), [(0, "met"), (2, "**MISSED** by 2")])
def test_a_second_call_must_make_no_graph(again, verdict):
    import report
    import sections

    section = sections.all_sections()["first-step"]
    *_, row = report.target_table(section, first_step_results(again))
    assert row[1:] == ["at most 0", str(again), verdict]


def test_the_least_of_a_whole_first_fit_counts():
    import report
    import sections

    section = sections.all_sections()["first-fit"]
    contenders = {
        name: {"label": name, "fit": [9.0, 3.0 if "macrobatch" in name else 2.0], "evaluate": [1.0]}
        for name in section.contenders
    }
    contenders["transformer: plain Keras"] = {"label": "transformer", "failed": "ValueError: no"}
    rows = report.contender_table(section, {"contenders": contenders})
    assert rows[1][1:] == ["2.00", "1.00", "1.00", "1.00"]
    assert rows[2][1:] == ["3.00", "1.50", "1.00", "1.00"]
    assert rows[4][1:] == ["3.00", "-", "1.00", "-"]
    targets = report.target_table(section, {"contenders": contenders})
    assert [row[2] for row in targets[1:3]] == ["1.50 x", "1.00 x"]


def test_batches_of_a_tiny_model_are_timed_together():
    import report
    import sections

    section = sections.all_sections()["tiny"]
    found = results(
        **{name: [0.15 if "macrobatch" in name else 0.1] for name in section.contenders}
    )
    rows = report.target_table(section, found)
    measured = {row[2].split(" (")[0] for row in rows if "macrobatch over plain" in row[0]}
    assert measured == {"1.50 x"}
    assert {row[2].split(" (")[0] for row in rows if "of a batch" in row[0]} == {
        "1.50 ms",
        "1.00 ms",
    }


def test_traces_and_graphs_are_counted_where_there_are_some():
    import first_step_contenders
    import keras
    import tensorflow as tf

    def fit(model, examples):
        model.fit(np.zeros((examples, 2)), np.zeros((examples, 1)), batch_size=4, verbose=0)

    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with first_step_contenders.noted(type(model), "call") as first:
        fit(model, 4)
    with first_step_contenders.noted(type(model), "call") as second:
        fit(model, 4)
    assert (len(first) > 0, len(second)) == (True, 0)

    function = tf.function(lambda x: 2 * x)
    counts = []
    for x in (tf.zeros(2), tf.ones(2), tf.zeros(3)):
        with first_step_contenders.noted(tf.__internal__.FuncGraph, "__init__") as graphs:
            function(x)
        counts.append(len(graphs))
    assert counts == [1, 0, 1]


def test_tables_go_between_their_markers_only():
    import report

    page = (
        "<!-- bench:cnn -->\nold\n<!-- /bench -->\nb\n<!-- bench:mlp -->\nkept\n<!-- /bench -->\n"
    )
    written = report.with_tables(page, {"cnn": "new"})
    assert "old" not in written
    assert "<!-- bench:cnn -->\n\nnew\n\n<!-- /bench -->\nb\n" in written
    assert "kept" in written
    assert report.with_tables(written, {"cnn": "new"}) == written


def test_every_section_has_a_place_in_the_documentation():
    import sections

    page = (FOLDER.parent / "docs" / "performance.md").read_text()
    assert all(f"<!-- bench:{name} -->" in page for name in sections.all_sections())
