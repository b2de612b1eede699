"""Throughput of the script's own training step, against what one would use instead, side by side.

    python tests/benchmarks/throughput.py                      on a CPU: the small model in fp32, 2 minutes
    python tests/benchmarks/throughput.py --model 124M --micro_batch 16 --grad_accum 1 --dtype bf16
    python tests/benchmarks/throughput.py --contenders ours,nanogpt --ours "" --ours zero_stage=2 \\
        --ours gradient_checkpointing=1,json.zero_optimization.contiguous_gradients=false

Same model shape, data, batch and precision for all, on one device:

    ours         the script's functions; each --ours is one more row, with changed settings (zero_stage=3,
                 offload=all, ...), changed keys of ds_config.json (json.KEY.KEY=value), or another version
                 of the script (script=FILE)
    nanogpt      a plain PyTorch loop: autocast, fused AdamW, torch.compile, padded vocabulary, no dropout;
                 plain: the same without torch.compile
    tutorial     DeepSpeed ZeRO-1 on GPT-2 as transformers has it: vocabulary 50257, dropout, gelu_new
    trainer      the Trainer of transformers on the same model; trainer_ds: with DeepSpeed, as in our JSON
    limit        a large matrix product: how fast a step would be if it were only its FLOPs

A + behind tutorial, trainer or trainer_ds gives it our vocabulary, activation and dropout. Each row is a
process of its own. They take turns: every repeat times some updates of each, while the others wait for a line
on a pipe. The table has medians; `x ours` is the median over repeats of (its speed / that of the first `ours`
row). Start-up is from the start of the process to the first finished update, with cold compile caches. MFU
counts 6 N + 12 layers width T FLOPs per token, N without the positions. Memory is the peak that was allocated
on the GPU; on a CPU, the peak resident memory of the process with all its libraries.
The table and all numbers are written to --out after each repeat; what a row printed is beside them.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
WARMUP = 3  # updates before the first round: compiling, growing memory, finding a loss scale
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


# ---- In a worker: the contenders ----

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (B, T, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, width / heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2, written for `torch.compile`: input ids `(B, T)` in, mean next-token loss out."""

    def __init__(self, layers, heads, width, vocabulary, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if branch else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # tied; (B, T, vocabulary)
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)  # the last position has no next token
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def peak_gib():
    if CUDA:
        return torch.cuda.max_memory_allocated() / 2**30
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20


class Pacer:
    """Stands in a training loop: `update_done()` after each update times the rounds that are asked for."""

    def __init__(self, spec, channel):
        self.updates, self.channel, self.note = spec["updates"], channel, ""
        self.done, self.idle, self.about = 0, 0.0, {}

    def send(self, kind, **values):
        print(json.dumps({"kind": kind, **values}), file=self.channel, flush=True)

    def wait(self):
        """Sleep until the parent says go; note the share of a core that this process used meanwhile."""
        if CUDA:
            torch.cuda.empty_cache()  # the others may need it
        clock, cpu = time.perf_counter(), time.process_time()
        if not sys.stdin.readline():
            os._exit(1)  # the parent is gone
        self.idle = max(self.idle, (time.process_time() - cpu) / (time.perf_counter() - clock))

    def update_done(self):
        self.done += 1
        step, rest = divmod(self.done - WARMUP, self.updates + 1)
        if self.done == 1:
            synchronize()
            self.send("first")
        if step == rest == 0:
            synchronize()
            self.send("ready", note=self.note, **self.about)
            self.wait()
        elif step >= 0 and rest == 1:  # the first update of a round takes its memory back
            synchronize()
            self.clock = time.perf_counter()
        elif step > 0 and rest == 0:
            synchronize()
            seconds = time.perf_counter() - self.clock
            self.send("round", seconds=seconds, peak=peak_gib(), idle=self.idle)
            self.wait()


class Job:
    """What all contenders share: the script, its settings, its data, and the numbers of its JSON."""

    def __init__(self, spec):
        self.spec, self.changes = spec, dict(spec["changes"])
        path = self.changes.pop("script", ROOT / "train_gpt2_deepspeed.py")
        module = importlib.util.spec_from_file_location("train_gpt2_deepspeed", path)
        self.gpt2 = gpt2 = sys.modules[module.name] = importlib.util.module_from_spec(module)
        module.loader.exec_module(gpt2)
        self.dtype = spec["dtype"] or ("bf16" if CUDA else "fp32")
        self.json = json.loads((ROOT / "ds_config.json").read_text())
        for key in [key for key in self.changes if key.startswith("json.")]:
            *parents, last = key.split(".")[1:]
            part = self.json
            for parent in parents:
                part = part.setdefault(parent, {})
            part[last] = self.changes.pop(key)
        path = Path(spec["scratch"], "ds_config.json")
        path.write_text(json.dumps(self.json))
        self.settings = gpt2.Settings(**{
            "model": spec["model"], "seq_len": spec["seq_len"], "micro_batch": spec["micro_batch"],
            "grad_accum": spec["grad_accum"], "dtype": self.dtype, "output_dir": spec["scratch"],
            "deepspeed_config": str(path), "max_steps": spec["total"]} | self.changes)
        self.micro_batch, self.accumulation = self.settings.micro_batch, self.settings.grad_accum
        # So many that no epoch ends while the clock runs.
        self.settings.num_samples = spec["total"] * self.micro_batch * self.accumulation
        self.config, _ = gpt2.gpt2_config(self.settings)
        c = self.config
        N = c.vocab_size * c.n_embd + c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd) + 2 * c.n_embd
        self.flops_per_token = 6 * N + 12 * c.n_layer * c.n_embd * c.n_positions
        self.training, self.held_out = gpt2.build_datasets(self.settings, c.n_positions, c.vocab_size, None)

    def updates(self):
        """The micro-batches of each update, from the script's loader."""
        loader = self.gpt2.build_dataloader(self.training, self.micro_batch, self.accumulation, 1, 0,
                                            self.settings.seed)
        for _, batches in self.gpt2.updates(loader, self.accumulation, 0, self.spec["total"]):
            yield batches

    def transformers_model(self):
        """GPT-2 as transformers gives it, in our shape; with a + also with our choices."""
        c, vocabulary = self.config, min(self.config.vocab_size, 50257)
        plain = self.gpt2.GPT2Config(
            n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, vocab_size=vocabulary,
            n_positions=c.n_positions, bos_token_id=None, eos_token_id=None)
        return self.gpt2.AutoModelForCausalLM.from_config(c if self.spec["plus"] else plain)

    def plain_json(self):
        """Our JSON as it stands: this batch, precision and length, ZeRO-1 and no monitors."""
        self.gpt2.apply_settings(self.json, self.settings)
        self.gpt2.complete_schedule(self.json, self.spec["total"])
        return {key: value for key, value in self.json.items()
                if key not in ("tensorboard", "wandb", "csv_monitor")}

    @torch.no_grad()
    def held_out_loss(self, module, loss_of):
        """Mean over 4 held-out micro-batches: that a row is fast counts only if it learns."""
        module.eval()
        samples = [self.held_out[i % len(self.held_out)]["input_ids"] for i in range(4 * self.micro_batch)]
        batches = torch.stack(samples).split(self.micro_batch)
        return sum(float(loss_of(ids.to(DEVICE))) for ids in batches) / 4


def ours(job, pacer):
    gpt2 = job.gpt2
    gpt2.init_distributed()
    ds_config = gpt2.load_ds_config(job.settings)
    model = gpt2.build_model(job.config, job.settings, ds_config)
    engine = gpt2.build_engine(model, ds_config, job.spec["total"])
    for batches in job.updates():
        gpt2.train_step(engine, batches)
        pacer.update_done()
    return job.held_out_loss(engine, lambda ids: gpt2.language_model_loss(engine, ids))


def tutorial(job, pacer):
    job.gpt2.init_distributed()
    model = job.transformers_model()
    engine, *_ = job.gpt2.deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=job.plain_json())
    for batches in job.updates():
        for batch in batches:
            ids = batch["input_ids"].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        pacer.update_done()
    return job.held_out_loss(engine, lambda ids: job.gpt2.language_model_loss(engine, ids))


def nanogpt(job, pacer, compiled=True):
    c, plain_json = job.config, job.plain_json()
    params, warmup = plain_json["optimizer"]["params"], plain_json["scheduler"]["params"]["warmup_num_steps"]
    torch.manual_seed(job.settings.seed)
    plain = PlainGPT(c.n_layer, c.n_head, c.n_embd, c.vocab_size, c.n_positions).to(DEVICE)
    groups = [{"params": [p for p in plain.parameters() if p.dim() > 1]},
              {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=params["lr"], betas=params["betas"], eps=params["eps"],
                                  weight_decay=params["weight_decay"], fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=job.dtype == "fp16")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.dtype)
    autocast = torch.autocast(DEVICE.type, half) if half else contextlib.nullcontext()
    model, total = torch.compile(plain) if compiled else plain, job.spec["total"]

    def forward_and_backward(batch):
        with autocast:
            loss = model(batch["input_ids"].to(DEVICE, non_blocking=True)) / job.accumulation
        scaler.scale(loss).backward()

    for step, batches in enumerate(job.updates()):
        for group in optimizer.param_groups:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / total)
            group["lr"] = params["lr"] * min((step + 1) / warmup, cosine)
        if step == 0 and compiled:
            try:
                forward_and_backward(batches[0])
            except Exception:
                traceback.print_exc()
                model, pacer.note = plain, "eager: torch.compile failed"
            optimizer.zero_grad()
        for batch in batches:
            forward_and_backward(batch)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), plain_json["gradient_clipping"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pacer.update_done()
    with autocast:
        return job.held_out_loss(plain, plain)


def plain(job, pacer):
    return nanogpt(job, pacer, compiled=False)


def trainer(job, pacer, deepspeed=False):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rounds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            pacer.update_done()

    def collate(samples):
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids}

    if deepspeed:
        job.gpt2.init_distributed()
    plain = job.plain_json()
    params = plain["optimizer"]["params"]
    args = TrainingArguments(
        output_dir=job.spec["scratch"], max_steps=job.spec["total"], seed=job.settings.seed,
        per_device_train_batch_size=job.micro_batch, gradient_accumulation_steps=job.accumulation,
        learning_rate=params["lr"], adam_beta1=params["betas"][0], adam_beta2=params["betas"][1],
        adam_epsilon=params["eps"], weight_decay=params["weight_decay"], optim="adamw_torch_fused",
        max_grad_norm=plain["gradient_clipping"], lr_scheduler_type="cosine",
        warmup_steps=plain["scheduler"]["params"]["warmup_num_steps"],
        bf16=job.dtype == "bf16", fp16=job.dtype == "fp16", use_cpu=not CUDA,
        dataloader_num_workers=int(CUDA),
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        deepspeed=plain if deepspeed else None)
    model = job.transformers_model()
    run = Trainer(model, args, train_dataset=job.training, data_collator=collate, callbacks=[Rounds()])
    run.train()
    model = run.model_wrapped
    return job.held_out_loss(model, lambda ids: model(input_ids=ids, labels=ids).loss)


def trainer_ds(job, pacer):
    return trainer(job, pacer, deepspeed=True)


def limit(job, pacer):
    """Updates that are nothing but matrix products of so many FLOPs, of a size that runs well."""
    size = 8192 if CUDA else 1024
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[job.dtype]
    a, b = torch.randn(2, size, size, device=DEVICE).to(dtype).unbind()
    products = math.ceil(job.flops_per_token * pacer.about["tokens"] / (2 * size**3))
    pacer.about["tokens"] = 2 * size**3 * products / job.flops_per_token  # what these FLOPs are good for
    for _ in range(job.spec["total"]):
        for _ in range(products):
            a @ b
        pacer.update_done()
    return None


CONTENDERS = {function.__name__: function for function in
              (limit, ours, nanogpt, plain, tutorial, trainer, trainer_ds)}


def work(spec):
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    pacer = Pacer(spec, channel)
    try:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        needs = {"limit": [], "nanogpt": [], "plain": [], "trainer": ["transformers.trainer"]}
        for name in needs.get(spec["contender"], ["deepspeed", "transformers.trainer"]):
            importlib.import_module(name)
        clock = time.perf_counter()
        job = Job(spec)
        # The others would not import the script: its libraries are not part of their start-up.
        borrowed = time.perf_counter() - clock if spec["contender"] != "ours" else 0
        pacer.about = {"borrowed": borrowed, "flops_per_token": job.flops_per_token, "dtype": job.dtype,
                       "tokens": job.micro_batch * job.accumulation * job.config.n_positions,
                       "device": torch.cuda.get_device_name() if CUDA else "cpu",
                       "versions": {name: sys.modules[name].__version__
                                    for name in ("torch", "deepspeed", "transformers")}}
        loss = CONTENDERS[spec["contender"]](job, pacer)
        pacer.send("loss", loss=loss)
    except Exception as error:
        traceback.print_exc()
        pacer.send("error", error=f"{type(error).__name__}: {error}"[:300])
    sys.stderr.flush()
    os._exit(0)  # no teardown of process groups that nobody waits for


# ---- In the parent: rows, turns, results ----

class Failed(Exception):
    pass


class Row:
    """One contender: its process, what it said about itself, and its rounds."""

    def __init__(self, name, number, args, scratch):
        contender, _, changes = name.partition(" ")
        self.name, self.error, self.loss, self.about = name, None, None, {}
        self.rounds = []  # {"seconds", "peak", "idle"} of each repeat
        self.timeout, self.updates = args.timeout, args.updates
        spec = {"contender": contender.rstrip("+"), "plus": contender.endswith("+"), "changes": {}}
        for change in filter(None, changes.split(",")):
            key, _, value = change.partition("=")
            with contextlib.suppress(ValueError):  # not JSON: a plain word
                value = json.loads(value)
            spec["changes"][key] = value
        for key in ("model", "seq_len", "micro_batch", "grad_accum", "dtype", "updates"):
            spec[key] = getattr(args, key)
        spec["total"] = WARMUP + args.repeats * (args.updates + 1)
        spec["scratch"] = f"{scratch}/{number}"  # its own, also for compile caches: a first run is measured
        os.mkdir(spec["scratch"])
        environment = {key: value for key, value in os.environ.items()
                       if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": spec["scratch"], "TRITON_CACHE_DIR": spec["scratch"],
                        "TORCH_EXTENSIONS_DIR": spec["scratch"],
                        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        self.log = args.out / f"{number}-{contender}.log"
        clock = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(spec)], stdin=subprocess.PIPE, bufsize=0,
            stdout=subprocess.PIPE, stderr=self.log.open("w"), env=environment, start_new_session=True)
        with self.failing():
            self.hear("first")
            startup = time.perf_counter() - clock
            self.about = self.hear("ready")
            self.startup = startup - self.about["borrowed"]

    @contextlib.contextmanager
    def failing(self):
        """What goes wrong with a contender is a note in its row, and the end of its process only."""
        try:
            yield
        except (Failed, OSError, ValueError) as error:
            self.error = str(error)
            self.stop()

    def hear(self, kind):
        if not select.select([self.process.stdout], [], [], self.timeout)[0]:
            raise Failed(f"no answer in {self.timeout} s")
        line = self.process.stdout.readline()
        if not line:
            printed = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise Failed(f"ended: {printed[-1][:200] if printed else 'without a word'}")
        message = json.loads(line)
        if message.pop("kind") != kind:
            raise Failed(message.get("error", f"unexpected {message}"))
        return message

    def turn(self, kind):
        """Let the process go on until it says `kind`; returns what it says."""
        self.process.stdin.write(b"go\n")
        return self.hear(kind)

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)  # its data loader, too
        self.process.wait()

    def speeds(self):
        return [self.about["tokens"] * self.updates / one["seconds"] for one in self.rounds]

    def result(self, reference, limit, peak):
        """This row as numbers. `reference` and `limit` are rows, or None."""
        result = {"name": self.name, "error": self.error, "log": self.log.name}
        if not self.rounds:
            return result
        speeds, median = self.speeds(), statistics.median(self.speeds())
        flops = median * self.about["flops_per_token"]
        ratios = [a / b for a, b in zip(speeds, reference.speeds())] if reference else []
        return result | self.about | {
            "tokens_per_second": median, "repeats": speeds,
            "ratio": statistics.median(ratios) if ratios else None,
            "mfu": flops / peak if peak else None,
            "of_limit": median / statistics.median(limit.speeds()) if limit else None,
            "tflops": flops / 1e12, "ms_per_update": 1e3 * self.about["tokens"] / median,
            "startup_s": self.startup, "peak_gib": max(one["peak"] for one in self.rounds),
            "idle_cpu": max(one["idle"] for one in self.rounds), "held_out_loss": self.loss}


def report(rows, args):
    """Write throughput.json and throughput.md into --out. Returns the table."""
    def first(name):
        return next((row for row in rows if row.name.split()[0] == name and row.rounds), None)

    about = next((row.about for row in rows if row.about), {})
    peak = args.peak_tflops or (989 if about.get("device", "cpu") != "cpu" else None)
    results = [row.result(first("ours"), first("limit"), peak and peak * 1e12) for row in rows]
    run = {key: value for key, value in vars(args).items() if value is not None and key != "out"}
    run |= {key: about.get(key) for key in ("device", "dtype", "versions")} | {"peak_tflops": peak}
    (args.out / "throughput.json").write_text(json.dumps({"run": run, "rows": results}, indent=1))

    def number(result, key, form, factor=1):
        return "" if result.get(key) is None else form.format(result[key] * factor)

    settings = {key: value for key, value in run.items() if key not in ("contenders", "ours", "timeout")}
    lines = [json.dumps(settings).translate({ord(sign): None for sign in '"{}'}), "",
             "| row | tokens/s | lowest to highest | x ours | ms per update | of the matrix rate |"
             f" MFU at {peak or '-'} TFLOP/s | peak GiB | start-up s | held-out loss | |",
             "|---" * 11 + "|"]
    for result in results:
        repeats = result.get("repeats", [])
        spread = f"{min(repeats):,.0f} to {max(repeats):,.0f}" if repeats else ""
        matrix = f"{result['tflops']:.3g} TFLOP/s" if repeats and result["name"] == "limit" else ""
        lines.append("| " + " | ".join((
            result["name"], number(result, "tokens_per_second", "{:,.0f}"), spread,
            number(result, "ratio", "{:.3f}"), number(result, "ms_per_update", "{:.1f}"),
            number(result, "of_limit", "{:.1f} %", 100), number(result, "mfu", "{:.1f} %", 100),
            number(result, "peak_gib", "{:.2f}"), number(result, "startup_s", "{:.1f}"),
            number(result, "held_out_loss", "{:.3f}"),
            matrix or result.get("note", "") or result["error"] or "")) + " |")
    table = "\n".join(lines)
    (args.out / "throughput.md").write_text(table + "\n")
    return table


def main(args):
    args.out.mkdir(parents=True, exist_ok=True)
    names = [f"ours {changes}".strip() if name == "ours" else name
             for name in args.contenders.split(",") for changes in (args.ours if name == "ours" else [""])]
    unknown = {name.split()[0].rstrip("+") for name in names} - set(CONTENDERS)
    if unknown:
        sys.exit(f"error: no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    # The first to import all that from a disk would seem slow to start.
    subprocess.run([sys.executable, "-c", "import deepspeed, transformers.trainer"], capture_output=True)
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        try:
            for number, name in enumerate(names):
                rows.append(Row(name, number, args, scratch))
                print(f"{name}: {rows[-1].error or f'ready, start-up {rows[-1].startup:.1f} s'}", flush=True)
                report(rows, args)
            for repeat in range(args.repeats):
                for row in rows if repeat % 2 else rows[::-1]:  # a drift must not favour a place
                    if not row.error:
                        with row.failing():
                            row.rounds.append(row.turn("round"))
                report(rows, args)
                print(f"repeat {repeat + 1} of {args.repeats} done", flush=True)
            for row in rows:
                if not row.error:
                    with row.failing():
                        row.loss = row.turn("loss")["loss"]
        finally:
            for row in rows:
                row.stop()
            print("\n" + report(rows, args), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default="limit,ours,nanogpt,tutorial,trainer_ds,trainer")
    parser.add_argument("--ours", action="append", help="changes in one more row of ours: a=1,json.b.c=2")
    parser.add_argument("--model", help="nano, 124M, 355M, 774M (124M on a GPU, else nano)")
    parser.add_argument("--seq_len", type=int, help="tokens per sample (1024, nano 128)")
    parser.add_argument("--micro_batch", type=int, help="samples per forward pass (as in ds_config.json)")
    parser.add_argument("--grad_accum", type=int, help="micro-batches per update (as in ds_config.json)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="bf16 on a GPU, else fp32")
    parser.add_argument("--updates", type=int, default=10, help="timed updates per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak_tflops", type=float, help="of the device, for the MFU (989 on a GPU)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until a silent row is given up")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput"), help="folder of the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
    args.ours = args.ours or [""]
    defaults = json.loads((ROOT / "ds_config.json").read_text())
    args.micro_batch = args.micro_batch or defaults["train_micro_batch_size_per_gpu"]
    args.grad_accum = args.grad_accum or defaults["gradient_accumulation_steps"]
    main(args)
