"""What version 0.2.0 has saved restores, and training goes on as if nothing had been between.

`saved.py` says what there is in `data`.
"""

import shutil

import keras
import numpy as np
import pytest
import saved
from support import BACKEND, array, assert_same, variables

import macrobatch


@pytest.mark.skipif(BACKEND != "tensorflow", reason="GradientAccumulator needs TensorFlow")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_window(reduction, tmp_path):
    import tensorflow as tf

    other = saved.Window(reduction)
    other.add(0, saved.SAVED_AFTER)
    window = saved.Window(reduction)
    window.checkpoint.read(str(saved.DATA / reduction)).assert_consumed()
    expected = {"mean": [2, 8.0, 1], "sum": [2, 0.0, 1]}[reduction]
    for each in (other.accumulator, window.accumulator):
        assert [each.pending, each.total_weight, each.skipped] == expected
    # Names in checkpoints are a promise in both directions.
    path = other.checkpoint.write(str(tmp_path / "window"))
    assert tf.train.list_variables(path) == tf.train.list_variables(str(saved.DATA / reduction))
    before = [each.numpy() for each in other.variables]
    for each in (other, window):
        each.finish()
    for start, left, right in zip(before, other.variables, window.variables):
        assert np.abs(left - start).max() > 1e-3
        np.testing.assert_allclose(left, right, rtol=1e-10)


def test_a_training_that_was_interrupted(tmp_path):
    """Saved on TensorFlow: it goes on elsewhere, too."""
    uninterrupted, model = saved.model(), saved.model()
    history = saved.train(uninterrupted)["loss"]
    for variable in model.variables:
        variable.assign(variable * 0.0)
    shutil.copytree(saved.DATA / "backup", tmp_path / "backup")
    rest = saved.train(model, keras.callbacks.BackupAndRestore(tmp_path / "backup"))["loss"]
    np.testing.assert_allclose(rest, history[2:], rtol=1e-10)
    assert_same(uninterrupted, model)
    assert all(np.isfinite(array(each)).all() for each in variables(model))
    assert macrobatch.settings_of(model).micro_batch_size == 3
