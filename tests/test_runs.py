"""Whole runs of the script, in real processes: through each launcher, to their files, and to their ends."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import SCRIPT, clean_environment, launch


def scalars(folder):
    """`{tag: [(x, value)]}` of the event files in `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def text(tmp_path_factory, prose):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(prose)
    return path


# The ways in

@pytest.mark.parametrize("kind, ranks", [("python", 1), ("deepspeed", 1), ("deepspeed", 2), ("torchrun", 2)])
def test_launchers(train, tmp_path, kind, ranks):
    result = train(kind=kind, ranks=ranks).ok()
    assert f"\n{ranks} process(es)" in result.out and result.out.count("process(es) on") == 1
    assert sorted(result.losses) == [1, 2, 3, 4]
    assert result.losses[1] == pytest.approx(math.log(1024), rel=0.01)
    assert f"x {ranks} (processes) = {32 * ranks} samples" in result.out
    assert {path.name for path in (tmp_path / "runs/gpt2").glob("[!.]*")} == {
        "checkpoints", "model", "tensorboard", "loss.png"}


def test_variables_that_are_set_are_left_alone(train):
    """A single process with a launcher's variables: with this MASTER_ADDR it cannot even start."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if os.geteuid() == 0:
        env["MASTER_ADDR"] = "192.0.2.1"  # root may bind port 1; no host has this address
    process = subprocess.Popen([sys.executable, SCRIPT, "--max_steps", "1"], env=clean_environment() | env,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    time.sleep(20)
    process.kill()
    assert "step" not in process.communicate()[0]


def test_srun_without_a_launcher(tmp_path):
    """The variables of two SLURM tasks on this host: the processes find each other, without mpi4py."""
    assert importlib.util.find_spec("mpi4py") is None
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "0",
              "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid())}
    processes = [subprocess.Popen(
        [sys.executable, SCRIPT, "--max_steps", "4", "--num_samples", "256", "--log_every", "1"], cwd=tmp_path,
        env=clean_environment() | common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(2)]
    out, other = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], out + other
    assert "2 process(es) on cpu" in out and "x 2 (processes) = 64 samples" in out and "| step 4/4 |" in out
    assert "step" not in other  # rank 0 alone speaks


def test_names_of_slurm_hosts(gpt2, monkeypatch):
    """The first host of a list, short or long, is where the processes meet; a batch script alone is one process."""
    met = {}
    monkeypatch.setattr(gpt2.deepspeed, "init_distributed", lambda **_: met.update(os.environ))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for nodes, first in (("gpu[03-07,11],big1", "gpu03"), ("n1,n2", "n1"), ("node-a", "node-a"), ("c1-[1,4]", "c1-1")):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "")  # so that it is as before afterwards
            monkeypatch.delenv(name)
        for name, value in {"STEP_NUM_TASKS": "8", "STEP_NODELIST": nodes, "PROCID": "5", "LOCALID": "1", "JOB_ID": "77",
                            "STEP_TASKS_PER_NODE": "4(x2)"}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        gpt2.init_distributed()
        assert (met["MASTER_ADDR"], met["MASTER_PORT"], met["RANK"], met["LOCAL_RANK"], met["WORLD_SIZE"],
                met["LOCAL_WORLD_SIZE"]) == (first, "20077", "5", "1", "8", "4")


def test_a_taken_port_is_named(train):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = train(env={"MASTER_PORT": port})
    assert result.rc == 2 and len(result.errors) == 1 and "Traceback" not in result.err
    assert f"127.0.0.1:{port}" in result.errors[0] and "another --master_port" in result.errors[0]


def test_nothing_is_compiled_by_default(train, tmp_path):
    """No compiler, no ninja, no nvcc on the PATH, and an empty folder for extensions stays empty."""
    tools, extensions = tmp_path / "bin", tmp_path / "extensions"
    tools.mkdir(), extensions.mkdir()
    env = {"PATH": str(tools), "CC": "/bin/false", "CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(extensions)}
    result = train(env=env).ok()
    assert len(result.losses) == 4 and not list(extensions.iterdir())


def test_what_must_be_compiled_and_cannot_is_said_at_once(train, tmp_path, ds_json):
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    env = {"CC": "/bin/false", "CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(extensions)}
    path = ds_json({"optimizer.params": {"lr": 1e-3}, "zero_optimization.stage": 2})
    result = train(env=env, deepspeed_config=path, offload="optimizer")
    assert result.rc == 2 and len(result.errors) == 1 and "Traceback" not in result.err
    assert 'set optimizer.params "torch_adam": true, or install a compiler' in result.errors[0]
    assert "DeepSpeed compiles an op now" in result.out  # said first, and before data and model
    assert "training samples" not in result.out
    result = train("--compile", env=env | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert result.rc == 2 and len(result.errors) == 1 and "--compile needs a C++ compiler" in result.errors[0]


def test_import_has_no_side_effects(tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import os; before = dict(os.environ)\n"
            "import train_gpt2_deepspeed as gpt2, torch\n"
            "assert not torch.distributed.is_initialized() and 'engine' not in vars(gpt2)\n"
            "assert 'RANK' not in os.environ, os.environ['RANK']")
    launch(sys.executable, "-c", code, cwd=tmp_path).ok()
    assert not list(tmp_path.iterdir())


# What a run leaves

def test_event_files_hold_what_the_log_says(train, tmp_path):
    result = train(eval_every=2).ok()
    events = scalars(tmp_path / "runs/gpt2/tensorboard")
    assert {step: value for step, value in events["Train/Samples/train_loss"]} == pytest.approx(
        {32 * step: loss for step, loss in result.losses.items()}, abs=1e-4)
    for tag in ("lr", "tokens_per_second", "peak_memory_gib"):
        assert [x for x, _ in events[f"Train/Samples/{tag}"]] == [32, 64, 96, 128], tag
    assert [x for x, _ in events["Eval/Samples/loss"]] == [0, 64, 128]


def test_other_monitors(train, tmp_path, ds_json):
    """CSV, and Weights & Biases without a network: both get the loss."""
    path = ds_json({"csv_monitor.enabled": True, "wandb.enabled": True, "tensorboard.enabled": False})
    train(deepspeed_config=path, env={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}, timeout=300).ok()
    rows = (tmp_path / "runs/gpt2/csv_monitor/Train_Samples_train_loss.csv").read_text().splitlines()
    assert len(rows) == 5 and float(rows[1].split(",")[1]) == pytest.approx(math.log(1024), rel=0.01)
    written = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert b"Train/Samples/train_loss" in written
    assert not (tmp_path / "runs/gpt2/tensorboard").exists()


def test_learning_rate_warms_up_and_comes_down(train):
    result = train(num_samples=2048, max_steps=60)
    rates = {int(line[2]): float(line[5]) for line in result.ok().lines}
    assert rates[1] == pytest.approx(0.05 * 1.5e-3, rel=0.01)  # the first update is not wasted
    assert max(rates, key=rates.get) in (20, 21) and max(rates.values()) == pytest.approx(1.5e-3, rel=0.01)
    assert rates[60] == pytest.approx(0.1 * 1.5e-3, rel=0.05)


def test_real_text_is_learned(train, text, tmp_path):
    """English bytes: the loss falls below 3.6 in 150 updates; the sample is text; the export has a tokenizer."""
    result = train(data=text, tokenizer="byte", max_steps=150, num_samples=None, log_every=10).ok()
    assert result.losses[1] == pytest.approx(math.log(384), rel=0.03) and result.losses[150] < 3.0
    held_out = [line for line in result.out.splitlines() if line.startswith("held out |")][-1]
    values = dict(part.split() for part in held_out.split(" | ")[2:])
    assert float(values["bits_per_byte"]) == pytest.approx(float(values["loss"]) / math.log(2), rel=0.01)
    assert float(values["perplexity"]) == pytest.approx(math.exp(float(values["loss"])), rel=0.001)
    writes = ("from transformers import AutoTokenizer, pipeline; t = AutoTokenizer.from_pretrained({0!r});"
              "out = pipeline('text-generation', model={0!r}, tokenizer=t)('The value of', max_new_tokens=40);"
              "print(out[0]['generated_text'])").format(str(tmp_path / "runs/gpt2/model"))
    written = launch(sys.executable, "-c", writes, cwd=tmp_path).ok().out
    assert written.startswith("The value of") and len(written) > 30


@pytest.mark.parametrize("stage, ranks, offload", [
    (0, 1, "none"), (1, 2, "optimizer"), (2, 2, "none"), (3, 2, "none"), (3, 2, "all")])
def test_export_is_what_was_trained(train, gpt2, tmp_path, stage, ranks, offload):
    """The exported model has the loss of the engine on the held-out samples, in plain transformers."""
    result = train(zero_stage=stage, ranks=ranks, offload=offload).ok()
    reported = float(result.out.split("held out, after: loss ")[1].split(",")[0])
    model = gpt2.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/gpt2/model").eval()
    assert model.lm_head.weight is model.transformer.wte.weight and model.config.use_cache
    _, held_out = gpt2.build_datasets(gpt2.Settings(num_samples=256), 128, 1024, None)
    ids = torch.stack([held_out[i]["input_ids"] for i in range(len(held_out))])
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(reported, abs=1e-4)


@pytest.mark.parametrize("stage, ranks", [(1, 1), (3, 2)])
def test_fine_tuning_starts_where_the_export_ended(train, tmp_path, stage, ranks):
    first = train(num_samples=1024, max_steps=40).ok()
    end = float(first.out.split("held out, after: loss ")[1].split(",")[0])
    tuned = train(model="runs/gpt2/model", output_dir="tuned", num_samples=1024, zero_stage=stage, ranks=ranks).ok()
    assert float(tuned.out.split("held out, before: loss ")[1].split(";")[0]) == pytest.approx(end, abs=1e-3)


def test_auto_resume_without_a_checkpoint_says_so(train):
    assert "resume: auto, starting fresh" in train(resume="auto").ok().out


def test_export_without_training(train, tmp_path):
    train(output_dir="a").ok()
    result = train(resume="a/checkpoints", stop_after=0, output_dir="b").ok()
    assert not result.losses and (tmp_path / "b/model/model.safetensors").is_file()
    a, b = (tmp_path / name / "model/model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_only_the_newest_checkpoints_stay(train, tmp_path):
    train(max_steps=6, save_every=1, keep_checkpoints=3).ok()
    folder = tmp_path / "runs/gpt2/checkpoints"
    assert sorted(path.name for path in folder.glob("global_step*")) == [f"global_step{n}" for n in (4, 5, 6)]
    assert (folder / "latest").read_text() == "global_step6"
    fresh = train(max_steps=6, stop_after=4, keep_checkpoints=1).ok()  # a fresh run into the same folder
    assert "the checkpoints of an earlier run in runs/gpt2/checkpoints will give way" in fresh.out
    assert [path.name for path in folder.glob("global_step*")] == ["global_step4"]
    assert "continuing after update 4" in train(max_steps=6, resume="auto").ok().out


# What cannot work

@pytest.mark.parametrize("ranks, flags, says", [
    (1, ["--zero_stag", "2"], "did you mean --zero_stage?"), (2, ["--data", "none.txt"], "--data none.txt"),
    (1, ["--num_samples", "20"], "one update takes"), (2, ["--num_samples", "20"], "one update takes"),
    (1, ["--deepspeed_config", "none.json"], "none.json"), (1, ["--resume", "nowhere"], "--resume nowhere"),
    (1, ["--prompt", "Once"], "synthetic data are ids"), (1, ["--output_dir", "a_file/x"], "output_dir")])
def test_bad_input(train, tmp_path, ranks, flags, says):
    """Exit status 2, one line, no traceback, and nothing written; the same on one rank and on two."""
    (tmp_path / "a_file").touch()
    result = train(*flags, ranks=ranks, kind="deepspeed" if ranks == 2 else "python",
                   **({"num_samples": None} if "--num_samples" in flags else {}))
    assert result.rc == 2, result.err[-3000:]
    assert len(result.errors) == 1 and says in result.errors[0] and "Traceback" not in result.err
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("a_file", ".lock")]
    assert not left


def test_bad_text(train, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1") * 9000)
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    (tmp_path / "folder").mkdir()
    for name, says in (("empty.txt", "ValueError: empty"), ("latin.txt", "utf-8"), ("other.jsonl", "'text'"),
                       ("folder", "folder"), ("no/such/hub/name", "no/such/hub/name")):
        result = train(data=name, tokenizer="byte", num_samples=None)
        assert result.rc == 2 and len(result.errors) == 1, result.err[-3000:]
        assert says in result.errors[0], result.errors


def test_a_model_without_its_tokenizer_on_text(train, text):
    train(output_dir="a").ok()
    result = train(model="a/model", data=text)
    assert result.rc == 2 and "--tokenizer" in result.errors[0]
    assert importlib.util.find_spec("comet_ml") is None  # test_config relies on it


def test_samples_longer_than_gpt2s(train, tmp_path):
    """From scratch, positions are made as long as is asked; the export has them."""
    train(seq_len=2048, max_steps=2, micro_batch=1, grad_accum=1, num_samples=8).ok()
    assert json.loads((tmp_path / "runs/gpt2/model/config.json").read_text())["n_positions"] == 2048
