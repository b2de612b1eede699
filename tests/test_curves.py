"""One model, one seed, one order of the data: the loss curve must not depend on how it is computed."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from conftest import launch

WORKER = Path(__file__).with_name("curves.py")
ZERO = {f"ZeRO-{stage}": {"zero_stage": stage} for stage in range(4)}
# Without it no parameter of so small a model is sharded, and ZeRO-3 is not tested at all.
SHARD_ALL = {"stage3_param_persistence_threshold": 0}


def curves(command, entries, cwd):
    result = launch(*command, WORKER, json.dumps(entries), cwd=cwd).ok()
    line = next(line for line in result.out.splitlines() if line.startswith("curves: "))
    return json.loads(line.removeprefix("curves: "))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    entries = ZERO | {
        "ZeRO-3, all sharded": {"zero_stage": 3, "json_changes": SHARD_ALL},
        "gradient checkpointing": {"zero_stage": 2, "gradient_checkpointing": True},
        "ZeRO-3, gradient checkpointing": {
            "zero_stage": 3, "json_changes": SHARD_ALL, "gradient_checkpointing": True},
        "ZeRO-1, optimizer offload": {"zero_stage": 1, "offload": "optimizer"},
        "ZeRO-2, optimizer offload": {"zero_stage": 2, "offload": "optimizer"},
        "ZeRO-3, all offloaded": {"zero_stage": 3, "offload": "all", "json_changes": SHARD_ALL},
        "other accumulation": {"micro_batch": 2, "grad_accum": 4},
        "bf16": {"dtype": "bf16"}, "ZeRO-3, bf16": {"dtype": "bf16", "zero_stage": 3}}
    return curves(("torchrun", "--standalone", "--nproc_per_node", 2), entries, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    entries = {"one rank": {"micro_batch": 8}} | {
        f"one rank, {name}": entry | {"micro_batch": 8} for name, entry in ZERO.items()}
    if shutil.which("g++"):
        entries["one rank, compiled"] = {"micro_batch": 8, "compile": True}
    return curves([sys.executable], entries, tmp_path_factory.mktemp("one"))


def test_curves_agree_in_fp32(two_ranks, one_rank):
    """Over 12 updates and the evaluation after them, on one rank and on two."""
    reference = one_rank["one rank"]["losses"]
    assert reference[-1] < reference[0] - 0.5  # a curve worth comparing
    for name, curve in (two_ranks | one_rank).items():
        if "bf16" not in name:
            assert curve["losses"] == pytest.approx(reference, abs=1e-4), name


def test_curves_agree_in_bf16(two_ranks):
    reference = two_ranks["ZeRO-1"]["losses"]
    for name in ("bf16", "ZeRO-3, bf16"):
        assert two_ranks[name]["losses"] == pytest.approx(reference, rel=0.01), name


def test_first_loss_is_that_of_a_model_that_knows_nothing(two_ranks, one_rank):
    for name, curve in (two_ranks | one_rank).items():
        assert curve["losses"][0] == pytest.approx(math.log(1024), rel=0.01), name


def test_samples_agree(two_ranks, one_rank):
    """Generation, with every rank taking part: the same tokens at every stage."""
    reference = one_rank["one rank"]["sample"]
    for name, curve in (two_ranks | one_rank).items():
        if "bf16" not in name:
            assert curve["sample"] == reference, name


LADDER = [6.9576, 6.9425, 6.7838, 6.5960, 6.5486, 6.3467, 6.3645, 6.2826, 6.1149, 6.1153, 6.2999, 6.2024,
          6.1126]


def test_ladder(one_rank):
    """The losses of a fixed run, against stored ones: a change that moves them is noticed."""
    assert one_rank["one rank"]["losses"] == pytest.approx(LADDER, rel=0.05)


def one_nan_skips_the_update(gpt2, tmp_path, dtype, stage):
    """The check that `start_engine` leaves to the norm: one NaN in one micro-batch skips the whole update."""
    settings = gpt2.Settings(model="nano", dtype=dtype, zero_stage=stage, output_dir=str(tmp_path), grad_accum=2)
    ds_config = gpt2.load_ds_config(settings)
    config, _ = gpt2.gpt2_config(settings)
    engine = gpt2.build_engine(gpt2.build_model(config, settings, ds_config), ds_config, 10)
    ids = gpt2.torch.randint(0, 1024, (2, 128), device=engine.device)
    for _ in range(8):  # past the first overflows of fp16
        gpt2.train_step(engine, [{"input_ids": ids}] * 2)
    weights = lambda: {name: gpt2.deepspeed.utils.safe_get_full_fp32_param(p).clone()  # noqa: E731
                       for name, p in engine.module.named_parameters()}
    before, skipped = weights(), engine.skipped_steps
    for factor in (1.0, math.nan):
        loss = gpt2.language_model_loss(engine, ids) * factor
        engine.backward(loss)
        engine.step()
    assert engine.skipped_steps == skipped + 1
    assert all((before[name] == value).all() for name, value in weights().items())
    gpt2.train_step(engine, [{"input_ids": ids}] * 2)
    assert engine.skipped_steps == skipped + 1 and all(v.isfinite().all() for v in weights().values())
    engine.destroy()
    gpt2.unset_hf_deepspeed_config()  # later models of this process are ordinary ones


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_not_finite_never_reach_the_weights(gpt2, tmp_path, dtype, stage):
    one_nan_skips_the_update(gpt2, tmp_path, dtype, stage)
