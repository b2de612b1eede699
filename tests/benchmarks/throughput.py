"""Throughput of the script's own training step, against what one would use instead, side by side.

    python tests/benchmarks/throughput.py --model 124M --micro_batch 16 --grad_accum 1 --dtype bf16
    python tests/benchmarks/throughput.py --contenders ours,nanogpt --ours "" --ours "zero_stage=2 compile=true"

All rows have the same model shape, synthetic data, batch and precision, on one device, as set by options of the
script. Without any: on a CPU the small model in fp32, on a GPU 124M in bf16.

    ours         the script's functions; each --ours is one more row, with changed settings of the script
    nanogpt      a plain PyTorch loop: autocast, fused AdamW, torch.compile, padded vocabulary, no dropout
    plain        the same without torch.compile, which needs a C++ compiler
    tutorial     DeepSpeed ZeRO-1 on GPT-2 as transformers has it: vocabulary 50257, dropout, gelu_new
    trainer      the Trainer of transformers on the same model; trainer_ds: with DeepSpeed, as in our JSON
    limit        a large matrix product: how fast a step would be if it were only its FLOPs

A + behind tutorial, trainer or trainer_ds gives it our vocabulary, activation and dropout. Each row is a process of
its own. They take turns: every repeat times some updates of each, while the others wait; a first one warms up. The
table has medians; `x ours` is that of the ratios to the first row of ours, repeat by repeat. Start-up is from the
start of the process to the first finished update, with cold compile caches and no imports but a row's own. MFU counts
6 N + 12 layers width T FLOPs per token, N without the positions. Memory is the peak that was allocated on the GPU; on
a CPU, the peak resident memory of the process.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the script is imported later, by those that need it as part of their start-up


class Job:
    """What a row needs, whichever its contender is: settings, data, and the clock."""

    def __init__(self, gpt2, contender, argv, args, began, pipe):
        self.gpt2, self.contender, self.began, self.pipe = gpt2, contender, began, pipe
        self.done, self.per_round = 0, args.updates + 1
        self.total = (args.repeats + 1) * self.per_round
        self.device = torch.device(gpt2.get_accelerator().current_device_name())
        self.settings = gpt2.parse_settings(["", *argv])
        self.json = json.loads(Path(self.settings.deepspeed_config or ROOT / "ds_config.json").read_text())
        gpt2.apply_settings(self.json, self.settings)
        gpt2.complete_schedule(self.json, self.total)
        self.json.pop("tensorboard", None)
        self.fp16, self.bf16 = (self.json[name].get("enabled", False) for name in ("fp16", "bf16"))
        self.dtype = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32
        self.micro_batch = self.json["train_micro_batch_size_per_gpu"]
        self.accumulation = self.json["gradient_accumulation_steps"]
        samples = self.micro_batch * self.accumulation
        self.settings.num_samples = self.total * samples  # no epoch ends while the clock runs
        self.config, _ = gpt2.gpt2_config(self.settings)
        c = self.config
        N = (c.vocab_size + c.n_layer * (12 * c.n_embd + 13) + 2) * c.n_embd
        self.flops_per_token = 6 * N + 12 * c.n_layer * c.n_embd * c.n_positions
        self.tokens = samples * c.n_positions
        self.training, self.held_out = gpt2.build_datasets(self.settings, c.n_positions, c.vocab_size, None)

    def batches(self):
        """The micro-batches of each update, from the script's loader."""
        loader = self.gpt2.build_dataloader(
            self.training, self.micro_batch, self.accumulation, 1, 0, self.settings.seed)
        for _, batches in self.gpt2.updates(loader, self.accumulation, 0, self.total):
            yield batches
            self.update_done()

    def update_done(self):
        """Called after each update: times a round, reports it, and waits for the next."""
        self.done += 1
        place, device = self.done % self.per_round, self.gpt2.get_accelerator()
        if place <= 1:
            device.synchronize()
        if self.done == 1:
            self.startup = time.time() - self.began
        if place == 1:  # of a round, the first update is not timed: it takes the memory back
            self.clock = time.perf_counter()
        elif place == 0:
            seconds, peak = time.perf_counter() - self.clock, self.gpt2.memory_gib()["peak"]
            if self.device.type == "cpu":  # there, that is the memory of just now
                peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20
            self.pipe.send({"seconds": seconds, "peak_gib": peak, "startup_s": self.startup, "tokens": self.tokens,
                            "flops_per_token": self.flops_per_token})
            device.empty_cache()  # the others may need it
            self.pipe.recv()

    def transformers_model(self):
        """GPT-2 as transformers gives it, in our shape; with a + also with our choices."""
        keys = "n_layer", "n_head", "n_embd", "n_positions", "bos_token_id", "eos_token_id"
        plain = self.gpt2.GPT2Config(**{key: getattr(self.config, key) for key in keys},
                                     vocab_size=min(self.config.vocab_size, 50257))
        return self.gpt2.AutoModelForCausalLM.from_config(self.config if self.contender.endswith("+") else plain)


# Each trains for `job.total` updates and returns the held-out loss: that it is fast counts only if it learns.

def ours(job, gpt2):
    gpt2.init_distributed()
    ds_config = gpt2.load_ds_config(job.settings)
    model = gpt2.build_model(job.config, job.settings, ds_config)
    engine = gpt2.build_engine(model, ds_config, job.total)
    for batches in job.batches():
        gpt2.train_step(engine, batches)
    return gpt2.evaluate(engine, job.held_out, job.micro_batch)["loss"]


def tutorial(job, gpt2):
    gpt2.init_distributed()
    model = job.transformers_model()
    engine, *_ = gpt2.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job.json)
    for batches in job.batches():
        for batch in batches:
            ids = batch["input_ids"].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
    return gpt2.evaluate(engine, job.held_out, job.micro_batch)["loss"]


def plain_loss(model, ids):
    """Mean next-token loss of `ids` `(B, T)`: GPT-2 on the weights of transformers, written for `torch.compile`."""
    body, targets = model.transformer, F.pad(ids[:, 1:], (0, 1), value=-100)  # the last has no next token
    x = body.wte(ids) + body.wpe.weight[:ids.shape[1]]  # (B, T, width)
    for block in body.h:
        q, k, v = block.attn.c_attn(block.ln_1(x)).unflatten(-1, (3, model.config.n_head, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, width / heads)
        x = x + block.attn.c_proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate="tanh"))
    logits = F.linear(body.ln_f(x), body.wte.weight)  # (B, T, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt(job, gpt2):
    model = gpt2.AutoModelForCausalLM.from_config(job.config).to(job.device)
    gpt2.init_weights(model, job.settings.seed)
    loss_of = plain_loss if job.contender == "plain" else torch.compile(plain_loss)
    options = {key: value for key, value in job.json["optimizer"]["params"].items() if key != "torch_adam"}
    optimizer = torch.optim.AdamW(gpt2.parameter_groups(model), **options)
    schedule = gpt2.lr_schedules.WarmupCosineLR(optimizer, **job.json["scheduler"]["params"])
    scaler = torch.amp.GradScaler(job.device.type, enabled=job.fp16)
    autocast = torch.autocast(job.device.type, job.dtype, enabled=job.fp16 or job.bf16)
    for batches in job.batches():
        schedule.step()
        for batch in batches:
            with autocast:
                loss = loss_of(model, batch["input_ids"].to(job.device, non_blocking=True)) / job.accumulation
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.json["gradient_clipping"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    held_out = torch.utils.data.DataLoader(job.held_out)
    with torch.no_grad(), autocast:
        losses = [plain_loss(model, batch["input_ids"].to(job.device)) for batch in held_out]
    return float(torch.stack(losses).mean())


def trainer(job, gpt2):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rounds(TrainerCallback):
        def on_step_end(self, *_, **__):
            job.update_done()

    def collate(samples):
        return dict.fromkeys(("input_ids", "labels"), torch.stack([sample["input_ids"] for sample in samples]))

    deepspeed = job.contender.startswith("trainer_ds")
    if deepspeed:
        gpt2.init_distributed()
    params, on_gpu = job.json["optimizer"]["params"], job.device.type != "cpu"
    args = TrainingArguments(
        output_dir=job.settings.output_dir, max_steps=job.total, seed=job.settings.seed, bf16=job.bf16, fp16=job.fp16,
        per_device_train_batch_size=job.micro_batch, gradient_accumulation_steps=job.accumulation,
        per_device_eval_batch_size=job.micro_batch, optim="adamw_torch_fused", learning_rate=params["lr"],
        adam_beta1=params["betas"][0], adam_beta2=params["betas"][1], adam_epsilon=params["eps"],
        weight_decay=params["weight_decay"], max_grad_norm=job.json["gradient_clipping"], lr_scheduler_type="cosine",
        warmup_steps=job.json["scheduler"]["params"]["warmup_num_steps"], use_cpu=not on_gpu,
        dataloader_num_workers=int(on_gpu), logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, deepspeed=job.json if deepspeed else None)
    run = Trainer(job.transformers_model(), args, train_dataset=job.training, eval_dataset=job.held_out,
                  data_collator=collate, callbacks=[Rounds()])
    run.train()
    return run.evaluate()["eval_loss"]


def limit(job, gpt2):
    """Updates that are nothing but matrix products of so many FLOPs, of a size that runs well."""
    size = 1024 if job.device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=job.device).to(job.dtype)
    products = math.ceil(job.flops_per_token * job.tokens / (2 * size**3))
    job.tokens = 2 * size**3 * products / job.flops_per_token  # what these FLOPs are good for
    for _ in range(job.total):
        for _ in range(products):
            a @ b
        job.update_done()


CONTENDERS = {"limit": limit, "ours": ours, "nanogpt": nanogpt, "plain": nanogpt, "tutorial": tutorial,
              "trainer": trainer, "trainer_ds": trainer}
IMPORTS = {"limit": "torch", "nanogpt": "torch", "plain": "torch", "trainer": "transformers.trainer"}


def work(contender, argv, args, log, scratch, began, pipe):
    """A row's process. An error ends it; the parent finds it in the log."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"), scratch)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    multiprocessing.set_start_method("fork", force=True)  # of the loader's process, as in a run: this one was spawned
    importlib.import_module(IMPORTS.get(contender.rstrip("+"), "train_gpt2_deepspeed"))
    clock = time.time()
    gpt2 = importlib.import_module("train_gpt2_deepspeed")
    began += time.time() - clock  # that it would not need
    pipe.recv()
    train, job = CONTENDERS[contender.rstrip("+")], Job(gpt2, contender, argv, args, began, pipe)
    pipe.send({"held_out_loss": train(job, gpt2)})


class Row:
    """One contender: its process, and what that said at each turn."""

    def __init__(self, name, argv, args, scratch):
        self.name, self.error, self.said, self.updates = name, None, [], args.updates
        self.contender = name.split()[0]
        self.log = args.out / f"{scratch.name}-{self.contender}.log"
        self.log.touch()
        scratch.mkdir()
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=work, args=(
            self.contender, [*argv, f"--output_dir={scratch}"], args, self.log, str(scratch), time.time(), theirs))
        self.process.start()
        theirs.close()
        self.turn()

    def turn(self):
        """Let the process go on until it says something. If it has died, that ends this row only."""
        if self.error:
            return
        try:
            self.pipe.send("go")
            self.said.append(self.pipe.recv())
        except (OSError, EOFError):
            lines = self.log.read_text(errors="replace").splitlines()
            self.error = ["ended without a word", *lines[-1:], *(line for line in lines if "rror:" in line)][-1][:200]

    def speeds(self):
        return [one["tokens"] * self.updates / one["seconds"] for one in self.said[1:] if "seconds" in one]

    def result(self, reference, limit, peak_tflops):
        """This row as numbers. `reference` and `limit` are the speeds of those rows, or None."""
        result = {key: value for said in self.said for key, value in said.items()}
        result |= {"name": self.name, "error": self.error, "note": self.error, "log": self.log.name}
        if speeds := self.speeds():
            median = statistics.median(speeds)
            tflops = median * result["flops_per_token"] / 1e12
            result |= {
                "tokens_per_second": median, "repeats": speeds, "tflops": tflops,
                "spread": f"{min(speeds):,.0f} to {max(speeds):,.0f}",
                "ratio": reference and statistics.median(a / b for a, b in zip(speeds, reference)),
                "of_limit": limit and median / statistics.median(limit), "mfu": peak_tflops and tflops / peak_tflops,
                "ms_per_update": 1e3 * result["tokens"] / median,
                "peak_gib": max(said.get("peak_gib", 0) for said in self.said)}
            if self.contender == "limit":
                result["note"] = self.error or f"{tflops:.3g} TFLOP/s"
        return result


COLUMNS = {"row": ("name", ""), "tokens/s": ("tokens_per_second", ",.0f"), "lowest to highest": ("spread", ""),
           "x ours": ("ratio", ".3f"), "ms per update": ("ms_per_update", ".1f"),
           "of the matrix rate": ("of_limit", ".1%"), "MFU": ("mfu", ".1%"), "peak GiB": ("peak_gib", ".2f"),
           "start-up s": ("startup_s", ".1f"), "held-out loss": ("held_out_loss", ".3f"), "": ("note", "")}


def report(rows, run, out):
    """Write throughput.json and throughput.md into `out`. Returns the table."""
    speeds = {row.contender: row.speeds() for row in rows[::-1] if row.speeds()}  # of the first row of each
    results = [row.result(speeds.get("ours"), speeds.get("limit"), run["peak_tflops"]) for row in rows]
    (out / "throughput.json").write_text(json.dumps({"run": run, "rows": results}, indent=1))
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    table += [["" if one.get(key) is None else format(one[key], form) for key, form in COLUMNS.values()]
              for one in results]
    text = ", ".join(f"{key} {value}" for key, value in run.items()) + "\n\n"
    text += "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    (out / "throughput.md").write_text(text)
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--contenders", default="limit,ours,nanogpt,tutorial,trainer_ds,trainer")
    parser.add_argument("--ours", action="append", help="changed settings of one more row of ours: 'a=1 b=2'")
    parser.add_argument("--updates", type=int, default=10, help="timed updates per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak_tflops", type=float, help="of the device, for the MFU (989 on a GPU)")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput"), help="folder of the results")
    args, options = parser.parse_known_args()
    names = args.contenders.split(",")
    if unknown := {name.rstrip("+") for name in names} - set(CONTENDERS):
        parser.error(f"no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one device
    gpt2 = importlib.import_module("train_gpt2_deepspeed")  # here also since the first to read it would seem slow
    on_gpu = torch.cuda.is_available()
    settings = gpt2.parse_settings(["", *options])
    settings.dtype = settings.dtype or ("bf16" if on_gpu else "fp32")
    planned = [(f"{name} {changes}".strip(), gpt2.command_line(settings, changes))
               for name in names for changes in (args.ours or [""] if name == "ours" else [""])]
    run = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
           "deepspeed": gpt2.deepspeed.__version__, "transformers": gpt2.transformers.__version__,
           "peak_tflops": args.peak_tflops or (989 if on_gpu else None), "updates": args.updates,
           "repeats": args.repeats, "settings": " ".join(gpt2.command_line(settings, ""))}
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        try:
            for number, (name, argv) in enumerate(planned):
                rows.append(Row(name, argv, args, Path(scratch, str(number))))
                print(f"{name}: {rows[-1].error or 'ready'}", flush=True)
            for repeat in range(args.repeats + 1):  # and a turn for the held-out loss
                for row in rows if repeat % 2 else rows[::-1]:  # a drift must not favour a place
                    row.turn()
                report(rows, run, args.out)
        finally:
            for row in rows:
                row.process.kill()
                row.process.join()
            print("\n" + report(rows, run, args.out), flush=True)


if __name__ == "__main__":
    main()
