"""GPT-2 as a pipeline: the curve, the gradients and the model of the plain run, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import launch
from test_curves import curves
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

WORKER = Path(__file__).with_name("pipeline_worker.py")
TWO, FOUR = (("torchrun", "--standalone", "--nproc_per_node", ranks) for ranks in (2, 4))
STAGES = {"pipeline_stages": 2, "grad_accum": 4}


def report(command, cwd):
    result = launch(*command, cwd=cwd).ok()
    line = next(line for line in result.out.splitlines() if line.startswith("pipeline: "))
    return json.loads(line.removeprefix("pipeline: "))


def test_the_curve_is_that_of_the_plain_run(tmp_path):
    """Losses, gradient norms, the loss on held-out data, and a sample: on 2 stages, and on 2 pipelines of 2."""
    plain, *others = (curves(command, entries, tmp_path) for command, entries in (
        (TWO, {"plain": {}, "two stages": STAGES, "gradient checkpointing": STAGES | {"gradient_checkpointing": True},
               "optimizer offload": STAGES | {"offload": "optimizer"}, "bf16": STAGES | {"dtype": "bf16"}}),
        (FOUR, {"two pipelines": {"pipeline_stages": 2}})))
    reference = plain.pop("plain")
    bf16 = plain.pop("bf16")
    assert reference["losses"][0] == pytest.approx(math.log(1024), rel=0.01)
    assert reference["losses"][-1] < reference["losses"][0] - 0.5
    for name, curve in (plain | others[0]).items():
        for part in ("losses", "norms"):
            assert curve[part] == pytest.approx(reference[part], abs=1e-4), (name, part)
        assert curve["sample"] == reference["sample"], name
    assert bf16["losses"] == pytest.approx(reference["losses"], rel=0.01)


def test_four_stages(tmp_path):
    """The stages in the middle take activations from one side and gradients from the other."""
    shape = GPT2Config(n_layer=4, n_head=2, n_embd=64, n_positions=64, vocab_size=512, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "four")
    options = {"model": str(tmp_path / "four"), "micro_batch": 2, "updates": 5}
    found = curves(FOUR, {"plain": options, "stages": options | {"pipeline_stages": 4, "grad_accum": 8}}, tmp_path)
    for part in ("losses", "norms"):
        assert found["stages"][part] == pytest.approx(found["plain"][part], abs=1e-4)


@pytest.mark.parametrize("command", [TWO, FOUR])
def test_gradients_memory_and_export(tmp_path, command):
    """One update by plain gradient descent, against the gradients of torch alone."""
    found = report((*command, WORKER, tmp_path), tmp_path)
    assert found["loss"][0] == pytest.approx(found["loss"][1], abs=1e-5)
    assert len(found["gradients"]) == 28 and max(found["gradients"].values()) < 1e-5
    assert found["copies"] == 0  # of the tied embedding, on the first and the last stage
    for logits, alive, stage in found["reports"]:
        assert alive == [stage == 0, stage == 1]  # the blocks of other stages are freed
        assert (logits is None) == (stage == 0) and (logits or 0) < 1e-5 * found["scale"]


def test_resume(train, tmp_path, ds_json):
    """On as many pipelines, then on more; the held-out loss is that of the export."""
    path = ds_json({"optimizer.params.weight_decay": 10})
    options = {"deepspeed_config": path, "max_steps": 7, "num_samples": 200, "pipeline_stages": 2, "kind": "deepspeed",
               "dtype": "fp32"}
    whole = train(**options, ranks=2, output_dir="whole").ok()
    losses = {}
    for ranks, stop in ((2, 2), (2, 1), (4, None)):
        result = train(**options, ranks=ranks, resume="auto", stop_after=stop).ok()
        assert not set(result.losses) & set(losses)
        losses |= result.losses
    assert losses == pytest.approx(whole.losses, abs=2e-4) and len(losses) == 7
    assert result.lines[-1][3] == "7" and float(result.lines[-1][6]) > 0  # the norm
    other = train(ranks=2, resume="auto", kind="deepspeed", max_steps=7, num_samples=200, dtype="fp32")
    assert other.rc == 2 and "the pipeline_stages there is 2, that of this run 1" in other.errors[0]

    import train_gpt2_deepspeed as gpt2

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/gpt2/model")
    held_out = gpt2.SyntheticTextDataset(10, 128, 1024, seed=1234, first=200)
    ids = torch.stack([held_out[index]["input_ids"] for index in range(10)])
    printed = float(result.out.split("held out, after: loss ")[1].split(",")[0])
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(printed, abs=2e-4)


@pytest.mark.parametrize("ranks, options, says", [
    (1, {"pipeline_stages": 2}, "--pipeline_stages 2: takes as many processes"),
    (2, {"pipeline_stages": 2, "zero_stage": 2}, "--pipeline_stages 2: DeepSpeed's pipeline needs ZeRO stage 1, not 2"),
    (2, {"pipeline_stages": 2, "zero_stage": 0}, "ZeRO stage 1, not 0: --zero_stage 1"),
    (3, {"pipeline_stages": 3}, "the model has 2")])
def test_refused(train, ranks, options, says):
    result = train(ranks=ranks, kind="python" if ranks == 1 else "deepspeed", **options)
    assert result.rc == 2 and says in result.errors[0] and not result.lines
    assert "Traceback" not in result.err
