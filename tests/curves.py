"""Train the small model under several settings in the processes of one launch; print the losses as JSON.

    torchrun --nproc_per_node 2 tests/curves.py '{"zero3": {"zero_stage": 3}}'

Runs the script's own functions. Each entry overrides `Settings`; "json" in it changes ds_config.json.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt2_deepspeed as gpt2  # noqa: E402


def curve(folder, updates=12, json_changes=(), **settings):
    """Losses (mean over ranks) of the updates, then the held-out loss, under the given settings."""
    config = json.loads((ROOT / "ds_config.json").read_text()) | {"tensorboard": {"enabled": False}}
    config["zero_optimization"] |= dict(json_changes)
    path = Path(folder) / "ds_config.json"
    path.write_text(json.dumps(config))
    settings = gpt2.Settings(**{
        "model": "nano", "seq_len": 64, "num_samples": 512, "micro_batch": 4, "grad_accum": 2, "dtype": "fp32",
        "lr": 1e-3, "output_dir": folder, "deepspeed_config": str(path), "max_steps": updates,
        "log_every": 1} | settings)
    rank, ranks = gpt2.dist.get_rank(), gpt2.dist.get_world_size()
    ds_config = gpt2.load_ds_config(settings)
    config, tokenizer = gpt2.gpt2_config(settings)
    training, held_out = gpt2.build_datasets(settings, 64, config.vocab_size, tokenizer)
    data_ranks = ranks // settings.pipeline_stages
    loader = gpt2.build_dataloader(
        training, settings.micro_batch, settings.grad_accum, data_ranks, rank % data_ranks, 1)
    model = gpt2.build_model(config, settings, ds_config)
    if settings.pipeline_stages > 1:
        model = gpt2.build_pipeline(model, settings.pipeline_stages)
    engine = gpt2.build_engine(model, ds_config, updates)
    losses, norms = [], []
    for _, batches in gpt2.updates(loader, settings.grad_accum, 0, updates):
        loss = gpt2.train_step(engine, batches)
        gpt2.dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
        norms.append(float(engine.get_global_grad_norm() or 0))  # 0: not told
    losses.append(gpt2.evaluate(engine, held_out, settings.micro_batch)["loss"])
    ids = gpt2.generate(engine, held_out[0]["input_ids"][:8], 8, 1024, seed=1)
    engine.destroy()
    gpt2.deepspeed.utils.groups.mpu = None  # of a pipeline, or the next engine would take it for its own
    return {"losses": losses, "norms": norms, "sample": ids.tolist()}


if __name__ == "__main__":
    gpt2.init_distributed()
    with tempfile.TemporaryDirectory() as scratch:
        result = {name: curve(scratch, **entry) for name, entry in json.loads(sys.argv[-1]).items()}
    gpt2.print0("curves: " + json.dumps(result))
    gpt2.dist.barrier()
    gpt2.dist.destroy_process_group()  # a process that just ends may abort in its threads
