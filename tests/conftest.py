"""What the tests share: the script imported as a module, and real runs of it in processes of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt2_deepspeed.py"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the hub
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the launchers

LINE = re.compile(
    r"epoch (\d+)/(\d+) \| step +(\d+)/(\d+) \| loss (\S+) \| lr (\S+) \| norm +(\S+) \| scale (\d+)"
    r" \| skipped (\d+) \| ([\d,]+) tok/s \| (rss|mem) (\S+) GiB, peak (\S+) GiB \((\d+)%\)")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU (skipped without one)")


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Result:
    """What a finished run left: exit status, output, and the losses that it logged."""

    def __init__(self, process):
        self.rc, self.out, self.err = process.returncode, process.stdout, process.stderr
        self.lines = LINE.findall(self.out)
        self.losses = {int(line[2]): float(line[4]) for line in self.lines}
        self.errors = [line for line in self.err.splitlines() if line.startswith("error: ")]

    def ok(self):
        assert self.rc == 0, self.out[-3000:] + self.err[-5000:]
        return self


def clean_environment():
    """The environment without the process group of the tests themselves."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
           "TORCH_CUDA_ARCH_LIST")  # of which DeepSpeed cannot read all: "9.0a"
    return {name: value for name, value in os.environ.items() if name not in own}


def launch(*command, cwd, env=None, timeout=600):
    """Run a command to its end, in `cwd`, with all its processes killed if it takes too long."""
    command = [str(part) for part in command]
    process = subprocess.Popen(command, cwd=cwd, env=clean_environment() | (env or {}), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        pytest.fail(f"hung: {' '.join(command)}\n{out[-3000:]}\n{err[-3000:]}")
    return Result(subprocess.CompletedProcess(command, process.returncode, out, err))


def launcher(ranks=1, kind="python"):
    """The command that starts the script on so many ranks, at a port of its own."""
    port = get_free_port()
    return {"python": [sys.executable], "deepspeed": ["deepspeed", "--num_gpus", ranks, "--master_port", port],
            "torchrun": ["torchrun", "--standalone", "--nproc_per_node", ranks]}[kind]


@pytest.fixture
def train(tmp_path):
    """Run the script on the small model, by default for 4 updates: `train("--zero_stage", 3, ranks=2)`."""

    def run(*args, ranks=1, kind=None, cwd=tmp_path, timeout=600, env=None, **options):
        options = {"max_steps": 4, "num_samples": 256, "log_every": 1} | options
        flags = [part for name, value in options.items() if value is not None
                 for part in (f"--{name}", value)]
        kind = kind or ("python" if ranks == 1 else "torchrun")
        return launch(*launcher(ranks, kind), SCRIPT, *flags, *args, cwd=cwd, env=env, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def gpt2():
    """The script as a module, in a process group of its own (one process)."""
    import train_gpt2_deepspeed

    train_gpt2_deepspeed.init_distributed()
    return train_gpt2_deepspeed


@pytest.fixture(scope="session")
def prose():
    """465 kB of English that every Python brings along."""
    import pydoc_data.topics

    return "\n".join(pydoc_data.topics.topics.values())


@pytest.fixture
def ds_json(tmp_path):
    """Write ds_config.json with changes applied: `ds_json({"optimizer.params.lr": 1})`; None removes a key."""

    def write(changes, name="changed.json"):
        config = json.loads((ROOT / "ds_config.json").read_text())
        for path, value in changes.items():
            *parents, key = path.split(".")
            part = config
            for parent in parents:
                part = part.setdefault(parent, {})
            if value is None:
                part.pop(key, None)
            else:
                part[key] = value
        target = tmp_path / name
        target.write_text(json.dumps(config))
        return target

    return write


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a user has: the script, its JSON, requirements and README."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("train_gpt2_deepspeed.py", "ds_config.json", "requirements.txt", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder
