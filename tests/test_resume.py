"""Nothing is lost: exact resumption on any ranks and ZeRO stages, whole checkpoints only, one owner."""

import json
import math
import os
import re
import signal
import subprocess
import time

import kills
import psutil
import pytest
from conftest import SCRIPT, launch, launcher
from kills import start

WHOLE = {}


@pytest.fixture
def whole(train, ds_json):
    """The uninterrupted run. A weight decay of 10 shows whether a resumed run applies it to the same groups."""
    path = ds_json({"optimizer.params.weight_decay": 10})
    options = {"deepspeed_config": path, "max_steps": 10, "num_samples": 200, "micro_batch": 4, "save_every": 3,
               "dtype": "fp32"}
    if not WHOLE:  # once is enough
        WHOLE.update(train(**options, grad_accum=8, output_dir="whole").ok().losses)
    return options, WHOLE


@pytest.mark.parametrize("parts", [
    # (ranks, ZeRO stage, offload, stop after): an epoch has 6 updates, so 3 is in its middle and 6 at its end
    [(1, 1, "none", 3), (1, 1, "none", 3), (1, 1, "none", None)],
    [(1, 0, "none", 4), (2, 0, "none", None)],
    [(2, 2, "optimizer", 6), (2, 2, "none", None)],
    [(1, 1, "none", 3), (2, 3, "none", 3), (1, 2, "none", 2), (2, 1, "none", None)],
    [(2, 3, "all", 4), (1, 3, "none", 2), (2, 3, "none", None)]])
def test_the_curve_goes_on_as_if_nothing_had_happened(train, whole, parts):
    options, expected = whole
    losses = {}
    for ranks, stage, offload, stop in parts:
        accumulate = {"grad_accum": 8 // ranks} if not losses else {}  # afterwards it follows the ranks
        result = train(**options, **accumulate, resume="auto", stop_after=stop, zero_stage=stage, offload=offload,
                       ranks=ranks).ok()
        assert not set(result.losses) & set(losses)  # nothing twice
        losses |= result.losses
    assert losses == pytest.approx(expected, abs=2e-4)


def test_a_new_rate_and_precision_hold_from_the_first_update(train, tmp_path):
    """From the checkpoint that was saved last, whatever time a copy of the files bears."""
    options = {"max_steps": 8, "num_samples": 256, "save_every": 2}
    before = train(**options, stop_after=4, dtype="fp32").ok()
    os.utime(tmp_path / "runs/gpt2/checkpoints/global_step2/run.json", (2e9, 2e9))
    plain = train(**options, resume="auto", dtype="fp32", stop_after=1, output_dir="runs/gpt2").ok()
    assert "continuing after update 4" in plain.out
    after = train(**options, resume="runs/gpt2/checkpoints/global_step4", dtype="bf16", lr=1e-5, output_dir="b").ok()
    assert "converting from 1 rank(s) at ZeRO-1" in after.out
    assert float(after.lines[0][5]) < 1.01e-5 < float(before.lines[-1][5])
    assert after.losses[5] == pytest.approx(plain.losses[5], rel=0.01)


@pytest.mark.parametrize("harm", ["truncated", "missing", "flipped"])
def test_a_damaged_checkpoint_is_passed_over(train, tmp_path, harm):
    train(max_steps=4, save_every=1, stop_after=3).ok()
    folder = tmp_path / "runs/gpt2/checkpoints/global_step3"
    file = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if harm == "flipped" else content[:-1000])
    result = train(max_steps=4, resume="auto").ok()
    assert "global_step3 is not whole" in result.out and "continuing after update 2" in result.out
    refused = train(max_steps=4, resume=str(folder), output_dir="other")  # it alone, and nothing else
    assert refused.rc == 2 and "no whole checkpoint there" in refused.errors[0]


def test_another_training_is_refused(train, tmp_path):
    train().ok()
    before = sorted(path.name for path in (tmp_path / "runs/gpt2/checkpoints").iterdir())
    for options, says in (
            ({"seq_len": 64}, "the seq_len there is 128, that of this run 64"), ({"seed": 5}, "the seed there is 1234"),
            ({"num_samples": 300}, "the number of samples there is [256, 13], that of this run [300, 15]"),
            ({"eval_fraction": 0.1}, "the number of samples there is [256, 13]"),
            ({"micro_batch": 5}, "an update of 32 samples does not divide"),
            ({"zero_stage": 0}, "cannot convert ZeRO stage 1 to 0")):
        result = train(resume="auto", **options)
        assert result.rc == 2 and len(result.errors) == 1 and says in result.errors[0]
        assert sorted(path.name for path in (tmp_path / "runs/gpt2/checkpoints").iterdir()) == before


def test_one_owner(train, tmp_path):
    """The second run into a folder is told who has it; a lock that a killed run left is no obstacle."""
    first = start(tmp_path, "--max_steps", "1000")
    next(line for line in first.stdout if "| step    1/" in line)
    second = train()
    first.kill()
    first.wait()
    assert second.rc == 2 and f"in use by process {first.pid} on " in second.errors[0]
    train().ok()


def test_killed_at_any_moment(tmp_path):
    """kill -9 while a checkpoint is saved after every update; `python tests/kills.py` does it 30 times."""
    kills.kill_and_resume(tmp_path, times=3)


# Signals

@pytest.mark.parametrize("kind, ranks, target, number, rc", [
    ("python", 1, "rank", signal.SIGINT, {130}), ("python", 1, "rank", signal.SIGTERM, {143}),
    ("python", 1, "rank", signal.SIGUSR1, {143}),  # the warning of a batch system
    ("deepspeed", 2, "rank", signal.SIGINT, {130}), ("torchrun", 2, "rank", signal.SIGTERM, {1}),  # one of the two
    ("deepspeed", 2, "launcher", signal.SIGTERM, {-15}), ("torchrun", 2, "launcher", signal.SIGTERM, {1})])
def test_a_signal_ends_the_run_after_a_checkpoint(tmp_path, kind, ranks, target, number, rc):
    """Sent to one rank, all agree to stop; sent to the launcher, the ranks hear of it."""
    process, out = start(tmp_path, "--max_steps", "1000", kind=kind, ranks=ranks), []
    for line in process.stdout:
        out.append(line)
        if "| step    3/" in line:
            children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)
                        if str(SCRIPT) in child.cmdline() and "launch" not in str(child.cmdline())]
            os.kill(process.pid if target == "launcher" or ranks == 1 else max(children), number)
    out = "".join(out)  # up to the end of the last process that could write to it
    assert process.wait() in rc, out
    name = "SIGTERM" if target == "launcher" else signal.Signals(number).name
    assert f"stopped by {name} and saved" in out and "Traceback (most recent" not in out.split("stopped by")[0]
    step = int((tmp_path / "runs/gpt2/checkpoints/latest").read_text().removeprefix("global_step"))
    assert 3 <= step < 30 and not (tmp_path / "runs/gpt2/model").exists()


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    process = start(tmp_path, "--max_steps", "100", "--num_samples", "16384", "--grad_accum", "2000")  # a minute each
    next(line for line in process.stdout if "sample before" in line)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode not in (0, 130) and not (tmp_path / "runs/gpt2/checkpoints").exists()


# Disks

def test_a_full_disk_is_noticed_before_a_save(train, tmp_path):
    """A tmpfs of 30 MB takes three checkpoints of 8.7 MB. With fewer to keep, the run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        options = {"output_dir": disk / "run", "max_steps": 6, "save_every": 1, "dtype": "fp32"}
        result = train(**options, keep_checkpoints=5)
        assert result.rc == 1 and len(result.errors) == 1 and "Traceback" not in result.err
        assert "a checkpoint takes 8 MiB, and the disk has less" in result.errors[0]
        assert len(list(disk.glob("run/checkpoints/global_step*"))) == 3
        assert "continuing after update 3" in train(**options, keep_checkpoints=2, resume="auto").ok().out
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_during_a_save_costs_no_earlier_checkpoint(train, tmp_path, ranks):
    """A limit on the size of files fails in the middle of a write, just as a full disk does."""
    train(stop_after=1, ranks=ranks).ok()
    kind = launcher(ranks, "python" if ranks == 1 else "torchrun")
    result = launch("bash", "-c", 'ulimit -f 1500; exec "$@"', "bash", *kind, SCRIPT, "--max_steps", 4, "--num_samples",
                    256, "--resume", "auto", "--save_every", 1, cwd=tmp_path)
    assert result.rc == 1 and "global_step2.part: cannot be written" in result.errors[0], result.err[-3000:]
    assert "Traceback" not in result.err.split("ChildFailedError")[0].split("error: ")[0]
    folder = tmp_path / "runs/gpt2/checkpoints"
    assert [path.name for path in folder.glob("global_step*")] == ["global_step1"]
    assert "continuing after update 1" in train(resume="auto", ranks=ranks).ok().out


# Sick training

@pytest.mark.parametrize("ranks, stage", [(1, 0), (1, 1), (2, 3)])
def test_weights_that_are_not_finite_are_named_and_never_saved(train, tmp_path, ranks, stage):
    """A NaN is put into the weights of a checkpoint, with its checksums right."""
    import torch

    options = {"ranks": ranks, "zero_stage": stage, "save_every": 1}
    train(stop_after=2, **options).ok()
    folder = tmp_path / "runs/gpt2/checkpoints/global_step2"

    def poison(value):
        if torch.is_tensor(value) and value.is_floating_point() and value.numel() > 1000:
            value.data.view(-1)[:] = math.nan
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            poison(part)

    for file in folder.glob("*.pt"):
        content = torch.load(file, weights_only=False)
        poison(content)
        torch.save(content, file)
    note = json.loads((folder / "run.json").read_text())
    note["files"] = {name: (folder / name).stat().st_size for name in note["files"]}
    (folder / "run.json").write_text(json.dumps(note))
    result = train(resume="auto", **options)
    assert result.rc == 1 and "Traceback" not in result.err.split("ChildFailedError")[0].split("error: ")[0]
    assert "update 2: the held-out loss is nan" in result.errors[0]
    assert {path.name for path in folder.parent.glob("global_step*")} == {"global_step1", "global_step2"}


@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 1)])
def test_a_loss_that_is_not_finite_is_named(train, tmp_path, ranks, stage):
    """A rate that is far too high: whatever breaks first, loss, gradient or weights, no checkpoint has it."""
    result = train(ranks=ranks, zero_stage=stage, lr=1e30, max_steps=60, num_samples=2048, save_every=1)
    assert result.rc == 1 and "Traceback" not in result.err.split("error: ")[0]
    assert re.search(r"error: update \d+(, rank \d)?: .*(loss scale \d+|held-out loss is nan)", result.errors[0]), result.err
    for note in (tmp_path / "runs/gpt2/checkpoints").glob("global_step*/run.json"):
        assert all(math.isfinite(loss) for _, loss in json.loads(note.read_text())["history"]["train"])


def test_a_finite_loss_does_not_hide_weights_that_are_not(gpt2, tmp_path):
    settings = gpt2.Settings(model="nano", output_dir=str(tmp_path), zero_stage=0)
    ds_config = gpt2.load_ds_config(settings)
    engine = gpt2.build_engine(gpt2.build_model(gpt2.gpt2_config(settings)[0], settings, ds_config), ds_config, 10)
    loss = gpt2.torch.tensor(2.5)
    assert gpt2.mean_loss(engine, loss, saving=True) == 2.5
    with gpt2.torch.no_grad():
        next(engine.module.parameters())[0, 0] = math.inf
    assert gpt2.mean_loss(engine, loss, saving=False) == 2.5
    with pytest.raises(SystemExit) as stop:
        gpt2.mean_loss(engine, loss, saving=True)
    assert stop.value.code == 1
    engine.destroy()
