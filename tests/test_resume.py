"""Nothing is lost: exact resumption on any ranks and ZeRO stages, whole checkpoints only, one owner."""

import json
import os
import random
import subprocess
import time

import pytest
from conftest import SCRIPT, clean_environment, launcher


@pytest.fixture
def whole(train, ds_json):
    """The uninterrupted run. A weight decay of 10 shows whether a resumed run applies it to the same groups."""
    path = ds_json({"optimizer.params.weight_decay": 10})
    options = {"deepspeed_config": path, "max_steps": 10, "num_samples": 200, "micro_batch": 4, "save_every": 3}
    return options, train(**options, grad_accum=8, output_dir="whole").ok().losses


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


@pytest.mark.parametrize("options, says", [
    ({"seq_len": 64}, "the seq_len there is 128, that of this run 64"), ({"seed": 5}, "the seed there is 1234"),
    ({"num_samples": 300}, "the num_samples there is 256"), ({"micro_batch": 5}, "an update of 32 samples does not divide"),
    ({"zero_stage": 0}, "cannot convert ZeRO stage 1 to 0")])
def test_another_training_is_refused(train, tmp_path, options, says):
    train().ok()
    before = sorted(path.name for path in (tmp_path / "runs/gpt2/checkpoints").iterdir())
    result = train(resume="auto", **options)
    assert result.rc == 2 and len(result.errors) == 1 and says in result.errors[0]
    assert sorted(path.name for path in (tmp_path / "runs/gpt2/checkpoints").iterdir()) == before


def start(cwd, *flags):
    command = [*launcher(), SCRIPT, "--num_samples", "256", "--log_every", "1", *flags]
    return subprocess.Popen([str(part) for part in command], cwd=cwd, env=clean_environment(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_one_owner(train, tmp_path):
    """The second run into a folder is told who has it; a lock that a killed run left is no obstacle."""
    first = start(tmp_path, "--max_steps", "1000")
    next(line for line in first.stdout if "| step    1/" in line)
    second = train()
    first.kill()
    first.wait()
    assert second.rc == 2 and f"in use by process {first.pid} on " in second.errors[0]
    train().ok()


def test_killed_at_any_moment(tmp_path, times=4):
    """kill -9 while a checkpoint is saved after every update: the next run goes on from the last whole one."""
    reached, moment = 0, random.Random(1)
    for _ in range(times):
        process = start(tmp_path, "--max_steps", "4000", "--save_every", "1", "--resume", "auto")
        for line in process.stdout:
            if "continuing after update" in line:
                assert int(line.split()[-1]) >= reached
            if "| step" in line and "epoch" in line:
                break
        time.sleep(moment.uniform(0.2, 1.5))
        process.kill()
        process.wait()
        folder = tmp_path / "runs/gpt2/checkpoints"
        steps = [int(path.parent.name[11:]) for path in folder.glob("global_step*/run.json") if not path.parent.suffix]
        assert max(steps) >= reached
        reached = max(steps)
    assert reached > times and json.loads((folder / f"global_step{reached}/run.json").read_text())["ranks"] == 1
    assert os.path.isfile(folder / "latest")
