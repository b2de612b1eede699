"""Several hosts, in real processes: two agents on this host, two network namespaces, and ranks that are lost."""

import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack

import psutil
import pytest
from conftest import LINE, SCRIPT, Result, clean_environment, launcher

FLAGS = ["--max_steps", 4, "--num_samples", 256, "--log_every", 1, "--dtype", "fp32"]


@pytest.fixture
def start():
    """Start a command in `cwd`: its process, which writes to the files `out` and `err` there. Killed at the end."""
    processes = []

    def run(command, cwd, **env):
        cwd.mkdir(exist_ok=True)
        with open(cwd / "out", "w") as out, open(cwd / "err", "w") as err:
            processes.append(subprocess.Popen([str(part) for part in command], cwd=cwd, stdout=out, stderr=err,
                                              env=clean_environment() | env))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            process.wait()


def finished(process, cwd, timeout):
    """The `Result` of a process of `start`, which must end in time."""
    process.wait(timeout)
    return Result(subprocess.CompletedProcess([], process.returncode, *((cwd / name).read_text() for name in ("out", "err"))))


def agent(port, address="127.0.0.1"):
    return ["torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d",
            "--rdzv_endpoint", f"{address}:{port}", SCRIPT]


def free_port():
    return launcher(1, "deepspeed")[-1]


@pytest.fixture
def hosts(tmp_path):
    """Commands that run a command on one of two hosts: namespaces with a name, an address and /etc/hosts of their own."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"gpt2{letter}{os.getpid() % 100000}" for letter in "ab"]  # interfaces have 15 letters at most
    (tmp_path / "etc_hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 {names[0]}\n10.77.0.2 {names[1]}\n")

    def ip(command):
        subprocess.run(["ip", *command.split()], check=True)

    with ExitStack() as ends:
        for name in names:
            ip(f"netns add {name}")
            ends.callback(ip, f"netns del {name}")
        ip(f"link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev {name}")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set {name} up")
        setup = f'mount --bind {tmp_path}/etc_hosts /etc/hosts; hostname $0; exec "$@"'
        yield [["ip", "netns", "exec", name, "unshare", "-u", "-m", "sh", "-c", setup, name] for name in names]


def both(start, tmp_path, commands, timeout=240, **env):
    """Run two commands, each with a folder and a cache of its own."""
    folders = [tmp_path / f"host{number}" for number in range(2)]
    processes = [start(command, folder, HF_HOME=str(folder / "cache"), **env)
                 for command, folder in zip(commands, folders)]
    return [finished(process, folder, timeout) for process, folder in zip(processes, folders)]


def test_two_agents_train_as_one_does(train, start, tmp_path):
    """Two agents end with 0 and the losses of one agent; one rank alone prints, and writes events; a checkpoint is left."""
    alone = train("--dtype", "fp32", ranks=2, output_dir="alone").ok()
    port, shared = free_port(), tmp_path / "shared"
    results = both(start, tmp_path, [agent(port) + FLAGS + ["--output_dir", shared]] * 2)
    first, other = sorted((result.ok() for result in results), key=lambda result: -len(result.out))
    assert first.losses == pytest.approx(alone.losses, abs=1e-4) and sorted(first.losses) == [1, 2, 3, 4]
    assert all("[WARNING]" in line for line in other.out.splitlines()), other.out  # DeepSpeed's, as it is imported
    assert len(list((shared / "tensorboard").glob("events*"))) == 1
    assert (shared / "checkpoints/latest").read_text() == "global_step4"


@pytest.mark.parametrize("kind", ["torchrun", "deepspeed"])
def test_two_hosts(start, hosts, tmp_path, prose, kind):
    """Two addresses, two caches, one output folder: rank 0 alone prints, and each host tokenizes for itself."""
    (tmp_path / "text.txt").write_text(prose)
    (tmp_path / "hostfile").write_text("10.77.0.1 slots=1\n10.77.0.2 slots=1\n")
    flags = [*FLAGS, "--output_dir", tmp_path / "shared", "--data", tmp_path / "text.txt", "--tokenizer", "byte"]
    commands = [host + (agent(29511, "10.77.0.1") if kind == "torchrun" else [
        "deepspeed", "--hostfile", tmp_path / "hostfile", "--no_ssh", "--node_rank", number, "--master_addr", "10.77.0.1",
        SCRIPT]) + flags for number, host in enumerate(hosts)]
    results = [result.ok() for result in both(start, tmp_path, commands)]
    assert sorted(len(result.losses) for result in results) == [0, 4]
    assert sum("2 process(es)" in result.out for result in results) == 1
    assert all(list((tmp_path / f"host{number}/cache").rglob("*.arrow")) for number in range(2))
    assert (tmp_path / "shared/model/model.safetensors").is_file()


@pytest.mark.parametrize("kind, ranks, victim", [("torchrun", 2, 0), ("deepspeed", 4, 2), ("agents", 2, 1)])
def test_a_lost_rank_ends_the_run(train, start, tmp_path, kind, ranks, victim):
    """kill -9 of a rank: all ends within a minute, with one line that names it alone, and --resume auto goes on."""
    port = free_port()
    flags = ["--max_steps", 5000, "--log_every", 1, "--save_every", 2, "--output_dir", tmp_path / "run"]
    commands = [agent(port) + flags] * 2 if kind == "agents" else [[*launcher(ranks, kind), SCRIPT, *flags]]
    folders = [tmp_path / f"host{number}" for number in range(len(commands))]
    processes = [start(command, folder) for command, folder in zip(commands, folders)]
    end = time.time() + 120
    while not any(len(LINE.findall((folder / "out").read_text())) > 4 for folder in folders):
        assert time.time() < end and all(process.poll() is None for process in processes)
        time.sleep(0.1)
    lost, *_ = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)
             if str(SCRIPT) in child.cmdline() and child.environ().get("RANK") == str(victim)]
    lost.kill()  # the processes that it started, if any, come after it
    results = [finished(process, folder, 60) for process, folder in zip(processes, folders)]
    assert all(result.rc for result in results)
    errors = [line for result in results for line in result.errors]
    assert len(errors) == 1 and f"lost rank {victim} (process {lost.pid}) (" in errors[0], errors
    assert not any(re.search(r"\[rank\d\]: Traceback", result.err) for result in results)
    resumed = train(output_dir=tmp_path / "run", stop_after=1, ranks=ranks,
                    resume="auto", max_steps=5000, num_samples=None)
    assert "resume: continuing after update" in resumed.ok().out


@pytest.mark.parametrize("other, says", [(None, "neither readable files"), ("", "empty"), ("short", "do not see the same")])
def test_other_data_on_one_host(start, tmp_path, prose, other, says):
    """A file that is missing, empty or different on one host ends both, and its line is said without a traceback."""
    for number, text in enumerate((prose, prose[:50000] if other == "short" else other)):
        (tmp_path / f"host{number}").mkdir()
        if text is not None:
            (tmp_path / f"host{number}/text.txt").write_text(text)
    flags = [*FLAGS, "--data", "text.txt", "--tokenizer", "byte", "--output_dir", tmp_path / "run"]
    ranked = ["torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--master_addr", "127.0.0.1", "--master_port", free_port()]
    results = both(start, tmp_path, [ranked + ["--node_rank", rank, SCRIPT] + flags for rank in range(2)], timeout=90)
    errors = [line for result in results for line in result.errors]
    assert all(result.rc for result in results) and any(says in line for line in errors), errors
    assert all(says in line or "lost" in line for line in errors), errors
    assert not any(re.search(r"\[rank\d\]: Traceback", result.err) for result in results)
