"""What travels between processes, counted: with and without compression of the gradients."""

import re

import pytest
import torch


def sent(result):
    """MiB by collective, as the run says after its first update."""
    line = next(line for line in result.ok().out.splitlines() if line.startswith("an update sends"))
    return {name: float(size) for name, size in re.findall(r"(\w+) ([\d.]+)", line.partition(": ")[2])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts on a CPU, over gloo")
@pytest.mark.parametrize("stage, reduction", [(0, "all_reduce"), (1, "all_reduce"), (2, "all_reduce"),
                                              (3, "reduce_scatter_tensor")])
def test_gradients_take_half_the_bytes(train, gpt2, stage, reduction):
    """4 bytes per parameter without, 2 with it; the weights travel as they are; the curve is the same."""
    options = {"ranks": 2, "dtype": "fp32", "zero_stage": stage, "max_steps": 6}
    plain, packed = train(**options), train("--compress_gradients", **options)
    parameters = gpt2.AutoModelForCausalLM.from_config(gpt2.gpt2_config(gpt2.Settings(model="nano"))[0]).num_parameters()
    times = 4 if stage > 1 else 1  # once per micro-batch
    before, after = sent(plain), sent(packed)
    assert before[reduction] == pytest.approx(times * 4 * parameters / 2**20, abs=0.01)
    assert after[reduction] == pytest.approx(before[reduction] / 2, abs=0.01)
    assert {k: v for k, v in before.items() if k != reduction} == {k: v for k, v in after.items() if k != reduction}
    for step, loss in plain.losses.items():
        assert packed.losses[step] == pytest.approx(loss, abs=5e-3)
    assert packed.losses[6] < packed.losses[1] - 0.3


def test_one_process_has_nothing_to_send(train):
    result = train("--compress_gradients", max_steps=1).ok()
    assert "compress_gradients: nothing, since one process" in result.out and "an update sends" not in result.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="ZeRO++ takes it there")
@pytest.mark.parametrize("stage", [1, 3])
def test_16_bits_are_not_compressed_on_a_cpu(train, stage):
    result = train("--compress_gradients", ranks=2, dtype="bf16", zero_stage=stage)
    assert result.rc != 0 and len(result.errors) == 1 and "travel in 16 bits already" in result.errors[0]
