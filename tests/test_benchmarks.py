"""The benchmarks, for real but tiny: their rows, their arithmetic, and that throughput's peer is GPT-2."""

import json
import shutil
import statistics
import sys

import pytest
import torch
from conftest import ROOT, launch

BENCHMARK = ROOT / "tests/benchmarks/throughput.py"


def test_rows_medians_and_ratios(tmp_path):
    """All kinds of contenders train the same; one that cannot is a row that says so, not the end."""
    peers = ["plain", "tutorial", "tutorial+", "trainer", "trainer_ds"]
    if shutil.which("g++"):  # as torch.compile needs
        peers.append("nanogpt")
    result = launch(
        sys.executable, BENCHMARK, "--model", "nano", "--seq_len", 32, "--micro_batch", 4, "--grad_accum", 2,
        "--updates", 2, "--repeats", 1, "--dtype", "fp32", "--out", tmp_path / "out",
        "--contenders", ",".join(["limit", "ours", *peers]), "--ours", "",
        "--ours", "zero_stage=2 grad_accum=1", "--ours", "zero_stage=1 offload=x",
        cwd=tmp_path).ok()
    rows = {row["name"]: row for row in json.loads((tmp_path / "out/throughput.json").read_text())["rows"]}
    failed = rows.pop("ours zero_stage=1 offload=x")
    assert "offload" in failed["error"] and "ratio" not in failed
    assert list(rows) == ["limit", "ours", "ours zero_stage=2 grad_accum=1", *peers]
    for name, row in rows.items():
        assert row["error"] is None and len(row["repeats"]) == 1, (name, row)
        assert row["tokens_per_second"] == statistics.median(row["repeats"])
        assert row["ratio"] == pytest.approx(row["repeats"][0] / rows["ours"]["repeats"][0])
        assert row["of_limit"] == pytest.approx(row["tokens_per_second"] / rows["limit"]["tokens_per_second"])
        assert row["ms_per_update"] == pytest.approx(1e3 * row["tokens"] / row["tokens_per_second"])
        assert row["tflops"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
        assert 0 < row["startup_s"] < 120 and row["peak_gib"] > 0.1
        if name != "limit":
            assert row["tokens"] == (128 if "grad_accum" in name else 256)
            assert 6 < row["held_out_loss"] < 7.1, name
        assert name in result.out and name in (tmp_path / "out/throughput.md").read_text()


def test_the_peer_is_gpt2(gpt2):
    """With the same weights, the same loss and gradients as in transformers."""
    sys.path.insert(0, str(BENCHMARK.parent))
    from throughput import plain_loss

    config, _ = gpt2.gpt2_config(gpt2.Settings(model="nano", seq_len=64))
    model = gpt2.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(config.vocab_size, (3, 64))
    loss, reference = plain_loss(model, ids), model(input_ids=ids, labels=ids).loss
    assert loss.item() == pytest.approx(reference.item(), abs=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(one, list(model.parameters())) for one in (loss, reference))):
        torch.testing.assert_close(ours, theirs)


def test_scaling(tmp_path):
    """Curves of two processes equal that of one, also of a pipeline, and after a stop on other numbers of processes."""
    launch(sys.executable, ROOT / "tests/benchmarks/scaling.py", "--models", "nano:4", "--dtype", "fp32", "--num_samples",
           512, "--rows", "zero_stage=2", "pipeline_stages=2", "offload=x", "--out", tmp_path, cwd=tmp_path).ok()
    results = json.loads((tmp_path / "scaling.json").read_text())
    rows = results["models"]["nano"]
    assert "offload" in rows.pop("offload=x")["error"] and list(rows) == ["one process", "zero_stage=2", "pipeline_stages=2"]
    for name, row in rows.items():
        assert len(row["losses"]) == 4 and row["tokens_per_second"] > 0 and row["peak"] > 0.1
        assert name == "one process" or row["distance"] < 1e-3
    assert "all_reduce 4.15" in rows["zero_stage=2"]["sent"] and "send" in rows["pipeline_stages=2"]["sent"]
    resumed = results["resumed on one process and again on all"]
    assert resumed["distance"] < 1e-3 and resumed["sample"] == resumed["sample of the resumed run"]
    assert results["Ctrl-C"]["saved"] in ("global_step5", "global_step6") and results["Ctrl-C"]["seconds"] < 60
    assert "| nano zero_stage=2 |" in (tmp_path / "scaling.md").read_text()
