"""The throughput benchmark, for real but tiny: its rows, its arithmetic, and that its peer is GPT-2."""

import json
import statistics
import sys

import pytest
import torch
from conftest import ROOT, launch

BENCHMARK = ROOT / "tests/benchmarks/throughput.py"


def test_rows_medians_and_ratios(tmp_path):
    """All kinds of contenders train the same; one that cannot is a row that says so, not the end."""
    result = launch(
        sys.executable, BENCHMARK, "--model", "nano", "--seq_len", 32, "--micro_batch", 4, "--grad_accum", 2,
        "--updates", 2, "--repeats", 1, "--dtype", "fp32", "--out", tmp_path / "out",
        "--contenders", "limit,ours,nanogpt,tutorial,trainer", "--ours", "",
        "--ours", "json.zero_optimization.stage=2,grad_accum=1", "--ours", "zero_stage=1,offload=x",
        cwd=tmp_path).ok()
    rows = {row["name"]: row for row in json.loads((tmp_path / "out/throughput.json").read_text())["rows"]}
    failed = rows.pop("ours zero_stage=1,offload=x")
    assert "offload" in failed["error"] and "ratio" not in failed
    assert list(rows) == ["limit", "ours", "ours json.zero_optimization.stage=2,grad_accum=1", "nanogpt",
                          "tutorial", "trainer"]
    for name, row in rows.items():
        assert row["error"] is None and len(row["repeats"]) == 1, (name, row)
        assert row["tokens_per_second"] == statistics.median(row["repeats"])
        assert row["ratio"] == pytest.approx(row["repeats"][0] / rows["ours"]["repeats"][0])
        assert row["of_limit"] == pytest.approx(row["tokens_per_second"] / rows["limit"]["tokens_per_second"])
        assert row["ms_per_update"] == pytest.approx(1e3 * row["tokens"] / row["tokens_per_second"])
        assert row["tflops"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
        assert 0 < row["startup_s"] < 120 and row["peak_gib"] > 0.1
        # Who waits must not disturb; the last one waits so shortly that its threads still wind down.
        assert row["idle_cpu"] < 0.1 or name == "trainer", name
        if name != "limit":
            assert row["tokens"] == (128 if "grad_accum" in name else 256)
            assert 6 < row["held_out_loss"] < 7.1, name
        assert name in result.out and name in (tmp_path / "out/throughput.md").read_text()


def test_the_peer_is_gpt2(gpt2):
    """As many parameters and, with the same weights, the same loss and gradient as in transformers."""
    sys.path.insert(0, str(BENCHMARK.parent))
    from throughput import PlainGPT

    config, _ = gpt2.gpt2_config(gpt2.Settings(model="nano", seq_len=64))
    theirs = gpt2.AutoModelForCausalLM.from_config(config)
    peer = PlainGPT(config.n_layer, config.n_head, config.n_embd, config.vocab_size, 64)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in theirs.parameters())
    names = {"transformer.": "", "wte": "tokens", "wpe": "positions", "h.": "blocks.", "ln_f": "norm",
             "ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up",
             "mlp.c_proj": "down"}
    pairs = {}
    for name, parameter in theirs.named_parameters():
        for old, new in names.items():
            name = name.replace(old, new)
        pairs[name] = parameter
    linear = ("qkv.weight", "out.weight", "up.weight", "down.weight")  # transformers keeps them transposed
    for name, parameter in peer.named_parameters():
        other = pairs.pop(name).detach()
        parameter.data.copy_(other.T if name.endswith(linear) else other)
    assert not pairs
    ids = torch.randint(config.vocab_size, (3, 64))
    loss, reference = peer(ids), theirs(input_ids=ids, labels=ids).loss
    assert loss.item() == pytest.approx(reference.item(), abs=1e-5)
    loss.backward()
    reference.backward()
    torch.testing.assert_close(peer.tokens.weight.grad, theirs.transformer.wte.weight.grad)
