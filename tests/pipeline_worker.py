"""One update of a pipeline against torch's own gradients, and its export. Prints the differences as JSON.

    torchrun --nproc_per_node 2 tests/pipeline_worker.py FOLDER
"""

import copy
import gc
import json
import sys
import weakref
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import train_gpt2_deepspeed as gpt2  # noqa: E402

LR, MICRO, ACCUMULATION, LENGTH = 50.0, 2, 4, 32


def main(folder):
    rank, ranks = gpt2.init_distributed()
    config = json.loads((ROOT / "ds_config.json").read_text())
    config |= {"optimizer": {"type": "SGD", "params": {"lr": LR}}, "zero_allow_untested_optimizer": True,
               "gradient_clipping": 0.0, "tensorboard": {"enabled": False}}
    del config["scheduler"]
    path = Path(folder, f"{rank}.json")
    path.write_text(json.dumps(config))
    settings = gpt2.Settings(model="nano", seq_len=LENGTH, dtype="fp32", pipeline_stages=2, micro_batch=MICRO,
                             grad_accum=ACCUMULATION, deepspeed_config=str(path))
    config, _ = gpt2.gpt2_config(settings)
    ds_config = gpt2.load_ds_config(settings)
    model = gpt2.build_model(config, settings, ds_config)
    plain = copy.deepcopy(model)
    blocks = [weakref.ref(block) for block in model.transformer.h]
    engine = gpt2.build_engine(gpt2.build_pipeline(model, 2), ds_config, 10)
    del model
    gc.collect()
    data_ranks, data_rank = engine.dp_world_size, engine.grid.data_parallel_id
    ids = torch.randint(1024, (MICRO * ACCUMULATION * data_ranks, LENGTH), generator=torch.manual_seed(1))
    mine = ids.reshape(data_ranks, ACCUMULATION, MICRO, LENGTH)[data_rank]
    loss = gpt2.train_step(engine, [{"input_ids": part} for part in mine])

    plain_loss = plain(input_ids=ids, labels=ids).loss
    plain_loss.backward()
    whole = dict(gpt2.whole_model(engine).named_parameters())
    gradients = {}
    for name, parameter in plain.named_parameters():
        gradient = (parameter - whole[name]).detach() / LR
        gradients[name] = ((gradient - parameter.grad).abs().max() / parameter.grad.abs().max()).item()

    tied = engine.module.tied_modules["wte"].weight.detach().clone()
    copies = [torch.empty_like(tied) for _ in range(ranks)]
    gpt2.dist.all_gather(copies, tied)

    gpt2.export_model(engine, None, Path(folder, "model"))
    gpt2.dist.barrier()
    exported = AutoModelForCausalLM.from_pretrained(Path(folder, "model")).eval()
    _, logits = engine.eval_batch(iter([(ids[:MICRO], ids[:MICRO])]), return_logits=True, num_micro_batches=1)
    logits = None if logits is None else (exported(ids[:MICRO]).logits - logits).abs().max().item()
    mine, reports = [logits, [block() is not None for block in blocks], engine.module.stage_id], [None] * ranks
    gpt2.dist.all_gather_object(reports, mine)
    gpt2.print0("pipeline: " + json.dumps({
        "loss": [loss.item(), plain_loss.item()], "gradients": gradients, "reports": reports,
        "copies": max((copy - tied).abs().max().item() for copy in copies),
        "scale": exported(ids[:MICRO]).logits.abs().max().item()}))
    gpt2.dist.barrier()
    gpt2.dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
