"""The example runs as its help says, and its two lines lie on each other."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "finetune.py"


def test_finetune_draws_two_losses_that_are_one(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "losses.png"
    options = ["--steps", "5", "--length", "32", "--layers", "2", "--device", "cpu", "--picture", str(picture)]
    ran = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"loss \d\.\d+ to \d\.\d+, [\d,]+ tokens/s", ran.stdout)) == 2
    assert float(re.search(r"at most (\S+) apart", ran.stdout)[1]) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
