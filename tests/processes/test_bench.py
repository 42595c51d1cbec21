"""The arithmetic and the tables of the benchmarks, on made-up measurements."""

import re
from pathlib import Path

import first_step
import measures
import numpy as np
import pytest
import report
import sections

ROOT = Path(__file__).resolve().parents[2]


def of(times, **figures):
    return {"label": "", "seconds": times, "start": [100.0], "peak": [150.0], **figures}


def tables(section, **contenders):
    """The rows of both tables of a section, without their headings."""
    section, results = sections.all_sections()[section], {"contenders": contenders}
    both = report.contender_table, report.target_table
    return [table(section, results)[1:] for table in both]


def test_contenders_use_public_names_only():
    """They run in processes of their own, far from any test, and outlive changes of the package."""
    files = (ROOT / "benchmarks").glob("*.py")
    assert [path.name for path in files if re.search(r"macrobatch\._[a-z]", path.read_text())] == []


def test_a_ratio_is_of_times_of_the_same_round():
    # The machine was ten times slower in the second round: the ratio does not see it.
    assert measures.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == (2.0, 2.0, 2.0)


def test_the_floor_is_the_faster_of_its_forms():
    found = {"floor, loop": of([3.0]), "floor, unrolled": of([2.0]), "ours": of([3.0])}
    assert measures.time_ratio({"contenders": found}, "ours", "floor").median == 1.5


def test_the_line_of_a_line_has_no_residual():
    sizes = np.array([32, 64, 4096])
    a, b, residual = measures.line(sizes, 0.5 + 0.01 * sizes)
    assert (a, b) == (pytest.approx(0.5), pytest.approx(0.01))
    assert residual == pytest.approx(0, abs=1e-9)
    assert measures.line([1, 2, 3], [1, 2, 4])[2] > 0.05


def test_a_difference_is_a_part_of_the_distance_moved():
    before, expected = np.zeros(2), np.array([3.0, 4.0])
    assert measures.difference(np.array([3.0, 4.5]), expected, before) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("at_least", "value", "verdict"),
    [
        (False, 1.21, "**MISSED** by 0.11 x"),
        (True, 1.2, "met"),
        (True, 0.55, "**MISSED** by 0.55 x"),
    ],
)
def test_a_verdict_says_by_how_much(at_least, value, verdict):
    target = sections.Target("", lambda results: value, 1.1, at_least)
    assert report.verdict(target, value) == verdict


def test_a_failed_contender_keeps_its_row_and_loses_no_other():
    failed = {"label": "plain", "failed": "ValueError: no"}
    rows, targets = tables("embedding", plain=failed, macrobatch=of([1.0]), keras=of([2.0]))
    assert rows[0][:2] == ["plain", "failed: ValueError: no"]
    assert [row[1] for row in rows[1:]] == ["1000", "2000"]
    verdicts = {row[0]: row[2:] for row in targets}
    assert verdicts["speed against Keras' accumulation"][1] == "met"
    assert verdicts["extra memory over plain: Keras"][0] == "a contender failed"


def first_step_tables(again=0, share=0.05):
    """Tables of the first step: what plain Keras does takes 1 or 2 seconds."""
    contenders = {}
    for name in first_step.contenders():
        is_plain = name.endswith(first_step.PLAIN)
        seconds = (1.0 if "mobilenet" in name else 2.0) * (1.0 if is_plain else 1.5)
        counts = {"traces": [2 if is_plain else 1], "graphs again": [0 if is_plain else again]}
        counts["share of the trial"] = [0.0 if is_plain else share]
        contenders[name] = of([seconds], **counts)
    return tables("first-step", **contenders)


def test_a_first_step_is_compared_with_the_plain_one_of_its_model():
    rows, targets = first_step_tables()
    assert {row[2].split()[0]: tuple(row[3:]) for row in rows} == {
        "1.00": ("2", "0"),
        "1.50": ("1", "0"),
    }
    missed = [text for text, *_, verdict in targets if verdict == "**MISSED** by 0.25 x"]
    assert len(missed) == 8
    assert not any("sequence_axis" in text for text in missed)


@pytest.mark.parametrize(("share", "verdict"), [(0.08, "met"), (0.13, "**MISSED** by 0.030")])
def test_the_trial_takes_a_small_part_of_a_first_step(share, verdict):
    _, targets = first_step_tables(share=share)
    assert [row[3] for row in targets if "the trial" in row[0]] == [verdict] * 5


@pytest.mark.parametrize(("again", "verdict"), [(0, "met"), (2, "**MISSED** by 2")])
def test_a_second_call_must_make_no_graph(again, verdict):
    _, (*_, row) = first_step_tables(again)
    assert row[1:] == ["at most 0", str(again), verdict]


def test_the_least_of_a_whole_first_fit_counts():
    plain = {"label": "", "fit": [9.0, 2.0], "evaluate": [1.0]}
    ours = {**plain, "fit": [9.0, 3.0]}
    names = [f"mobilenet: {way}" for way in (first_step.PLAIN, first_step.OURS)]
    names.append(f"transformer: {first_step.OURS}")  # whose plain contender is missing
    rows, targets = tables("first-fit", **dict(zip(names, (plain, ours, ours))))
    assert [row[1:] for row in rows] == [
        ["2.00", "1.00", "1.00", "1.00"],
        ["3.00", "1.50", "1.00", "1.00"],
        ["3.00", "-", "1.00", "-"],
    ]
    assert [row[2] for row in targets[:2]] == ["1.50 x", "1.00 x"]


def test_batches_of_a_tiny_model_are_timed_together():
    names = sections.all_sections()["tiny"].contenders
    times = {name: of([0.15 if "macrobatch" in name else 0.1]) for name in names}
    _, targets = tables("tiny", **times)
    measured = [row[2].split(" (")[0] for row in targets]
    assert measured == ["1.50 x", "1.50 ms", "1.00 ms"] * 2


def test_traces_and_graphs_are_counted_where_there_are_some():
    import keras
    import tensorflow as tf
    from first_step_contenders import noted

    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    function = tf.function(lambda x: 2 * x)
    traces, graphs = [], []
    with noted(type(model), "call") as calls:
        for _ in range(2):
            model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
            traces.append(len(calls))
    with noted(tf.__internal__.FuncGraph, "__init__") as made:
        for x in (tf.zeros(2), tf.ones(2), tf.zeros(3)):
            function(x)
            graphs.append(len(made))
    assert 0 < traces[0] == traces[1]
    assert graphs == [1, 1, 2]


def test_tables_go_between_their_markers_only():
    page = (
        "<!-- bench:cnn -->\nold\n<!-- /bench -->\nb\n<!-- bench:mlp -->\nkept\n<!-- /bench -->\n"
    )
    written = report.with_tables(page, {"cnn": "new"})
    assert "old" not in written
    assert "<!-- bench:cnn -->\n\nnew\n\n<!-- /bench -->\nb\n" in written
    assert "kept" in written
    assert report.with_tables(written, {"cnn": "new"}) == written


def test_every_section_has_a_place_in_the_documentation():
    page = (ROOT / "docs" / "performance.md").read_text()
    assert all(f"<!-- bench:{name} -->" in page for name in sections.all_sections())
