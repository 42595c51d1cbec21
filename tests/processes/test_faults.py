"""Workers that are killed: after a restart, all ends as if nothing had happened."""

import os
import pickle
import subprocess
import sys

import numpy as np
from support import thorough
from test_workers import HERE, environment


def end_after(kills, folder):
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, os.path.join(HERE, "faults.py"), str(folder), str(kills)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    return run.stdout, pickle.loads((folder / "end.pickle").read_bytes())


KILLS = 10  # of a worker and of the chief by turns


@thorough
def test_killed_workers_end_as_if_nothing_had_happened(tmp_path):
    output, ours = end_after(KILLS, tmp_path / "killed")
    _, undisturbed = end_after(0, tmp_path / "undisturbed")
    assert "epoch-2." in output, "nothing was ever restored"
    assert len(ours) == len(undisturbed)
    for a, b in zip(ours, undisturbed):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
