"""What python/README.md shows runs as it is written."""

import pathlib
import re
import subprocess
import sys


def test_example_of_the_readme_runs():
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loss = float(re.search(r"loss ([\d.]+)", done.stdout).group(1))
    assert loss < 1.0, done.stdout
