"""Kill a run again and again, which saves after every update, and go on each time: nothing may be lost.

    python tests/kills.py 30
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import SCRIPT, clean_environment, launcher


def start(cwd, *flags, kind="python", ranks=1):
    """A running process of the script, with its output to read."""
    command = [*launcher(ranks, kind), SCRIPT, "--num_samples", 256, "--log_every", 1, *flags]
    return subprocess.Popen([str(part) for part in command], cwd=cwd, env=clean_environment(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_and_resume(cwd, times):
    """kill -9 at random moments. Each run must go on from the newest whole checkpoint of the one before."""
    folder, whole, moment = Path(cwd, "runs/gpt2/checkpoints"), 0, random.Random(times)
    for number in range(times):
        process = start(cwd, "--max_steps", 100000, "--save_every", 1, "--resume", "auto")
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "continuing after update" in line:
                assert int(line.split()[-1]) == whole, (line, whole)
            if "| step" in line and "epoch" in line:
                break
        else:
            raise AssertionError("".join(lines))
        assert not whole or any("continuing after update" in line for line in lines)
        time.sleep(moment.uniform(0.0, 2.0))
        process.kill()
        process.wait()
        left = sorted(path.name for path in folder.iterdir())
        notes = [path for path in folder.glob("global_step*/run.json") if not path.parent.suffix]
        newest = max([int(path.parent.name.removeprefix("global_step")) for path in notes], default=0)
        assert newest >= whole, (newest, whole)
        print(f"kill {number + 1} of {times}: whole up to update {newest}; {', '.join(left)}", flush=True)
        whole = newest
    assert whole and json.loads((folder / f"global_step{whole}/run.json").read_text())["ranks"] == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        kill_and_resume(scratch, int(sys.argv[1]))
