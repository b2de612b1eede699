"""What only a GPU can show: real fp16 with its loss scale, bf16, offloading from a device, memory on it."""

import json
import math

import pytest
from conftest import launch, launcher
from test_curves import SHARD_ALL, WORKER, one_nan_skips_the_update
from test_runs import scalars

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    entries = {}
    for dtype in ("fp32", "fp16", "bf16"):
        for stage in range(4):
            entries[f"{dtype} ZeRO-{stage}"] = {"zero_stage": stage, "dtype": dtype}
        entries[f"{dtype} ZeRO-3 sharded"] = {"zero_stage": 3, "dtype": dtype, "json_changes": SHARD_ALL}
        entries[f"{dtype} checkpointing"] = {"dtype": dtype, "gradient_checkpointing": True}
        for stage in (1, 2, 3):
            entries[f"{dtype} offload {stage}"] = {"zero_stage": stage, "dtype": dtype, "offload": "optimizer"}
        entries[f"{dtype} offload all"] = {"zero_stage": 3, "dtype": dtype, "offload": "all"}
    result = launch(*launcher(1, "deepspeed"), WORKER, json.dumps(entries), cwd=tmp_path_factory.mktemp("gpu"))
    line = next(line for line in result.ok().out.splitlines() if line.startswith("curves: "))
    return json.loads(line.removeprefix("curves: "))


def test_curves_agree(curves):
    """fp32 to 1e-4 at every stage; 16 bits to their rounding. The first fp16 updates may be skipped."""
    reference = curves["fp32 ZeRO-1"]["losses"]
    for name, curve in curves.items():
        assert curve["losses"][0] == pytest.approx(math.log(1024), rel=0.01), name
        if "fp32" in name:
            assert curve["losses"] == pytest.approx(reference, abs=1e-4), name
        elif "bf16" in name:
            assert curve["losses"] == pytest.approx(reference, rel=0.01), name
        else:
            assert curve["losses"][-1] < curve["losses"][0] - 0.3, name
            if "ZeRO-0" not in name:  # there DeepSpeed starts the loss scale higher, and skips more
                assert curve["losses"] == pytest.approx(curves["fp16 ZeRO-1"]["losses"], rel=0.01), name


def test_overflows_are_skipped_and_the_scale_comes_down(train, tmp_path, ds_json):
    """From an absurd scale: updates are skipped while it halves, then the model learns; TensorBoard has it all."""
    path = ds_json({"fp16.initial_scale_power": 30})
    result = train(deepspeed_config=path, model="nano", max_steps=40, num_samples=2048).ok()
    scales, skipped = ([int(line[i]) for line in result.lines] for i in (7, 8))
    assert skipped[0] == 1 and scales[0] == 2**29 and skipped[-1] == skipped[-20] < 20
    assert scales[-1] == 2 ** (30 - skipped[-1]) and result.losses[40] < 5
    scale = [value for _, value in scalars(tmp_path / "runs/gpt2/tensorboard")["Train/Samples/loss_scale"]]
    assert scale[0] == 2**29 and scale[-1] == scales[-1]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_not_finite_never_reach_the_weights(gpt2, tmp_path, dtype, stage):
    one_nan_skips_the_update(gpt2, tmp_path, dtype, stage)


@pytest.mark.parametrize("max_steps, skips", [(4, 4), (60, 50)])
def test_a_run_that_applies_no_update_is_stopped(train, tmp_path, ds_json, max_steps, skips):
    """A static loss scale at which every gradient overflows: named, and no untrained model is left."""
    result = train(deepspeed_config=ds_json({"fp16.loss_scale": 2.0**60}), model="nano", max_steps=max_steps,
                   num_samples=2048)
    assert result.rc == 1 and f"update {skips}: {skips} updates in a row were skipped" in result.errors[0]
    assert f"update {skips} skipped: gradient norm" in result.out
    assert not (tmp_path / "runs/gpt2/model").exists() and not (tmp_path / "runs/gpt2/checkpoints").exists()


def test_memory_of_the_device_is_logged(train):
    result = train(model="nano").ok()
    assert {line[10] for line in result.lines} == {"mem"} and "GPU memory with the engine, GiB: allocated" in result.out
    assert all(0 < float(line[11]) <= float(line[12]) for line in result.lines)


def test_more_processes_than_gpus(train, gpt2):
    ranks = gpt2.torch.cuda.device_count() + 1
    result = train(ranks=ranks, kind="torchrun")
    assert result.rc != 0 and len(result.errors) == 1 and "start one process per GPU" in result.errors[0]


def test_default_run_fits_a_t4(train, tmp_path):
    """124M in fp16, as it ships: under 15 GiB, learning, and exported."""
    result = train("--num_samples", "1024", max_steps=None, num_samples=None, epochs=2, log_every=8).ok()
    assert max(float(line[12]) for line in result.lines) < 13
    assert min(result.losses.values()) < 7 and (tmp_path / "runs/gpt2/model/model.safetensors").is_file()


def test_a_stream_goes_on_where_it_was(train, tmp_path, prose):
    """The loader's process reads ahead, on a GPU: the position that counts is that of what was trained on."""
    (tmp_path / "text.txt").write_text(prose)
    options = {"data": "text.txt", "tokenizer": "byte", "model": "nano", "dtype": "fp32", "num_samples": None,
               "max_steps": 8}
    whole = train("--stream", output_dir="whole", **options).ok()
    parts = [train("--stream", "--resume", "auto", output_dir="parts", **options | extra).ok()
             for extra in ({"stop_after": 3}, {})]
    assert parts[0].losses | parts[1].losses == pytest.approx(whole.losses, abs=1e-3)


def test_quantized_weights_and_gradients_learn(train, ds_json):
    """ZeRO++ compiles and trains; on one GPU nothing travels, but it packs and unpacks all the same."""
    path = ds_json({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zero_quantized_weights": True,
                                          "stage3_param_persistence_threshold": 0}})
    options = {"model": "nano", "dtype": "bf16", "max_steps": 20, "num_samples": 1024}
    plain, quantized = train(zero_stage=3, **options).ok(), train(deepspeed_config=path, **options).ok()
    assert quantized.losses[20] < quantized.losses[1] - 1
    assert quantized.losses[20] == pytest.approx(plain.losses[20], rel=0.05) and quantized.losses != plain.losses
