"""Settings and ds_config.json: what is filled in, what is replaced, and what is refused in one line."""

import json
import math

import pytest
import torch


@pytest.fixture
def refused(capsys):
    """Call a function that must raise UserError; return its one line."""

    def call(function, *args, **kwargs):
        with pytest.raises(SystemExit) as caught:
            function(*args, **kwargs)
        assert caught.value.code == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return call


def load(gpt2, path, **settings):
    return gpt2.load_ds_config(gpt2.Settings(deepspeed_config=str(path), **settings))


# Settings

def test_flags_with_dashes_and_underscores(gpt2):
    settings = gpt2.parse_settings(["x.py", "--zero-stage", "2", "--micro_batch=3", "--local_rank=0",
                                    "--data", __file__, "/etc/hostname", "--gradient_checkpointing"])
    data = [__file__, "/etc/hostname"]
    assert (settings.zero_stage, settings.micro_batch, settings.data) == (2, 3, data)
    assert settings.gradient_checkpointing and settings == gpt2.Settings(
        zero_stage=2, micro_batch=3, data=data, gradient_checkpointing=True)
    assert gpt2.Settings(data="openwebtext").data == ["openwebtext"]
    assert gpt2.Settings().data == ["synthetic"]


def test_the_arguments_of_a_kernel_are_not_ours(gpt2):
    for name in ("ipykernel_launcher.py", "colab_kernel_launcher.py"):
        assert gpt2.parse_settings([f"/somewhere/{name}", "-f", "kernel.json"]) == gpt2.Settings()


@pytest.mark.parametrize("flags, says", [
    (["--zero_stag", "2"], "did you mean --zero_stage?"), (["--epochs", "0"], "--epochs 0: must be at least 1"),
    (["--epochs", "two"], "--epochs"), (["--zero_stage", "4"], "zero"), (["--micro_batch", "-1"], "at least 1"),
    (["--seq_len", "1"], "at least 2"), (["--eval_fraction", "1"], "between 0 and 1"),
    (["--lr", "nan"], "positive"), (["--lr", "0"], "positive"), (["--offload", "disk"], "--offload disk"),
    (["--dtype", "int8"], "int8"), (["--log_every", "0"], "at least 1"), (["stray"], "stray"),
    (["--data", "none.txt"], "--data none.txt: no such file as none.txt"), (["--offload", "nvme:"], "--offload nvme:"),
    (["--data", __file__, "nosuch"], "no such file as nosuch"), (["--seed", "9" * 20], "below 2**63"),
    (["--plan", "--compare"], "--plan: either this or --compare"), (["--stream"], "give --data and --max_steps"),
    (["--resume", "nowhere"], "--resume nowhere: no checkpoint there"),
    (["--output_dir", "/dev/null/x"], "--output_dir /dev/null/x: cannot write to /dev/null")])
def test_bad_flags(gpt2, refused, flags, says):
    assert says in refused(gpt2.parse_settings, ["x.py", *flags])


# The JSON: what is filled in

def test_the_json_as_it_ships(gpt2):
    config = gpt2.load_ds_config(gpt2.Settings())
    assert config["train_micro_batch_size_per_gpu"] and config["gradient_accumulation_steps"]
    assert "train_batch_size" not in config
    assert "total_num_steps" not in config["scheduler"]["params"]  # the engine's to fill in
    assert config["tensorboard"]["output_path"] == "runs/gpt2"
    assert config["optimizer"]["params"]["torch_adam"] is True


def test_overrides(gpt2, ds_json):
    config = load(gpt2, ds_json({}), zero_stage=3, offload="all", dtype="bf16", micro_batch=2, grad_accum=5, lr=0.5)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu"} \
        == config["zero_optimization"]["offload_optimizer"]
    assert config["bf16"]["enabled"] and not config["fp16"]["enabled"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 5)
    assert config["optimizer"]["params"]["lr"] == 0.5


def test_offload_none_takes_back_what_the_json_says(gpt2, ds_json):
    path = ds_json({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert "offload_param" not in load(gpt2, path, offload="none")["zero_optimization"]


def test_total_batch_instead_of_accumulation(gpt2, ds_json):
    path = ds_json({"gradient_accumulation_steps": None, "train_batch_size": 24})
    assert load(gpt2, path)["gradient_accumulation_steps"] == 3
    assert load(gpt2, path, grad_accum=2)["gradient_accumulation_steps"] == 2


def test_numbers_may_be_written_without_a_point(gpt2, ds_json):
    """Where torch would refuse them: betas."""
    config = load(gpt2, ds_json({"optimizer.params.betas": [0, 0.999], "optimizer.params.lr": 1}))
    assert config["optimizer"]["params"]["betas"] == [0.0, 0.999]


def test_an_absurd_batch_is_refused_at_once(train):
    result = train(micro_batch=10**30, timeout=100)
    assert result.rc == 2 and len(result.errors) == 1 and "samples, and the data has 256" in result.errors[0]


def test_the_users_file_is_not_touched(gpt2, ds_json):
    path = ds_json({"fp16.enabled": True})
    before = path.read_bytes()
    load(gpt2, path, zero_stage=2, lr=1e-5)
    assert path.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")
def test_fp16_is_replaced_on_a_cpu_that_lacks_it(gpt2, ds_json, capsys):
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU has fp16")
    config = load(gpt2, ds_json({"fp16.enabled": True}))
    assert not config["fp16"]["enabled"] and "fp32 instead of fp16" in capsys.readouterr().out


def test_schedule_spans_the_run_unless_the_json_says_otherwise(gpt2, ds_json):
    config = load(gpt2, ds_json({}))
    gpt2.complete_schedule(config, 500)
    assert config["scheduler"]["params"]["total_num_steps"] == 500
    assert config["scheduler"]["params"]["warmup_num_steps"] == 20
    gpt2.complete_schedule(config, 9)
    assert config["scheduler"]["params"]["total_num_steps"] == 500  # as it stands
    short = load(gpt2, ds_json({}))
    gpt2.complete_schedule(short, 12)
    assert short["scheduler"]["params"]["warmup_num_steps"] == 1


@pytest.mark.parametrize("scheduler", [None, {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
                                       {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-3}}])
def test_other_schedules(gpt2, ds_json, scheduler):
    config = load(gpt2, ds_json({"scheduler": scheduler}))
    gpt2.complete_schedule(config, 100)
    filled = config.get("scheduler", {}).get("params", {})
    assert ("total_num_steps" in filled) == bool(scheduler and scheduler["type"] == "WarmupDecayLR")


# The JSON: what is refused

@pytest.mark.parametrize("changes, says", [
    ({"zero_optimisation": {"stage": 2}}, "key zero_optimisation, did you mean zero_optimization?"),
    ({"gradient_accumulation_step": 2}, "did you mean gradient_accumulation_steps?"),
    ({"something": 1}, "unknown key something"),
    ({"zero_optimization.stag": 2}, "stag"), ({"zero_optimization.stage": 5}, "stage"),
    ({"fp16.initial_scale": 2}, "initial_scale"), ({"fp16": True}, "fp16 cannot be true: Input should be a valid dictionary"),
    ({"scheduler": [1]}, "scheduler cannot be [1]: Input should be a valid dict"), ({"optimizer.params": []}, "params cannot be []: Input should be a valid dict"),
    ({"train_micro_batch_size_per_gpu": 8.5}, "cannot be 8.5: Input should be a valid integer"),
    ({"optimizer": None}, "optimizer"), ({"optimizer.type": "OneBitAdam"}, "OneBitAdam"),
    ({"optimizer.type": "cpu_adam"}, "cpu_adam"), ({"optimizer.params.learning_rate": 1}, "learning_rate"),
    ({"optimizer.params.lr": "fast"}, 'lr cannot be "fast": Input should be a valid number'),
    ({"scheduler.params.cos_min_ratio": "a"}, 'cos_min_ratio cannot be "a": Input should be a valid number'),
    ({"scheduler.type": 3}, "type cannot be 3: Input should be a valid string"), ({"fp16.enabled": "maybe"}, 'enabled cannot be "maybe": Input should be a valid boolean'), ({"optimizer.params.max_grad_norm": 1}, "gradient_clipping"),
    ({"scheduler.type": "Cosine"}, "Cosine"), ({"scheduler.params.warmup_steps": 3}, "warmup_steps"),
    ({"scheduler.params.warmup_num_steps": -3}, "warmup_num_steps cannot be -3: Input should be greater than or equal to 0"),
    ({"scheduler.params.warmup_type": "quadratic"}, "warmup_type cannot be \"quadratic\": Input should be 'linear' or 'log'"),
    ({"gradient_clipping": -1}, "gradient_clipping cannot be -1: Input should be greater than or equal to 0"),
    ({"optimizer.params.betas": [0.9, 0.95, 0.99]}, "betas cannot be [0.9, 0.95, 0.99]: List should have at most 2 items"),
    ({"optimizer.params.betas": [0.9, "x"]}, 'betas cannot be [0.9, "x"]: Input should be a valid number'),
    ({"optimizer.params.betas": [0.9, 1.5]}, "betas cannot be [0.9, 1.5]: Input should be less than 1"),
    ({"fp16.loss_scale_window": 0}, "loss_scale_window cannot be 0: Input"),
    ({"optimizer.params.betas": 0.9}, "params: betas cannot be 0.9: Input should be a valid list"),
    ({"optimizer.params.lr": math.inf}, "lr cannot be Infinity: Input should be a finite number"), ({"optimizer.params.eps": 0}, "eps cannot be 0: Input should be greater than 0"),
    ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu cannot be 0: Input should be greater"),
    ({"tensorboard.enabled": 1}, "tensorboard: enabled cannot be 1: Input should be a valid boolean"),
    ({"fp16.initial_scale_power": -3}, "initial_scale_power cannot be -3: Input"), ({"fp16.hysteresis": 0}, "hysteresis cannot be 0"),
    ({"scheduler.params.warmup_min_ratio": 3}, "warmup_min_ratio cannot be 3: Input should be less than or equal to 1"),
    ({"scheduler.params.total_num_steps": 0}, "total_num_steps cannot be 0"),
    ({"train_micro_batch_size_per_gpu": 0}, "icro"), ({"train_micro_batch_size_per_gpu": "auto"}, "auto"),
    ({"train_micro_batch_size_per_gpu": None}, "train_micro_batch_size_per_gpu"),
    ({"train_batch_size": 31}, "train_batch_size"), ({"gradient_clipping": "x"}, "json"),
    ({"comet": {"enabled": True}}, "pip install comet_ml"),
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "offload_param needs ZeRO stage 3"),
])
def test_bad_json(gpt2, ds_json, refused, changes, says):
    line = refused(load, gpt2, ds_json(changes))
    assert says in line and len(line) < 1200


def test_both_precisions(gpt2, ds_json, refused):
    both = ds_json({"fp16.enabled": True, "bf16.enabled": True})
    assert "both enabled" in refused(load, gpt2, both)
    assert load(gpt2, both, dtype="bf16")["bf16"]["enabled"]


def test_offload_without_zero(gpt2, ds_json, refused):
    assert "needs ZeRO stage 1 or more" in refused(load, gpt2, ds_json({}), zero_stage=0, offload="optimizer")


def test_missing_and_malformed_files(gpt2, tmp_path, refused):
    assert "No such file" in refused(load, gpt2, tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"fp16": ')
    assert "Expecting value" in refused(load, gpt2, tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1]")
    assert "JSON object" in refused(load, gpt2, tmp_path / "list.json")
    assert "Is a directory" in refused(load, gpt2, tmp_path)


# Model and tokenizer

def test_presets_have_gpt2s_sizes(gpt2):
    """Parameters as published, with the vocabulary padded from 50257 to 50304."""
    for name, millions in (("124M", 124.4), ("355M", 354.8), ("774M", 774.0), ("1.5B", 1557.6)):
        config, _ = gpt2.gpt2_config(gpt2.Settings(model=name))
        with torch.device("meta"):
            model = gpt2.transformers.GPT2LMHeadModel(config)
        size = sum(p.numel() for p in model.parameters())
        assert config.vocab_size == 50304
        assert (size - (50304 - 50257) * config.n_embd) / 1e6 == pytest.approx(millions, abs=0.06)


def test_vocabulary_fits_the_tokenizer_and_is_padded(gpt2):
    config, tokenizer = gpt2.gpt2_config(gpt2.Settings(model="nano", data="a-hub-dataset", tokenizer="byte"))
    assert config.vocab_size % 64 == 0 and len(tokenizer) <= config.vocab_size < len(tokenizer) + 64
    assert config.eos_token_id == tokenizer.eos_token_id
    assert gpt2.gpt2_config(gpt2.Settings(model="nano"))[1] is None


def test_models_that_cannot_be_trained(gpt2, tmp_path, refused):
    assert "neither nano, 124M" in refused(gpt2.gpt2_config, gpt2.Settings(model="no-such-model"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "type llama" in refused(gpt2.gpt2_config, gpt2.Settings(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "gpt2", "n_positions": 64, "vocab_size": 100, "n_layer": 1}))
    assert "64 positions" in refused(gpt2.gpt2_config, gpt2.Settings(model=str(tmp_path), seq_len=65))
    assert "only 100" in refused(
        gpt2.gpt2_config, gpt2.Settings(model=str(tmp_path), data="a-hub-dataset", tokenizer="byte"))
    assert "byte needs no download" in refused(gpt2.load_tokenizer, "no-such-tokenizer")


def test_nothing_from_a_model_folder_runs(train, tmp_path):
    """A pickle of weights and a class of the folder's own: refused, or passed over; neither is executed."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'code ran')!r}, 'w')\nclass Own: pass\n")
    config = {"model_type": "gpt2", "n_positions": 128, "vocab_size": 1024, "n_layer": 1, "n_embd": 64, "n_head": 2,
              "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "pickle ran"), "w")

    torch.save({"transformer.wte.weight": Evil()}, tmp_path / "pytorch_model.bin")
    result = train(model=str(tmp_path), output_dir="out")
    assert result.rc == 2 and len(result.errors) == 1 and ".safetensors" in result.errors[0], result.err[-2000:]
    assert not list(tmp_path.glob("* ran"))


def test_weight_decay_is_for_matrices(gpt2):
    config, _ = gpt2.gpt2_config(gpt2.Settings(model="nano"))
    model = gpt2.transformers.GPT2LMHeadModel(config)
    matrices, vectors = (group["params"] for group in gpt2.parameter_groups(model))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in vectors} == {n for n in names.values() if ".ln_" in n or n.endswith("bias")}
    assert len(matrices) + len(vectors) == len(names)


def test_files_of_two_kinds_are_not_mixed(gpt2, refused, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    assert "cannot mix json and text files" in refused(
        gpt2.Settings, data=[str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])
