# ---
# jupyter:
#   jupytext:
#     comment_magics: false
# ---

# %% [markdown]
"""
# Train GPT-2 with DeepSpeed, from one file

Read it top to bottom, run it top to bottom, or copy from it: every cell is one idea.

    deepspeed train_gpt2_deepspeed.py                     all GPUs here; on a CPU, a small model
    deepspeed --num_gpus 2 train_gpt2_deepspeed.py        two processes (on a CPU, too)
    torchrun --nproc_per_node 2 train_gpt2_deepspeed.py   the same, started by torch
    python train_gpt2_deepspeed.py --max_steps 20         one process, no launcher
    deepspeed train_gpt2_deepspeed.py --data 'books/*.txt' --model 355M --zero_stage 2 --dtype bf16
    deepspeed --hostfile hosts train_gpt2_deepspeed.py    many hosts
    python train_gpt2_deepspeed.py --plan --model 774M    what memory that takes, and what helps
    python train_gpt2_deepspeed.py --compare              what each tactic costs, measured here

In Colab or Jupyter, run the cells. A run trains for two epochs and leaves checkpoints, TensorBoard
files, a loss curve and a model for `from_pretrained` in `runs/gpt2/`.

What to expect: the first loss is about ln(vocabulary), since a fresh model finds all tokens equally
likely; anything else means wrong weights or wrong labels. On the synthetic data of the default run,
the loss then falls to a floor that is known exactly.
"""

# %% tags=["active-ipynb"]
# # Only a notebook runs this cell. Colab has torch already, and nothing here needs a compiler.
# %pip install -q deepspeed transformers accelerate datasets tensorboard matplotlib

# %%
import argparse
import atexit
import bisect
import contextlib
import copy
import dataclasses
import datetime
import difflib
import fcntl
import functools
import gc
import glob
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

gc.disable()  # it would search the million objects of these modules, again and again: a second
import deepspeed
import numpy as np
import psutil
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.chunked_cross_entropy import ChunkedCausalLMLoss, chunked_cross_entropy
from deepspeed.runtime.zero import parameter_offload
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from torch import distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from tqdm.auto import tqdm
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
)
from transformers.hf_argparser import HfArgumentParser
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutput

gc.freeze()  # nor later
gc.enable()

# %% [markdown]
# ## Settings
# What the run is: model, data, length, folders. How it is computed (batch, optimizer, precision,
# ZeRO) is up to `ds_config.json`; the last group overrides single keys of it. In a notebook, write
# `settings = Settings(epochs=1, zero_stage=2)` where the run cell parses the command line.

# %%
def print0(*args, **kwargs):
    """`print` on global rank 0 only. It reads RANK, so it works before there is a process group."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, **kwargs, flush=True)


class UserError(SystemExit):
    """What the user gave cannot work: one line says what, why and what to do; exit status 2."""

    status = 2

    def __init__(self, message):
        super().__init__(self.status)
        if int(os.environ.get("RANK", 0)):
            time.sleep(5)  # rank 0 speaks first; if it fails as well, the launcher ends this one
        print("error:", *str(message).split(), file=sys.stderr, flush=True)


class Fault(UserError):
    """The run cannot go on, through no fault of its settings: one line as well; exit status 1."""

    status = 1


def did_you_mean(name, names):
    """The hint at the nearest of `names`, or nothing."""
    return "".join(f", did you mean {near}?" for near in difflib.get_close_matches(name, names, 1))


def option(default, text):
    """A field of `Settings`, with the default and the help of its command-line option."""
    return dataclasses.field(default=default, metadata={"help": text})


FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def find_files(names):
    """The files that names and globs stand for, sorted."""
    found = {path for name in names for path in glob.glob(name, recursive=True)}
    return sorted(filter(os.path.isfile, found))


def checkpoint_notes(folder):
    """The `run.json` of each checkpoint in `folder` (or of the one it is), the newest first."""

    def saved(note):  # as written there: a copy has other times
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return float(json.loads(note.read_text())["time"])
        return 0.0

    found = [*Path(folder).glob("global_step*/run.json"), *Path(folder).glob("run.json")]
    return sorted((note for note in found if not note.parent.suffix), key=saved, reverse=True)


@dataclasses.dataclass
class Settings:
    # model
    model: str | None = option(None, "nano, 124M, 355M, 774M, 1.5B, or a folder or hub name")
    seq_len: int | None = option(None, "tokens per sample (1024, nano 128; fine-tuning: all)")
    gradient_checkpointing: bool = option(False, "recompute activations: less memory, more time")
    compile: bool = option(False, "torch.compile the blocks: faster, after a longer start")
    # data
    data: list[str] | None = option(None, "synthetic, files, quoted globs, or a hub dataset")
    tokenizer: str | None = option(None, "gpt2, byte (no download), or a folder or hub name")
    stream: bool = option(False, "tokenize while training, for data too large to store")
    num_samples: int | None = option(None, "synthetic training samples (4608), or a limit")
    eval_fraction: float | None = option(None, "share held out (0.05, up to 1024 samples)")
    # run
    epochs: int = option(2, "passes over the data")
    max_steps: int | None = option(None, "updates; replaces epochs, and the schedule spans it")
    stop_after: int | None = option(None, "save and stop after so many updates of this run")
    seed: int = option(1234, "of the weights, the order of the data, and the synthetic data")
    output_dir: str = option("runs/gpt2", "for everything that the run writes")
    log_every: int = option(10, "updates between log lines")
    eval_every: int | None = option(None, "updates between evaluations (one epoch)")
    save_every: int | None = option(None, "updates between checkpoints (one epoch)")
    keep_checkpoints: int = option(2, "how many of the newest checkpoints stay")
    resume: str = option("never", "never, auto (if there is a checkpoint), or a checkpoints folder")
    prompt: str | None = option(None, "text that samples continue (held-out data)")
    # DeepSpeed: as in the JSON, unless given
    deepspeed_config: str | None = option(None, "the JSON (ds_config.json beside this file)")
    zero_stage: Literal[0, 1, 2, 3] | None = option(None, "what ZeRO shards; 0: nothing")
    offload: str | None = option(None, "none, optimizer, all (ZeRO-3) or nvme:FOLDER (ZeRO-3)")
    dtype: Literal["fp16", "bf16", "fp32"] | None = option(None, "precision")
    micro_batch: int | None = option(None, "samples per process and forward pass")
    grad_accum: int | None = option(None, "micro-batches per update")
    pipeline_stages: int = option(1, "stages of a pipeline, each on a device of its own")
    compress_gradients: bool = option(False, "send gradients in fewer bits")
    lr: float | None = option(None, "peak learning rate")
    memory_limit: float | None = option(None, "GiB of the GPU's memory that may be used (all)")
    # instead of training
    plan: bool = option(False, "say what memory the run would take, and stop")
    plan_gpus: int | None = option(None, "plan for so many GPUs, here or not (those here)")
    compare: list[str] | None = option(None, "measure tactics, the usual or those that are named:"
                                             " 'zero_stage=2 offload=optimizer' 'dtype=bf16'")

    def __post_init__(self):
        self.data = [self.data] if isinstance(self.data, str) else self.data or ["synthetic"]
        lowest = {"seq_len": 2, "stop_after": 0, "seed": 0, "zero_stage": 0}
        for name, value in vars(self).items():
            if type(value) is int and value < lowest.get(name, 1):
                raise UserError(f"--{name} {value}: must be at least {lowest.get(name, 1)}")
            if type(value) is float and not 0 < value < math.inf:
                raise UserError(f"--{name} {value}: must be a positive number")
        files, is_text = find_files(self.data), self.data != ["synthetic"]
        missing = [name for name in self.data if not find_files([name])
                   and (files or Path(name).suffix in FORMATS)]
        kinds = {FORMATS.get(Path(path).suffix, "text") for path in files}
        ranks = self.plan_gpus or int(os.environ.get("WORLD_SIZE", 1))
        # Of a host's files, rank 0 speaks now, others once all have met: they would be awaited.
        first = int(os.environ.get("RANK", 0)) == 0
        folder = Path(self.output_dir).absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        for name, good, rule in (
                ("eval_fraction", (self.eval_fraction or 0) < 1, "must lie between 0 and 1"),
                ("plan", not self.plan or self.compare is None, "either this or --compare"),
                ("plan_gpus", self.plan or not self.plan_gpus, "is for a plan: add --plan"),
                ("seed", self.seed < 2**63, "must be below 2**63"),
                ("offload", re.fullmatch("none|optimizer|all|nvme:.+", self.offload or "none"),
                 "must be none, optimizer, all or nvme:FOLDER"),
                ("data", not missing, f"no such file as {' '.join(missing)}"),
                ("data", len(kinds) < 2, f"cannot mix {' and '.join(sorted(kinds))} files"),
                ("tokenizer", is_text or not self.tokenizer, "synthetic data are ids; give --data"),
                ("prompt", is_text or not self.prompt, "synthetic data are ids; give --data"),
                ("stream", not self.stream or (is_text and self.max_steps),
                 "is for text without a known end: give --data and --max_steps"),
                ("stream", not (self.stream and (self.num_samples or self.eval_fraction)),
                 "takes neither --num_samples nor --eval_fraction: 256 samples are held out"),
                ("pipeline_stages", ranks % self.pipeline_stages == 0,
                 f"takes as many processes or a multiple, and there are {ranks}: start more"),
                ("resume", self.resume in ("never", "auto") or checkpoint_notes(self.resume),
                 "no checkpoint there; give a checkpoints folder, or one checkpoint"),
                ("output_dir", existing.is_dir() and os.access(existing, os.W_OK),
                 f"cannot write to {existing}")):
            if not good and (first or name not in ("data", "resume", "output_dir")):
                value = " ".join(self.data) if name == "data" else getattr(self, name)
                raise UserError(f"--{name}{'' if value is True else f' {value}'}: {rule}")


def parse_settings(argv):
    """`Settings` from a command line; the defaults in a notebook, whose arguments are not ours."""
    if argv[0].endswith("kernel_launcher.py"):
        return Settings()
    parser = HfArgumentParser(Settings, allow_abbrev=False)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # of the launchers
    next(a for a in parser._actions if a.dest == "compare").nargs = "*"  # none named: the usual

    def error(message):
        raise UserError(f"{message}; see --help")

    parser.error = error
    settings, *_, unknown = parser.parse_args_into_dataclasses(
        argv[1:], return_remaining_strings=True, look_for_args_file=False)
    for name in unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        error(f"unknown argument {name}{did_you_mean(name.split('=')[0], flags)}")
    return settings

# %%
if __name__ == "__main__":
    settings = parse_settings(sys.argv)
    print0(f"Python {sys.version.split()[0]}, torch {torch.__version__}, deepspeed"
           f" {deepspeed.__version__}, transformers {transformers.__version__}")

# %% [markdown]
# ## Processes and devices
# A launcher starts one process per GPU and tells each its place in five environment variables.
# Without one, as in a notebook, DeepSpeed would look for MPI and fail on a missing `mpi4py`: what
# is missing gets the values of a single process and a free port. What is set is left alone. SLURM's
# `srun` sets variables of its own, which say the same.
#
# Trap: on a CPU, DeepSpeed compiles a shared-memory collective here (a minute, and a crash without
# a compiler). Declared incompatible, it gives way to gloo.

# %%
def local_world_size():
    """The number of processes on this host, as torchrun or the `deepspeed` launcher tells it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))


def came_from_outside(kind, error, peers):
    """Whether `error` ends this process without a traceback: Ctrl-C, or a connection that broke.

    Then the first process to wake says which ranks of its host were lost, and ends the others of
    its launcher. `peers`: the host, the launcher's pid and the pid of each rank.
    """
    if "gloo/transport" not in str(error):
        return kind is KeyboardInterrupt
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, who saw it as well
    deadline, lost = time.monotonic() + 3, []
    while not lost and time.monotonic() < deadline:  # a process outlasts its connections
        time.sleep(0.1)
        running = {process.pid for process in psutil.process_iter(["status"])
                   if process.info["status"] != psutil.STATUS_ZOMBIE}
        lost = [f"rank {rank} (process {pid})" for rank, (host, _, pid) in enumerate(peers)
                if host == socket.gethostname() and pid not in running]
    time.sleep(2 + dist.get_rank() % 16 / 8)  # the launcher should see the lost one end first
    why = re.sub(r"(?s).*?\.cc:\d+\] |\. .*", "", str(error))
    Fault(f"lost {', '.join(lost) or 'a rank, which its host or its own line names'} ({why})")
    for host, launcher, pid in peers:
        if (host, launcher) == (socket.gethostname(), os.getppid()) and pid in running - {
                os.getpid()}:
            os.kill(pid, signal.SIGKILL)
    return True


def leave():
    """At exit, end what would hold up the process, or abort it and so change its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report the next line
    for worker in multiprocessing.active_children():  # of a loader, after an error: see init_worker
        worker.kill()
    if dist.is_initialized():  # gloo's threads
        dist.destroy_process_group()
    gc.freeze()  # else Python would search all for garbage once more


def init_distributed():
    """Join the process group (nccl on GPUs, gloo on CPUs), once. Returns (rank, ranks)."""
    single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": get_free_port()}
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # srun itself, without a launcher
        slurm = {name[6:]: value for name, value in os.environ.items() if name[:6] == "SLURM_"}
        first = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["STEP_NODELIST"])  # gpu[03-07,11],big1
        single = {"RANK": slurm["PROCID"], "LOCAL_RANK": slurm["LOCALID"],
                  "WORLD_SIZE": slurm["STEP_NUM_TASKS"], "MASTER_ADDR": "".join(first.groups("")),
                  "MASTER_PORT": 20000 + int(slurm["JOB_ID"]) % 10000,
                  "LOCAL_WORLD_SIZE": re.match(r"\d+", slurm["STEP_TASKS_PER_NODE"])[0]}
    for name, value in single.items():
        os.environ.setdefault(name, str(value))
    deepspeed.utils.logger.setLevel("ERROR")  # the rest buries the run's own lines
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for library in ("torch.distributed", "transformers"):
        warnings.filterwarnings("ignore", module=library)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator, local_rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    if accelerator.device_name() == "cpu":  # each process its share of the cores, lest they collide
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size()))
    elif local_rank < accelerator.device_count():
        accelerator.set_device(local_rank)
    else:
        raise UserError(f"no GPU for process {local_rank} of this host, which has"
                        f" {accelerator.device_count()}: start one process per GPU")
    try:
        deepspeed.init_distributed(verbose=False, timeout=datetime.timedelta(minutes=30))
    except RuntimeError as error:
        raise UserError(f"cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                        f" ({error}); is the port taken (try another --master_port), or, on several"
                        " hosts, does GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME need to name the"
                        " network interface?") from error
    atexit.register(leave)
    peers, hook = [None] * dist.get_world_size(), sys.excepthook
    dist.all_gather_object(peers, (socket.gethostname(), os.getppid(), os.getpid()))
    sys.excepthook = lambda *error: came_from_outside(*error[:2], peers) or hook(*error)
    return dist.get_rank(), dist.get_world_size()

# %%
if __name__ == "__main__":
    rank, ranks = init_distributed()
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print0(f"{ranks} process(es) on {kind}, over {dist.get_backend()}")

# %% [markdown]
# ## `ds_config.json`, key by key
#
# - `train_micro_batch_size_per_gpu`: samples per process and forward pass.
# - `gradient_accumulation_steps`: forward passes per update. `train_batch_size`, their product with
#   the number of processes, is left out: with all three the file works for one number only.
# - `gradient_clipping`: largest global norm of the gradient.
# - `optimizer`: AdamW. `torch_adam` is torch's own, `fused` its one-kernel form. DeepSpeed's would
#   first be compiled, which needs nvcc.
# - `scheduler`: warmup, then a cosine. Say the `warmup_type` (or it is logarithmic) and
#   `warmup_min_ratio` (or it begins at 0). The script fills in `total_num_steps`, in updates.
# - `fp16`: dynamic loss scaling, from 2^`initial_scale_power`, halved at an overflow (the update is
#   skipped), doubled after `loss_scale_window` clean updates.
# - `bf16`: better from Ampere on. It has the range of fp32, so there is no loss to scale.
# - `zero_optimization`: `stage` 1 shards optimizer states, 2 gradients too, 3 parameters too.
# - `timers`: without `throughput`, DeepSpeed does not wait for the GPU at every micro-batch.
# - `tensorboard`, `wandb`, `csv_monitor`: monitors. DeepSpeed gives them learning rate and loss
#   scale, but not the loss: that is for the script to write.
#
# DeepSpeed ignores a misspelt top-level key in silence, and finds a wrong value only once data and
# model are built. So the config is rehearsed: an engine made from it trains one tiny layer for one
# step, while `ReadKeys` notes which keys DeepSpeed reads. What must be compiled is compiled here.

# %%
class ReadKeys(dict):
    """A config that notes in `read` the keys that are asked for, present or not."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)

    def keys(self):
        return self  # DeepSpeed asks `key in config.keys()`


def apply_settings(config, settings):
    """Put the DeepSpeed group of `settings` into `config`, and a precision that the device has."""
    zero, fp16, bf16 = (config.setdefault(key, {}) for key in ("zero_optimization", "fp16", "bf16"))
    if fp16.get("enabled") and bf16.get("enabled") and not settings.dtype:
        raise UserError("fp16 and bf16 are both enabled: choose one, or give --dtype")
    if settings.micro_batch or settings.grad_accum:
        config.pop("train_batch_size", None)
    for value, part, key in ((settings.micro_batch, config, "train_micro_batch_size_per_gpu"),
                             (settings.grad_accum, config, "gradient_accumulation_steps"),
                             (settings.zero_stage, zero, "stage"),
                             (settings.lr, config["optimizer"].setdefault("params", {}), "lr")):
        if value is not None:
            part[key] = value
    kind, _, folder = (settings.offload or "").partition(":")
    for part, kinds, lowest in (("offload_optimizer", ("optimizer", "all", "nvme"), 1),
                                ("offload_param", ("all", "nvme"), 3)):
        if kind:
            zero.pop(part, None)
        if kind in kinds:
            zero[part] = {"device": "nvme", "nvme_path": folder} if folder else {"device": "cpu"}
        if zero.get(part, {}).get("device", "none") != "none" and zero.get("stage", 0) < lowest:
            raise UserError(f"{part} needs ZeRO stage {lowest} or more: --zero_stage {lowest}")
    if settings.pipeline_stages > 1 and zero.get("stage", 0) != 1:
        raise UserError(f"--pipeline_stages {settings.pipeline_stages}: DeepSpeed's pipeline needs"
                        f" ZeRO stage 1, not {zero.get('stage', 0)}: --zero_stage 1")
    if settings.dtype is not None:
        fp16["enabled"], bf16["enabled"] = settings.dtype == "fp16", settings.dtype == "bf16"
    # By capability, since is_bf16_supported() is true even on a T4, which only emulates it.
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    if bf16.get("enabled") and old:
        fp16["enabled"], bf16["enabled"] = True, False
        print0("precision: fp16 instead of bf16, which GPUs have from Ampere on")
    no_fp16 = not get_accelerator().is_fp16_supported() and not settings.plan_gpus
    if fp16.get("enabled") and no_fp16:
        fp16["enabled"] = False
        print0("precision: fp32 instead of fp16, which this CPU does not have")
    if settings.compress_gradients and dist.get_world_size() > 1:
        if zero.get("stage") == 3 and torch.cuda.is_available():
            zero |= {"zero_quantized_gradients": True, "zero_quantized_weights": True}
        elif fp16.get("enabled") or bf16.get("enabled"):
            raise UserError("--compress_gradients: gradients of fp16 and bf16 travel in 16 bits"
                            " already; DeepSpeed sends fewer at ZeRO stage 3 on GPUs only")
        else:
            config["communication_data_type"] = "bf16"


def complete_schedule(config, total_updates):
    """Fill in the length of the schedule if it is open; shorten a warmup that outlasts the run."""
    scheduler = config.get("scheduler", {})
    params = scheduler.setdefault("params", {})
    kind = getattr(lr_schedules, scheduler.get("type", ""), None)
    if kind and "total_num_steps" in inspect.signature(kind).parameters:
        total = params.setdefault("total_num_steps", total_updates)
        if params.get("warmup_num_steps", 1000) > total // 2:
            params["warmup_num_steps"] = max(1, total // 10)
            print0(f"warmup: shortened to {params['warmup_num_steps']} of the {total} updates")


def gradient_norm(group, gradients, parameters):
    """Norm `()` of all ranks' shards: a few kernels, where ZeRO-1 and 2 start two per parameter."""
    shard = [g for g in gradients if not getattr(g, "_zero_padding", False)]
    norms = torch._foreach_norm(shard, dtype=torch.float32)  # in 16 bits it would overflow
    total = torch.stack([*norms, gradients[0].new_zeros((), dtype=torch.float32)]).square().sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def start_engine(model, parameters, config):
    """`deepspeed.initialize`, and some things that it leaves to be done. Returns the engine."""
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step()  # it lags by one call: the first update would run at rate 0
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False  # `train` notices, and names the update
    if hasattr(engine.optimizer, "check_overflow") and not engine.zero_use_cpu_optimizer():
        # ZeRO looks for inf and NaN twice: in each gradient, with hundreds of small kernels, and in
        # their global norm, where it finds the same, on all ranks at once. The norm is enough.
        engine.optimizer.check_overflow = lambda partition_gradients=True: None
        if engine.zero_optimization_stage() < 3 and not engine.pipeline_parallelism:
            engine.optimizer.get_grad_norm_direct = functools.partial(
                gradient_norm, engine.optimizer.dp_process_group)
        if engine.zero_optimization_stage() == engine.dp_world_size == 1:  # nothing to reduce
            engine.optimizer.reduce_gradients = (
                lambda **_: engine.optimizer.overlapping_partition_gradients_reduce_epilogue())
    return engine


def destroy_engine(engine):
    """`engine.destroy()`. A ZeRO-3 model DeepSpeed would keep, in a list and in a cache."""
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    gc.unfreeze()  # or it would not be seen
    for cache in gc.get_objects():
        if type(cache) is functools._lru_cache_wrapper and "params_to_release" in str(vars(cache)):
            cache.cache_clear()


Beta = Annotated[float, Field(ge=0, lt=1)]
JSON_TYPES = {  # of values that DeepSpeed would accept wrong, or refuse without naming the key
    dict: "optimizer scheduler params fp16 bf16 zero_optimization offload_optimizer offload_param"
          " tensorboard csv_monitor wandb comet",
    bool: "enabled torch_adam fused", str: "type", Literal["linear", "log"]: "warmup_type",
    Annotated[int, Field(ge=1)]: "train_micro_batch_size_per_gpu gradient_accumulation_steps"
                                 " total_num_steps hysteresis loss_scale_window",
    Annotated[int, Field(ge=0)]: "stage warmup_num_steps initial_scale_power",
    Annotated[FiniteFloat, Field(ge=0)]: "lr weight_decay gradient_clipping",
    Annotated[FiniteFloat, Field(gt=0)]: "eps",
    Annotated[float, Field(ge=0, le=1)]: "cos_min_ratio warmup_min_ratio",
    Annotated[list[Beta], Field(min_length=2, max_length=2)]: "betas"}


def check_types(part, path):
    """Refuse values in `part` of the JSON that are not of `JSON_TYPES`; make floats of integers."""
    for kind, keys in JSON_TYPES.items():
        for key in part.keys() & keys.split():
            try:
                part[key] = TypeAdapter(kind).validate_python(part[key], strict=True)
            except ValidationError as error:
                raise UserError(f"{path}: {key} cannot be {json.dumps(part[key])}:"
                                f" {error.errors()[0]['msg']}") from error
    for key, value in part.items():
        if isinstance(value, dict):
            check_types(value, f"{path}: {key}")


def load_ds_config(settings):
    """The DeepSpeed config of this run: the JSON with the overrides of `settings`, rehearsed."""
    here = Path(globals().get("__file__", "notebook")).parent
    path = Path(settings.deepspeed_config or here / "ds_config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--deepspeed_config {path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or "optimizer" not in config:
        raise UserError(f"{path}: must be a JSON object that has an optimizer")
    if '"auto"' in json.dumps(config):
        raise UserError(f'{path}: "auto" is for the Hugging Face Trainer; DeepSpeed wants values')
    check_types(config, path)
    apply_settings(config, settings)
    if settings.compress_gradients and dist.get_world_size() == 1:
        print0("compress_gradients: nothing, since one process sends no gradients")
    swaps = '"nvme"' in json.dumps(config["zero_optimization"])
    if swaps and not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible():
        raise UserError("offloading to NVMe reads through libaio, and compiles: run"
                        " apt-get install libaio-dev build-essential, pip install ninja")
    rehearsal = ReadKeys(copy.deepcopy(config))
    for name, package in (("tensorboard", "tensorboard"), ("csv_monitor", "csv"),
                          ("wandb", "wandb"), ("comet", "comet_ml")):
        if config.get(name, {}).get("enabled"):
            if importlib.util.find_spec(package) is None:
                raise UserError(f"{path}: {name} is enabled, so run: pip install {package}")
            rehearsal[name]["enabled"] = False
            if name in ("tensorboard", "csv_monitor"):
                config[name] = {"output_path": settings.output_dir, "job_name": name} | config[name]
    if settings.plan_gpus and get_accelerator().device_name() == "cpu":
        rehearsal["fp16"]["enabled"] = False  # a plan for another machine
    complete_schedule(rehearsal, 10**6)
    op = (swaps or '"zero_quantized_' in json.dumps(config["zero_optimization"])
          or not config["optimizer"].get("params", {}).get("torch_adam"))
    if op:
        print0("DeepSpeed compiles an op now, unless it has been before")
    try:
        layer = torch.nn.Linear(8, 8)
        if settings.compile:
            layer.compile()
        engine = start_engine(layer, None, rehearsal)
        engine.set_gradient_accumulation_boundary(True)
        row = torch.ones(8, device=engine.device, dtype=engine.get_data_types()[0])
        engine.backward(engine(row).sum())
        engine.step()
    except Exception as error:  # of many types, and all about the file
        builds, hint = ("build", "compil", "cuda", "ninja", "invalid literal"), ""
        if op and any(word in str(error).lower() for word in builds):
            hint = ('; set optimizer.params "torch_adam": true, or install a compiler, python3-dev,'
                    " ninja and, for a GPU, nvcc, and unset TORCH_CUDA_ARCH_LIST")
        elif settings.compile:
            hint = "; --compile needs a C++ compiler and python3-dev"
        raise UserError(f"{path}: {type(error).__name__}: {error}{hint}") from error
    for key in config:
        if key not in rehearsal.read:
            raise UserError(f"{path}: unknown key {key}{did_you_mean(key, rehearsal.read)}")
    config.pop("train_batch_size", None)  # it may stand for the accumulation
    config["train_micro_batch_size_per_gpu"] = engine.train_micro_batch_size_per_gpu()
    config["gradient_accumulation_steps"] = engine.gradient_accumulation_steps()
    config["zero_optimization"]["stage"] = engine.zero_optimization_stage()
    engine.destroy()
    return config

# %%
if __name__ == "__main__":
    ds_config = load_ds_config(settings)
    micro_batch = ds_config["train_micro_batch_size_per_gpu"]
    accumulation = ds_config["gradient_accumulation_steps"]
    print0(f"DeepSpeed config: {json.dumps(ds_config)}")

# %% [markdown]
# ## GPU memory
# *Allocated* is what tensors take, *reserved* what torch's allocator holds, *peak* the most that
# was allocated since the last report: memory runs out at a peak, not at an average. On a CPU all
# three are the resident memory (rss) of the process, and labelled so.

# %%
def memory_gib(label=None):
    """`{allocated, reserved, peak, total}` of this rank's device in GiB. Starts a new peak."""
    device = get_accelerator()
    sizes = {"allocated": device.memory_allocated(), "reserved": device.memory_reserved(),
             "peak": device.max_memory_allocated(), "total": device.total_memory()}
    sizes = {name: size / 2**30 for name, size in sizes.items()}
    device.reset_peak_memory_stats()
    if label:
        kind = "rss" if device.device_name() == "cpu" else "GPU memory"
        print0(f"{kind} {label}, GiB: " + ", ".join(f"{k} {v:.2f}" for k, v in sizes.items()))
    return sizes

# %% [markdown]
# ## Synthetic data with a known answer
# Random tokens that imitate text: frequent and rare ones (Zipf's law), and a rule to discover. Each
# token has one successor, which follows with probability `structure`; otherwise the next token is
# drawn afresh. The entropy of this source is known exactly: the floor, where a perfect model ends.
#
# Trap: one generator per process would give all ranks the same samples. Here a sample depends on
# (seed, index) only, so every rank, run and resume sees the same data.

# %%
class SyntheticTextDataset(Dataset):
    """`num_samples` samples `{"input_ids": int64 (seq_len,)}` of ids below `vocab_size`.

    `structure` is the probability of the rule, `zipf` the exponent of the frequencies (with both 0:
    uniform noise). `first` shifts the indices, to other samples of the same source.
    """

    def __init__(self, num_samples, seq_len, vocab_size, structure=0.9, zipf=1.0, seed=0, first=0):
        self.num_samples, self.seq_len, self.vocab_size = num_samples, seq_len, vocab_size
        self.structure, self.seed, self.first = structure, seed, first
        rng = np.random.default_rng(seed)
        self.cycle = rng.permutation(vocab_size)  # a token's successor is the next in this cycle,
        self.place = np.argsort(self.cycle)  # so k successors on is k places on
        frequency = rng.permutation((1.0 + np.arange(vocab_size)) ** -zipf)
        self.fresh = frequency / frequency.sum()  # probability of a fresh draw, by place
        self.below = np.cumsum(self.fresh)[:-1]

    def entropy_floor(self):
        """Loss of a perfect model in nats per token: H(next | last), averaged over a sample."""

        def x_log_x(x):
            return x * np.log(np.maximum(x, 1e-300))

        draw = (1 - self.structure) * self.fresh
        hit = np.roll(draw, -1)  # by last place: the chance that a fresh draw is the successor
        entropy = x_log_x(hit) - x_log_x(hit + self.structure) - x_log_x(draw).sum()
        at, floors = self.fresh, []  # the distribution of the last place, step by step
        for _ in range(self.seq_len - 1):
            floors.append(at @ entropy)
            at = self.structure * np.roll(at, 1) + draw
        return float(np.mean(floors))

    def follows_rule(self, tokens):
        """Share of the steps within the ids `tokens` that go to the successor."""
        return float((np.diff(self.place[np.asarray(tokens)]) % self.vocab_size == 1).mean())

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        rng, step = np.random.default_rng((self.seed, self.first + index)), np.arange(self.seq_len)
        draws = np.searchsorted(self.below, rng.random(self.seq_len), side="right")
        fresh = rng.random(self.seq_len) >= self.structure
        last = np.maximum.accumulate(np.where(fresh, step, 0))  # the step of the last fresh draw
        place = (draws[last] + step - last) % self.vocab_size
        return {"input_ids": torch.from_numpy(self.cycle[place])}

# %% [markdown]
# ## Real text
# Documents are tokenized once, each followed by an end-of-text token, joined, and cut into full
# blocks: no padding can leak into the loss. The blocks lie memory-mapped in the cache of
# `datasets`: a corpus larger than RAM costs no more memory, the ranks of a host share one copy, and
# a second run starts at once. The last blocks are held out.
#
# `--stream` stores nothing: each rank tokenizes its share of the files while it trains, in their
# order, over and over, and a checkpoint notes where. What it reads first is held out. If the files
# are no multiple of the ranks, each rank tokenizes all, and keeps every N-th block.
#
# Trap: labels are the input ids. GPT-2 in transformers shifts them; shifted twice, it learns t+2.

# %%
def load_tokenizer(name):
    """GPT-2's BPE, any folder or hub name, or `byte`: ByT5's 256 bytes and 128 special ids."""
    try:
        byte = name == "byte"
        tokenizer = transformers.ByT5Tokenizer() if byte else AutoTokenizer.from_pretrained(name)
        if tokenizer.eos_token_id is None or not tokenizer.tokenize("a"):
            raise ValueError("it has no end-of-text token, or no vocabulary")
    except Exception as error:  # of the hub, of files, of formats: other types in each version
        raise UserError(f"--tokenizer {name}: not usable, here or on the hub"
                        f" ({str(error)[:200]}); byte needs no download") from error
    tokenizer.model_max_length = 10**9  # no document is too long: blocks are cut afterwards
    return tokenizer


def read_text(files):
    """Yield text files in pieces of some 16 KiB that end with a line; `last` marks a file's end."""
    for path, *_ in files:
        with open(path, encoding="utf-8") as file:
            piece = "".join(file.readlines(2**14))
            while piece:
                following = "".join(file.readlines(2**14))
                yield {"text": piece, "last": not following}
                piece = following


@contextlib.contextmanager
def reading(names):
    """Make a `UserError` of what goes wrong with text, here or in the process of a loader."""
    try:
        yield
    except Exception as error:  # of the hub, of files, of formats: other types in each version
        while error.__cause__:  # datasets wraps what went wrong; the innermost cause says it best
            error = error.__cause__
        kind, text = type(error).__name__, str(error)
        if text.startswith("Caught"):  # then it has the traceback of the loader's process
            kind, _, text = text.strip().splitlines()[-1].partition(": ")
        raise UserError(f"--data {' '.join(names)}: neither readable files nor a hub dataset with a"
                        f" column 'text' ({kind}: {text[:200]})") from error


def load_text_dataset(names, tokenizer, seq_len, stream=False):
    """Blocks `{"input_ids": int64 (seq_len,)}` of text files, a document each, or of the rows of
    .json(l), .csv or .parquet files or a hub dataset, a document each in the column `text`. As a
    `stream`, nothing is read yet."""
    import datasets  # here, since it takes a second for which a synthetic run need not wait

    def pack(rows):
        for before, text in zip(["the start", *rows["text"]], rows["text"]):
            if not isinstance(text, str):
                raise ValueError(f"a row has the text {text!r}, after {str(before)[:40]!r}")
        ids = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        ends = rows.get("last", [True] * len(ids))
        stream = [i for row, end in zip(ids, ends) for i in row + [tokenizer.eos_token_id] * end]
        starts = range(0, len(stream) - seq_len + 1, seq_len)
        return {"input_ids": [stream[start:start + seq_len] for start in starts]}

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    files = find_files(names)
    kinds = {FORMATS.get(Path(path).suffix, "text") for path in files}
    with reading(names):
        if files and not any(map(os.path.getsize, files)):
            raise ValueError("empty")
        if kinds == {"text"}:  # size and time name the cache, so that an edited file is read anew
            stamped = [(path, os.path.getsize(path), os.path.getmtime(path)) for path in files]
            source = datasets.IterableDataset if stream else datasets.Dataset
            documents = source.from_generator(
                read_text, gen_kwargs={"files": stamped}, features=datasets.Features(
                    {"text": datasets.Value("string"), "last": datasets.Value("bool")}))
        elif files:
            documents = datasets.load_dataset(kinds.pop(), data_files=files, split="train",
                                              streaming=stream)
        else:
            documents = datasets.load_dataset(  # its name, its configuration
                *names, split="train", streaming=stream)
        row = datasets.Sequence(datasets.Value("int32"), length=seq_len)
        columns = documents.column_names or list(next(iter(documents)))
        size = 100 if "last" in columns else 1000  # pieces of 16 KiB, or rows, often short
        blocks = documents.map(pack, batched=True, batch_size=size, remove_columns=columns,
                               features=datasets.Features({"input_ids": row}))
    return blocks.with_format("torch")


class TextStream(IterableDataset):
    """A rank's share of the blocks, over and over: `{"input_ids": int64 (seq_len,), "position"}`.

    `position` is where the stream goes on after this sample. Set it to begin there; each later pass
    begins at `start`, after what is held out, which is what is read until `start` is set.
    """

    def __init__(self, names, tokenizer, seq_len, rank, ranks):
        from datasets.distributed import split_dataset_by_node

        blocks = load_text_dataset(names, tokenizer, seq_len, stream=True)
        self.names, self.blocks = names, split_dataset_by_node(blocks, rank, ranks)
        self.position = self.start = None

    def __iter__(self):
        position = self.position
        while True:
            blocks, begin = copy.deepcopy(self.blocks), position
            if begin:
                blocks.load_state_dict(begin)
            for block in blocks:
                position = blocks.state_dict()
                yield {"input_ids": block["input_ids"], "position": position}
            if self.start is None or position is begin is self.start:  # all is held out
                raise UserError("--data: too little text in the share of this process; leave out"
                                " --stream")
            position = self.start


def build_stream(settings, seq_len, tokenizer):
    """`(training, held_out)`: a `TextStream`, and some 256 samples that come before it."""
    ranks = dist.get_world_size() // settings.pipeline_stages
    stream = TextStream(settings.data, tokenizer, seq_len, dist.get_rank() % ranks, ranks)
    if len(find_files(settings.data)) % ranks:
        print0("stream: each process tokenizes all of the text and keeps its share, since its"
               f" files are no multiple of {ranks}")
    with reading(settings.data):
        first = list(itertools.islice(stream, math.ceil(256 / ranks)))
    stream.position = stream.start = first[-1]["position"]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [{"input_ids": sample["input_ids"]} for sample in first])
    return stream, list(itertools.chain(*everyones[:ranks]))


def build_datasets(settings, seq_len, vocab_size, tokenizer):
    """`(training, held_out)` samples `{"input_ids": int64 (seq_len,)}`. Called by all ranks."""

    def held_out_of(size):  # no more than serves: a share of a large text takes long to evaluate
        share = math.ceil(size * (settings.eval_fraction or 0.05))
        return share if settings.eval_fraction else min(share, 1024)

    if settings.data == ["synthetic"]:
        size = settings.num_samples or 4608
        source = {"seq_len": seq_len, "vocab_size": min(1024, vocab_size), "seed": settings.seed}
        return (SyntheticTextDataset(size, **source),
                SyntheticTextDataset(held_out_of(size), **source, first=size))
    if settings.stream:
        return build_stream(settings, seq_len, tokenizer)
    blocks, sizes = [], [None] * dist.get_world_size()
    patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=24))
    for turn in (True, False):  # one process of a host fills the cache, then the others read it
        if turn == (os.environ["LOCAL_RANK"] == "0"):
            blocks = load_text_dataset(settings.data, tokenizer, seq_len)
        dist.all_gather_object(sizes, len(blocks), group=patient)
    if len(set(sizes)) > 1:
        raise UserError(f"--data: the hosts do not see the same files: {sizes} samples by rank")
    rest = len(blocks) - held_out_of(len(blocks))
    training = blocks.select(range(min(settings.num_samples or rest, rest)))
    return training, blocks.select(range(rest, len(blocks)))

# %% [markdown]
# ## The shape of the model
# The presets are GPT-2's published sizes. Three choices make the same function faster than the
# defaults of transformers: a vocabulary padded to a multiple of 64, which matrix units like,
# `gelu_pytorch_tanh`, which is `gelu_new` in one kernel, and no dropout.

# %%
PRESETS = {"nano": (2, 4, 128), "124M": (12, 12, 768), "355M": (24, 16, 1024),
           "774M": (36, 20, 1280), "1.5B": (48, 25, 1600)}  # layers, heads, width


def gpt2_config(settings):
    """`(GPT2Config, tokenizer)` of a preset or a model to fine-tune; for synthetic data, None."""
    name = settings.model or ("nano" if get_accelerator().device_name() == "cpu" else "124M")
    tokenizer, choices = None, {"activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0,
                                "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if settings.data != ["synthetic"]:
        tokenizer = load_tokenizer(settings.tokenizer or ("gpt2" if name in PRESETS else name))
    if name in PRESETS:
        layers, heads, width = PRESETS[name]
        vocabulary = len(tokenizer) if tokenizer else 1024 if name == "nano" else 50257
        end = tokenizer.eos_token_id if tokenizer else None
        length = settings.seq_len or (128 if name == "nano" else 1024)
        return GPT2Config(n_layer=layers, n_head=heads, n_embd=width, n_positions=length,
                          vocab_size=math.ceil(vocabulary / 64) * 64, bos_token_id=end,
                          eos_token_id=end, **choices), tokenizer
    try:
        config = AutoConfig.from_pretrained(name, **choices)
    except Exception as error:  # of the hub, of files, of formats: other types in each version
        raise UserError(f"--model {name}: neither {', '.join(PRESETS)} nor a model, here or on the"
                        f" hub ({str(error)[:200]})") from error
    if config.model_type != "gpt2":
        raise UserError(f"--model {name}: is of type {config.model_type}; this file trains gpt2")
    if (settings.seq_len or 0) > config.n_positions:
        raise UserError(f"--seq_len {settings.seq_len}: {name} has {config.n_positions} positions")
    if tokenizer and len(tokenizer) > config.vocab_size:
        raise UserError(f"--tokenizer: has {len(tokenizer)} ids, {name} only {config.vocab_size}")
    return config, tokenizer

# %%
if __name__ == "__main__":
    config, tokenizer = gpt2_config(settings)
    seq_len = settings.seq_len or config.n_positions
    print0(f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, vocabulary"
           f" {config.vocab_size}, {seq_len} tokens per sample")

# %% [markdown]
# ## What will fit
# Before anything is allocated, the peak of memory is reckoned from the shapes, for P parameters, N
# processes and b bytes per number (2, or 4 in fp32):
#
# - parameters bP, gradients bP, and AdamW's states 12P (the weights in fp32, two moments). ZeRO
#   divides by N: stage 1 the states, 2 the gradients too, 3 the parameters too;
# - activations: 16.2 numbers per token, layer and unit of width, compiled 10; with checkpointing,
#   1 and one layer's 16.2. Logits: the vocabulary, per token of a chunk, and as much for their
#   gradient; and the gradient of the output matrix;
# - the buckets, in which gradients travel between processes.
#
# They do not all exist at once: the peak is the highest of four moments. Offloading moves states to
# the host, in pinned memory, which torch rounds up to powers of two: there it may not fit.

# %%
CHUNKS = 4  # of the tokens, in the loss: more take less memory, and more time


def bucket_size(parameters):
    """Elements that travel at once: DeepSpeed's 5e8 would cost most models more than ZeRO saves."""
    return min(parameters, max(50_000_000, parameters // 8), 500_000_000)


def plan_memory(config, settings, ds_config, ranks, parameters):
    """The peak of memory in GiB by part: `(device, host, checkpoint)`, two dicts and a number.

    `host` is per process. `parameters` is their number. The coefficients were measured on an H200.
    """
    zero, GiB = ds_config["zero_optimization"], 2**30
    stage, accumulate = zero["stage"], ds_config["gradient_accumulation_steps"] > 1
    offload, offload_all = (zero.get(part, {}).get("device", "none") != "none"
                            for part in ("offload_optimizer", "offload_param"))
    on_gpu = torch.cuda.is_available() or settings.plan_gpus
    framework = 0.06 if on_gpu else 0.45 if settings.data == ["synthetic"] else 0.54  # `datasets`
    half = any(ds_config[name].get("enabled") for name in ("fp16", "bf16"))
    width, P, b = config.n_embd, parameters / GiB, 2 if half else 4
    tokens = (settings.seq_len or config.n_positions) * ds_config["train_micro_batch_size_per_gpu"]
    shard = [P / ranks if stage >= least else P for least in range(4)]  # at this stage and above
    compiled = settings.compile and stage < 3
    layer = (10.1 if compiled else 16.2) * width * tokens * b / GiB
    logits = config.vocab_size * math.ceil(tokens / CHUNKS) * b / GiB
    layers = layer * config.n_layer
    if settings.gradient_checkpointing:
        layers = (config.n_layer + 2) * width * tokens * b / GiB
    embedding = b * config.vocab_size * width / GiB
    gathered = embedding if stage == 3 and (ranks > 1 or offload_all) else 0
    bucket = b * zero.get("reduce_bucket_size", bucket_size(parameters)) / GiB if stage else 0
    states = (12 if half or stage else 8) * shard[1]
    gradients = 0 if offload and stage > 1 else b * shard[2]
    lasting = gradients if accumulate or stage == 3 else 0  # between two backward passes
    lasting_bucket = bucket if stage == 3 or (stage == 1 and accumulate) else 0
    device = {"parameters": (0 if offload_all else b * shard[3]) + gathered
              + (embedding if offload and stage < 3 else 0),
              "optimizer states": 0 if offload else states, "framework": framework}
    moments = (  # a backward pass begins, meets the first gradients, ends; the update
        {"activations": layers, "logits and loss": 2 * logits + embedding, "gradients": lasting,
         "buckets": lasting_bucket},
        {"activations": layers * (1 - bucket / (b * P) if stage == 3 else 1) + layer,
         "gradients": lasting + embedding, "buckets": bucket * (2 if stage == 3 else 1)},
        {"activations": layer, "gradients": gradients + embedding, "buckets": bucket},
        {"gradients": gradients + (0 if offload else (8 - b) * shard[1]),
         "buckets": bucket if stage == 3 else 0})
    device |= max(moments, key=lambda parts: sum(parts.values()))

    def pinned(size):
        return 2 ** math.ceil(math.log2(size))

    host = {"process": 2.1 if on_gpu else framework}
    if settings.model not in (None, *PRESETS):
        host["the model as it is read"] = 4 * P
    if '"nvme"' in json.dumps(zero):
        host["buffers to NVMe"] = 2.8
    elif offload:
        host["offloaded states"] = (8 if stage < 3 else 15) * shard[1]
        buffers = [4, 4, b] + [b] * (stage == 2 and accumulate) if stage < 3 else [4, b]
        host["pinned buffers"] = sum(pinned(size * shard[1]) for size in buffers)
    elif stage == 3:
        host["the model as it is sharded"] = b * shard[3]
    if offload_all:
        host["pinned parameters"] = pinned(b * shard[3]) + 1.4 * b * shard[3]
    return device, host, (12 + b) * P


TACTICS = ("", "gradient_checkpointing=true", "zero_stage=2", "zero_stage=3",  # by cost in time
           "zero_stage=1 offload=optimizer",
           "zero_stage=1 offload=optimizer gradient_checkpointing=true",
           "zero_stage=2 offload=optimizer",
           "zero_stage=2 offload=optimizer gradient_checkpointing=true",
           "zero_stage=3 offload=all", "zero_stage=3 offload=all gradient_checkpointing=true")


def command_line(settings, changes):
    """The arguments that give `settings` with the `changes`, "NAME=VALUE NAME=VALUE ..."."""
    chosen = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
              if getattr(settings, field.name) not in (field.default, ["synthetic"])}
    for change in changes.split():
        name, _, value = change.partition("=")
        if not (name and value):
            raise UserError(f"{changes!r}: takes NAME=VALUE of settings, and no spaces in a value")
        chosen[name] = value
    return [text for name, value in chosen.items() for text in  # "=", for a value like -a
            ((f"--{name}", *value) if isinstance(value, list) else (f"--{name}={value}",))]


def cheapest_tactic(fits, settings, ds_config):
    """The first of `TACTICS` under which a micro-batch `fits`, as arguments that keep the update's
    samples; None if there is none."""
    micro_batch = ds_config["train_micro_batch_size_per_gpu"]
    samples = micro_batch * ds_config["gradient_accumulation_steps"]
    offloads = {"offload_optimizer", "offload_param"} & ds_config["zero_optimization"].keys()
    for tactic in TACTICS:
        if offloads and "offload" not in tactic:
            tactic += " offload=none"
        changed = parse_settings(["", *command_line(settings, tactic)])
        for size in range(min(micro_batch, 2**16), 0, -1):  # a larger one fits nowhere
            if samples % size == 0 and fits(changed, size):
                tactic += f" micro_batch={size} grad_accum={samples // size}"
                return re.sub(r"(\w+)=", r"--\1 ", tactic.strip())
    return None


def print_plan(config, settings, ds_config, ranks, local_ranks):
    """Print what `ranks` processes take, `local_ranks` of them a host, and what would help."""
    if settings.pipeline_stages > 1:
        return print0("plan: none for a pipeline, of which each stage has its share of the blocks")
    with torch.device("meta"):  # shapes only
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    elsewhere = settings.plan_gpus and not torch.cuda.is_available()  # there a T4 has 15 GiB
    total = settings.memory_limit or (
        15 if elsewhere else get_accelerator().total_memory() / 2**30)
    free = math.inf if elsewhere else psutil.virtual_memory().available / 2**30

    def reckon(changed, micro_batch=None):
        json_of_it = copy.deepcopy(ds_config)
        apply_settings(json_of_it, dataclasses.replace(
            changed, dtype=None, micro_batch=micro_batch, grad_accum=None))
        return plan_memory(config, changed, json_of_it, ranks, parameters)

    def fits(changed, micro_batch):
        device, host, _ = reckon(changed, micro_batch)
        return (sum(device.values()) <= 0.95 * total  # a rest for fragments, and for cuBLAS
                and sum(host.values()) * local_ranks <= free)

    device, host, checkpoint = reckon(settings)
    for place, parts, count, most in ((f"device, each of {ranks}", device, 1, total),
                                      (f"host, for {local_ranks}", host, local_ranks, free)):
        limit = f" of {most:.1f}" if most < math.inf else ""
        print0(f"plan: {sum(parts.values()) * count:.2f}{limit} GiB of {place} process(es): "
               + ", ".join(f"{part} {size:.2f}" for part, size in parts.items() if size > 0.005))
    largest = bisect.bisect_left(range(1, 2**16), True, key=lambda size: not fits(settings, size))
    print0(f"plan: a checkpoint takes {checkpoint:.2f} GiB, and {settings.keep_checkpoints} stay;"
           f" the largest micro-batch that fits is {largest}")
    if largest < ds_config["train_micro_batch_size_per_gpu"]:
        tactic = cheapest_tactic(fits, settings, ds_config)
        print0("plan: it does NOT fit; " + (
            f"the cheapest tactic that should: {tactic}" if tactic else
            "no tactic helps: a smaller --model or --seq_len, or more GPUs"))

# %%
if __name__ == "__main__":
    if settings.memory_limit and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, settings.memory_limit * 2**30 / get_accelerator().total_memory()))
    planned = settings.plan_gpus or ranks
    print_plan(config, settings, ds_config, planned,
               min(planned, 8) if settings.plan_gpus else local_world_size())
    if settings.plan:
        sys.exit()

# %% [markdown]
# ## What each tactic costs, measured
# `--compare` trains for a few updates under each of some settings, in fresh processes through the
# real launcher, and shows what it pays in speed for what it saves in memory. The loss must be the
# same in all rows of one precision: also for half the micro-batch at twice the accumulation.

# %%
LOG_LINE = re.compile(r"step +(\d+)/.* loss (\S+) .* ([\d,]+) tok/s .* peak (\S+) GiB")


def measure(command, updates=5):
    """Run `command`, which trains and logs every update, up to some updates. Returns a row."""
    row, speeds, output, began = {}, [], [], time.perf_counter()
    of_launchers = re.compile("RANK|WORLD_SIZE|MASTER_|LOCAL_|CROSS_|GROUP_|ROLE_|TORCHELASTIC")
    environment = {name: text for name, text in os.environ.items() if not of_launchers.match(name)}
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for line in process.stdout:
            output.append(line.strip())
            if planned := re.match(r"plan: (\S+) .*GiB of (device|host),", line):
                row[f"{planned[2]} planned"] = float(planned[1])
            if logged := LOG_LINE.search(line):
                speeds.append(float(logged[3].replace(",", "")))
                row.setdefault("start-up", time.perf_counter() - began)
                row["device"] = max(row.get("device", 0), float(logged[4]))
                if logged[1] == str(updates):
                    launch, = psutil.Process(process.pid).children()
                    states = [Path(f"/proc/{rank.pid}/status").read_text()
                              for rank in launch.children()]
                    peaks = [int(re.search(r"VmHWM:\s+(\d+)", state)[1]) for state in states]
                    return row | {"tokens/s": float(np.median(speeds[2:])), "failed": None,
                                  "host": sum(peaks) / 2**20, "loss": float(logged[2])}
        errors = [line for line in output if "rror:" in line] or output[-1:] or ["no output"]
        text = "\n".join(output)
        return row | {"failed": "out of GPU memory" if "CUDA out of memory" in text else
                      "out of host memory" if "return code = -9" in text else errors[0][:120]}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(settings, ds_config, ranks):
    """Measure `settings.compare` and write `compare/compare.{json,md,png}`. Called by rank 0."""
    script = Path(globals().get("__file__", "train_gpt2_deepspeed.py")).absolute()
    if not script.is_file():
        raise UserError(f"--compare: starts {script}, which is not there; run it beside the file")
    half, odd = divmod(ds_config["train_micro_batch_size_per_gpu"], 2)
    twice = ds_config["gradient_accumulation_steps"] * 2
    usual = (*TACTICS, "zero_stage=0", "dtype=fp32",
             f"micro_batch={half} grad_accum={twice}")
    base = dataclasses.replace(settings, compare=None, resume="never", stop_after=None)
    own = {"compare", "plan", "plan_gpus", "output_dir", "resume", "log_every", "max_steps",
           "stop_after", "save_every"}
    rows, arguments, folder = {}, {}, Path(settings.output_dir, "compare")
    for name in settings.compare or usual[:-1 if odd else None]:
        if own & set(re.findall(r"(\w+)=", name)):
            raise UserError(f"--compare {name!r}: sets {', '.join(sorted(own))} itself")
        arguments[name or "as set"] = command_line(base, name)
        parse_settings(["", *command_line(base, name)])  # refuse what is wrong before anything runs
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        for name, flags in tqdm(arguments.items(), unit="run"):
            rows[name] = measure([
                sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks),
                "--master_port", str(get_free_port()), script, *flags, "--output_dir", scratch,
                "--log_every", "1", "--max_steps", "1000", "--save_every", "1000"])
            write_comparison(rows, folder)
    print0((folder / "compare.md").read_text())
    if all(row["failed"] for row in rows.values()):
        raise Fault("--compare: no setting got to an update")


@contextlib.contextmanager
def chart(path, xlabel, ylabel, height=4):
    """Yield the axes of a chart with a legend below, which is then written to the PNG `path`."""
    from matplotlib.figure import Figure  # not pyplot, which may want a display

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    yield axes
    if axes.lines:
        figure.legend(loc="outside lower left")
    figure.savefig(path, dpi=120, bbox_inches="tight")  # a long name may be wider than the axes


def write_comparison(rows, folder):
    """Write the `rows` as compare.json, compare.md and compare.png into `folder`."""
    (folder / "compare.json").write_text(json.dumps(rows, indent=1))
    formats = {"tokens/s": ",.0f", "device": ".2f", "device planned": ".2f", "host": ".2f",
               "host planned": ".2f", "loss": ".4f", "start-up": ".1f"}
    table = ["| setting | tokens/s | device GiB | planned | host GiB | planned | loss"
             " | start-up s |", "|---" * 8 + "|"]
    expected = {}  # the loss, by model: the first that has one sets it
    with chart(folder / "compare.png", "peak of device memory (GiB)", "tokens per second",
               height=4 + 0.25 * len(rows)) as axes:
        for number, (name, row) in enumerate(rows.items(), 1):
            cells = [format(row[column], form) if column in row else ""
                     for column, form in formats.items()]
            if row["failed"]:
                cells[0] = row["failed"]
            else:
                model = tuple(re.findall(r"model=\S+|seq_len=\S+", name))
                loss = expected.setdefault(model, row["loss"])
                if not math.isclose(row["loss"], loss, rel_tol=0.01):
                    cells[5] += " (differs)"
                point = (row["device"], row["tokens/s"])
                axes.plot(*point, "o", label=f"{number}  {name}")
                axes.annotate(str(number), point, textcoords="offset points", ha="center",
                              xytext=(12 * math.cos(number), 12 * math.sin(number)))
            table.append(f"| {name} | {' | '.join(cells)} |")
        axes.set(xlim=(0, axes.get_xlim()[1] * 1.1), ylim=(0, axes.get_ylim()[1] * 1.1))
    (folder / "compare.md").write_text("\n".join(table) + "\n")

# %%
if __name__ == "__main__":
    if settings.compare is not None:
        dist.destroy_process_group()
        try:
            if rank == 0:
                compare(settings, ds_config, ranks)
        except KeyboardInterrupt:  # the rows that are done are written
            sys.exit(130)
        sys.exit()

# %% [markdown]
# ## Resuming
# Each checkpoint has a note, `run.json`: what was trained, and the files that belong to it. The
# newest whole checkpoint counts; a damaged one is passed over. A run may continue on other ranks
# and at another ZeRO stage: an update keeps its samples, so the accumulation follows the ranks.

# %%
def lock_output(folder):
    """Claim `folder` for this run. Returns an open file, to be kept; a killed process frees it."""
    owner = [f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}"]
    dist.broadcast_object_list(owner)
    path, lock = Path(folder, ".lock"), None
    if dist.get_rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(path, "a+")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = f"in use by {path.read_text()}" if lock else error
            raise UserError(f"--output_dir {folder}: {why}") from error
        lock.truncate(0)
        print(*owner, file=lock, flush=True)
    dist.barrier()
    if not (path.is_file() and owner[0] in path.read_text()):
        raise UserError(f"--output_dir {folder}: all hosts must share it, for the checkpoints")
    return lock


def find_checkpoint(settings):
    """`(folder, note)` of the newest whole checkpoint, or `(None, None)`. Called by all ranks."""
    found = [(None, None)]
    auto = settings.resume in ("never", "auto")
    root = Path(settings.output_dir, "checkpoints") if auto else settings.resume
    if dist.get_rank() == 0 and settings.resume != "never":
        for path in checkpoint_notes(root):
            try:
                note = json.loads(path.read_text())
                for name, size in (note["run"] and note["files"]).items():
                    file = path.parent / name
                    if file.stat().st_size != size:
                        raise ValueError(f"{name} is damaged")
                    if file.suffix == ".pt":  # its checksums, and what torch makes of its headers
                        if zipfile.ZipFile(file).testzip():
                            raise ValueError(f"{name} is damaged")
                        torch.load(file, map_location="cpu", mmap=True, weights_only=False)
                found = [(str(path.parent), note)]
                break
            except Exception as error:  # of damaged files, of any type
                print0(f"resume: {path.parent} is not whole ({error}); trying the one before")
    dist.broadcast_object_list(found)
    if not auto and not found[0][0]:
        raise UserError(f"--resume {settings.resume}: no whole checkpoint there")
    print0(f"resume: {settings.resume}, {found[0][0] or 'starting fresh'}")
    if settings.resume == "never" and checkpoint_notes(root):
        print0(f"resume: the checkpoints of an earlier run in {root} will give way to new ones")
    return found[0]


def checksum(samples):
    """CRC-32 of the ids of the first 256 `samples`: whether the data are what they were."""
    first = [samples[index]["input_ids"] for index in range(min(256, len(samples)))]
    return zlib.crc32(torch.stack(first).numpy().tobytes())


def continue_as(note, run, ds_config, ranks):
    """Check that `run` is the training of `note`, and set up `ds_config` to continue it."""
    for name, value in run.items():
        if (was := note["run"].get(name)) != value:
            raise UserError(f"--resume: the {name} there is {was}, that of this run {value}: give"
                            " the same, or another --output_dir")
    if "nvme" in json.dumps(ds_config["zero_optimization"]) or "offloaded_tensors" in str(
            note["files"]):  # of a run that swapped
        raise UserError("--resume: DeepSpeed does not restore the optimizer from NVMe: its update"
                        " count and small states are lost; use --offload all to be able to resume")
    samples, micro_batch = note["samples_per_update"], ds_config["train_micro_batch_size_per_gpu"]
    ds_config["gradient_accumulation_steps"], rest = divmod(samples, micro_batch * ranks)
    if rest:
        raise UserError(f"--resume: an update of {samples} samples does not divide into {ranks}"
                        f" (processes) x {micro_batch} (micro-batch): change --micro_batch")
    before, now = note["zero_stage"], ds_config["zero_optimization"]["stage"]
    if before != now and 0 in (before, now):
        raise UserError(f"--resume: DeepSpeed cannot convert ZeRO stage {before} to {now}")
    precision = [ds_config[name].get("enabled", False) for name in ("fp16", "bf16")]
    if now and (note["ranks"], before, note["precision"]) != (ranks, now, precision):
        ds_config["checkpoint"] = ds_config.get("checkpoint", {}) | {"load_universal": True}

# %%
if __name__ == "__main__":
    lock = None  # of an earlier run of this cell
    lock = lock_output(settings.output_dir)
    data_ranks = ranks // settings.pipeline_stages  # that many pipelines share out the data
    data_rank = rank % data_ranks  # neighbours are at the same stage of different pipelines
    training, held_out = build_datasets(settings, seq_len, config.vocab_size, tokenizer)
    size = 0 if settings.stream else len(training)  # a stream has none
    print0(f"{size or 'a stream of'} training samples, {len(held_out)} held out")
    run = {"layers": config.n_layer, "heads": config.n_head, "width": config.n_embd,
           "vocabulary": config.vocab_size, "seq_len": seq_len, "data": settings.data,
           "number of samples": [size, len(held_out)], "seed": settings.seed,
           "pipeline_stages": settings.pipeline_stages,
           "number of streams (0 without --stream)": data_ranks if settings.stream else 0,
           "size of the files": sum(map(os.path.getsize, find_files(settings.data))),
           "checksum of held-out samples": checksum(held_out)}
    checkpoint, note = find_checkpoint(settings)
    if checkpoint:
        continue_as(note, run, ds_config, data_ranks)
        accumulation = ds_config["gradient_accumulation_steps"]
        if settings.stream:
            training.position = torch.load(Path(checkpoint, f"stream{rank}.pt"))

# %% [markdown]
# ## Batches for every rank
# An update takes micro-batch × accumulation × processes samples, in an order that is new in each
# epoch and the same for any number of processes: the number of updates tells where a run stands.
#
# Traps: the loader of `deepspeed.initialize(training_data=…)` repeats the first epoch's order for
# ever, a plain `DataLoader` gives all ranks the same samples, and micro-batches left over by an
# epoch spill into the first update of the next.

# %%
class UpdateSampler(Sampler):
    """A rank's micro-batches of indices, of the updates `begin` to `end` - 1, over all epochs.

    `updates` is their number in an epoch of `size` samples, whose rest is left out.
    """

    def __init__(self, size, micro_batch, accumulation, ranks, rank, seed):
        self.size, self.shape, self.seed = size, (accumulation, micro_batch), seed
        self.share = slice(rank, None, ranks)
        self.updates = size // (micro_batch * accumulation * ranks)
        self.begin, self.end = 0, self.updates

    def __iter__(self):
        for epoch in range(self.begin // self.updates, math.ceil(self.end / self.updates)):
            random = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.size, generator=random).numpy()[self.share]
            first, per_update = epoch * self.updates, math.prod(self.shape)
            for update in range(max(self.begin, first), min(self.end, first + self.updates)):
                start = (update - first) * per_update
                yield from order[start:start + per_update].reshape(self.shape).tolist()


def collate(samples):
    """A micro-batch `{"input_ids": int64 (micro_batch, seq_len), "position"}` of samples."""
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples]),
            "position": samples[-1].get("position")}


def build_dataloader(dataset, micro_batch, accumulation, ranks, rank, seed):
    """A loader of micro-batches for `rank`, with its number of `updates` per epoch."""
    streaming, how = isinstance(dataset, IterableDataset), {"batch_size": micro_batch}
    if not streaming:
        sampler = UpdateSampler(len(dataset), micro_batch, accumulation, ranks, rank, seed)
        how = {"batch_sampler": sampler}
        if not sampler.updates:
            raise UserError(f"one update takes {micro_batch} (micro-batch) x {accumulation}"
                            f" (accumulation) x {ranks} (processes) samples, and the data has"
                            f" {len(dataset)}: lower --micro_batch, --grad_accum, --seq_len")
    on_gpu = torch.cuda.is_available()  # a process of its own makes batches while the GPU computes
    loader = DataLoader(dataset, **how, pin_memory=on_gpu, num_workers=int(on_gpu),
                        worker_init_fn=init_worker, collate_fn=collate,
                        prefetch_factor=2 * accumulation if on_gpu else None)
    loader.updates = 1000 if streaming else sampler.updates  # a stream has no epochs
    return loader


# The loader's process is a fork of this one. There, garbage from the GPU, say an earlier engine,
# would abort when collected.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def init_worker(worker):
    """In the loader's process: ignore Ctrl-C, which reaches it too, as the update goes on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def updates(loader, accumulation, begin, end):
    """Yield `(epoch, micro_batches)` of the updates `begin` to `end` - 1, over all epochs."""
    streaming = isinstance(loader.dataset, IterableDataset)
    if not streaming:
        loader.batch_sampler.begin, loader.batch_sampler.end = begin, end
    batches = iter(loader)
    for update in range(begin, end):
        with reading(loader.dataset.names) if streaming else contextlib.nullcontext():
            micro_batches = [next(batches) for _ in range(accumulation)]
        yield update // loader.updates, micro_batches

# %%
if __name__ == "__main__":
    loader = build_dataloader(training, micro_batch, accumulation, data_ranks, data_rank,
                              settings.seed)
    total_updates = settings.max_steps or settings.epochs * loader.updates
    samples = micro_batch * accumulation * data_ranks
    unit = "processes" if ranks == data_ranks else "pipelines"
    print0("one update ="
           f" {micro_batch} (micro-batch) x {accumulation} (accumulation) x {data_ranks} ({unit}) ="
           f" {samples} samples = {samples * seq_len:,} tokens\n"
           f"{loader.updates} updates per epoch, {total_updates} in all")
    ids = next(iter(loader))["input_ids"][0]
    text = tokenizer.decode(ids) if tokenizer else str(ids.tolist())
    print0(f"the first sample: {text[:80]!r}...")

# %% [markdown]
# ## GPT-2
# Built by transformers, but for the loss. The logits (tokens, vocabulary) are the largest tensor of
# all, and their gradient is as large. Here output matrix and loss are one function: it takes the
# tokens in chunks and makes the gradients along with the loss, so that no more than the logits of
# one chunk ever exist. Nothing is computed twice.
#
# Weight decay is for matrices, told by their dimensions: the list of names that everybody copies
# misses GPT-2's norms, `ln_1` and `ln_f`.
#
# Trap: under ZeRO-3 a model is sharded while it is built, and initialising shards fills empty
# tensors: the first loss is 170 instead of 7, without a word. `HfDeepSpeedConfig`, kept alive,
# makes transformers shard. The initialisation is written out, on gathered parameters: the same
# weights at every stage and on any number of ranks.

# %%
# Under its own name, transformers asks the GPU in each forward pass whether samples are packed, and
# waits for the answer. No mask is wanted: `is_causal` says it all.
AttentionInterface.register("causal", sdpa_attention_forward)


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy `()` of the logits `hidden @ weight.T`, which exist a chunk at a time.

    `hidden` `(N, C)`, `weight` `(V, C)`, `targets` int64 `(N,)`, of which -100 does not count. The
    gradients are made along with it if `learning`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, learning):
        total, of_hidden, of_weight = 0.0, torch.empty_like(hidden), torch.zeros_like(weight)
        # Neither the sum over N tokens (too large) nor the mean (too small) suits fp16.
        ctx.share = len(hidden) ** -0.5
        for rows, of_rows, row_targets in zip(*(
                tensor.chunk(CHUNKS) for tensor in (hidden, of_hidden, targets))):
            logits = torch.nn.functional.linear(rows, weight).requires_grad_(learning)
            with torch.set_grad_enabled(learning):
                loss = chunked_cross_entropy(logits, row_targets, reduction="sum")
            total += loss.detach()
            if learning:
                of_logits, = torch.autograd.grad(loss, logits)
                torch.mm(of_logits, weight, out=of_rows)
                of_weight.addmm_(of_logits.T, rows, alpha=ctx.share)
                del of_logits
            del logits, loss  # before the next chunk, or there would be two
        count = (targets != -100).sum()
        ctx.save_for_backward(of_hidden, of_weight, count)
        return total / count

    @staticmethod
    def backward(ctx, scale):  # of the loss: 1 / accumulation, times the loss scale
        of_hidden, of_weight, count = ctx.saved_tensors
        scale = scale / count
        return of_hidden.mul_(scale), of_weight.mul_(scale / ctx.share), None, None


def fuse_loss(model):
    """Make `model(..., labels=...)` compute its loss by `HeadLoss`, and return only that."""

    def head(self, hidden, labels=None):  # in the module of the weight, where ZeRO-3 gathers it
        if labels is None:
            return type(self).forward(self, hidden)
        # The last token has no next one.
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return HeadLoss.apply(hidden.flatten(0, 1), self.weight, targets.flatten(),
                              torch.is_grad_enabled())

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def loss_or_logits(self, *args, labels=None, **kwargs):
        if labels is None:
            return type(self).forward(self, *args, **kwargs)
        hidden = self.transformer(*args, **kwargs).last_hidden_state
        return CausalLMOutput(loss=self.lm_head(hidden, labels))

    for module, forward in ((model.lm_head, head), (model, loss_or_logits)):
        module.forward = types.MethodType(forward, module)  # that a copy of the model copies


def build_model(config, settings, ds_config):
    """GPT-2 in fp32 on this rank's device; under ZeRO-3 its shards, in the training's precision."""
    unset_hf_deepspeed_config()  # of an earlier run in this kernel
    zero3 = ds_config["zero_optimization"]["stage"] == 3
    sharding = HfDeepSpeedConfig(ds_config) if zero3 else None
    if settings.model in (None, *PRESETS):
        with torch.device(get_accelerator().current_device_name()):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="causal")
        init_weights(model, settings.seed)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                settings.model, config=config, attn_implementation="causal", dtype=torch.float32,
                use_safetensors=True)  # a pickle could run code
        except Exception as error:  # of many types, and all about the files
            raise UserError(f"--model {settings.model}: cannot be read ({str(error)[:200]}); it"
                            " takes a config.json and whole .safetensors files") from error
    model.sharding = sharding  # transformers refers to it weakly, and asks again to generate
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fuse_loss(model)
    if settings.compile and zero3:
        print0("compile: nothing, since ZeRO-3 gathers weights amid what would be compiled")
    elif settings.compile:
        # Recompute what takes no matrix product, as GELU does: for 1 % of the speed, a third of the
        # activations less.
        torch._functorch.config.activation_memory_budget = 0.9
        for block in model.transformer.h:  # all share what is compiled for the first
            block.compile()
    return model


@torch.no_grad()
def init_weights(model, seed):
    """GPT-2's: N(0, 0.02), and 1/sqrt(2 layers) of it in the last matrix of a residual branch."""
    device, std = get_accelerator().current_device_name(), model.config.initializer_range
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):  # no-op below ZeRO-3
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in name:
                parameter.fill_(1.0)
            else:
                scale = std / math.sqrt(2 * model.config.n_layer) if "c_proj" in name else std
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.copy_(noise * scale)


def full_shape(parameter):
    """The shape of a parameter, also of one that ZeRO-3 has sharded."""
    return getattr(parameter, "ds_shape", parameter.shape)


def count_parameters(model):
    """The number of parameters, also of those that ZeRO-3 has sharded."""
    return sum(math.prod(full_shape(p)) for p in model.parameters())


def parameter_groups(model):
    """Two optimizer groups: matrices with the JSON's weight decay, biases and norms without."""
    vectors = [p for p in model.parameters() if len(full_shape(p)) < 2]
    return [{"params": [p for p in model.parameters() if len(full_shape(p)) >= 2]},
            {"params": vectors, "weight_decay": 0.0}]

# %%
if __name__ == "__main__":
    if globals().get("engine"):  # the cells run again in one kernel
        destroy_engine(globals()["engine"])
        engine = model = None
        gc.collect()  # they refer to each other
    model = build_model(config, settings, ds_config)
    print0(f"{count_parameters(model):,} parameters")
    memory_gib("with the model")

# %% [markdown]
# ## GPT-2 as a pipeline
# For a model that one device cannot train: each stage holds a share of the blocks, and the
# micro-batches follow each other through the stages. While a pipeline fills and drains, a stage
# idles, for (stages - 1) / (micro-batches + stages - 1) of the time. The micro-batches are the
# accumulation: of 4 stages, 4 leave 43 % idle and 32 only 9 %. Processes / stages = pipelines,
# which share the data. Evaluation, samples and export gather the weights on every device, without
# optimizer states.
#
# DeepSpeed refuses ZeRO-2 and 3 here, and at ZeRO-0 clips by the norm of the first stage alone.
#
# Trap: the embedding is the output matrix as well. First and last stage each have a copy, and if
# these are not declared tied, so that their gradients are added, they drift apart without a word.

# %%
class Positions(torch.nn.Module):
    """GPT-2's position embedding as a layer of its own: it adds itself to `(B, T, C)`."""

    def __init__(self, wpe):
        super().__init__()
        self.wpe = wpe

    def forward(self, tokens):
        return tokens + self.wpe.weight[:tokens.shape[1]]


@torch.no_grad()  # the copies of the embedding are broadcast, which autograd need not know
def build_pipeline(model, stages):
    """`model` as a pipeline, of which this process keeps the layers of its stage, as they are."""
    body, config, loss = model.transformer, model.config, ChunkedCausalLMLoss()
    if stages > config.n_layer:
        raise UserError(f"--pipeline_stages {stages}: a stage takes at least one block, and the"
                        f" model has {config.n_layer}: lower it")
    tied = [TiedLayerSpec("wte", torch.nn.Embedding, forward_fn=forward) for forward in (
        None, lambda wte, hidden: torch.nn.functional.linear(hidden, wte.weight))]
    for spec in tied:
        spec.build = lambda: body.wte  # which is there already
    head = tied[1] if config.tie_word_embeddings else model.lm_head
    with contextlib.redirect_stdout(None):  # it prints its layers
        # By blocks: by parameters, a stage may get the embedding alone, which has no vectors and so
        # one optimizer group less, and wait for ever for the norm of that of the others.
        pipeline = PipelineModule(
            [tied[0], Positions(body.wpe), *body.h, body.ln_f, head], stages,
            loss_fn=lambda logits, labels: loss(logits, labels, config.vocab_size),
            partition_method="type:GPT2Block")
    pipeline._layer_specs.clear()  # they would keep the other stages' layers in memory
    own = {p for p in pipeline.parameters() if not p.ds_pipe_replicated}
    pipeline.shards = {name: p for name, p in model.named_parameters() if p in own}
    pipeline.config = config
    return pipeline


@torch.no_grad()
def whole_model(engine):
    """The engine's model; of a pipeline, a copy gathered on every rank. Called by all ranks."""
    if not engine.pipeline_parallelism:
        return engine.module
    with torch.device(engine.device):
        model = AutoModelForCausalLM.from_config(
            engine.module.config, attn_implementation="causal", dtype=engine.get_data_types()[0])
    fuse_loss(model)
    for name, parameter in model.named_parameters():  # one stage has it, the others add 0
        parameter.copy_(engine.module.shards.get(name, torch.zeros(())))
        dist.all_reduce(parameter, group=engine.grid.get_pipe_parallel_group())
    return model.eval()

# %%
if __name__ == "__main__":
    if settings.pipeline_stages > 1:
        model = build_pipeline(model, settings.pipeline_stages)
        print0(f"{data_ranks} pipeline(s) of {settings.pipeline_stages} stages, of"
               f" {' + '.join(map(str, np.diff(model.parts)))} layers")

# %% [markdown]
# ## The engine
# `deepspeed.initialize` wraps model, optimizer and schedule. What only the script knows is filled
# in: the number of updates, and buckets that suit the size of the model.

# %%
def build_engine(model, ds_config, total_updates):
    """The DeepSpeed engine that trains `model` for `total_updates` updates."""
    config = copy.deepcopy(ds_config)  # a cell may run again
    complete_schedule(config, total_updates)
    zero = config["zero_optimization"]
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        zero.setdefault(bucket, bucket_size(count_parameters(model)))
    if zero["stage"] == 1:
        zero.setdefault("contiguous_gradients", False)  # spares each gradient two copies
    return start_engine(model, parameter_groups(model), config)

# %%
if __name__ == "__main__":
    engine = build_engine(model, ds_config, total_updates)
    print0(f"ZeRO-{engine.zero_optimization_stage()}, {type(engine.basic_optimizer).__name__},"
           f" {engine.get_data_types()[0]}")
    memory_gib("with the engine")

# %% [markdown]
# ## What travels between processes
# The gradients of P parameters in b bytes, bP per update (at ZeRO-2 and 3 per micro-batch), and the
# weights: at ZeRO-1 and 2 the new ones, once, at ZeRO-3 all of them for each forward and backward
# pass. The first update of a run counts the bytes.
#
# `--compress_gradients` sends fewer: bf16 instead of fp32 (`communication_data_type`), or at ZeRO-3
# on GPUs 4 bits instead of 16, and weights in 8 (ZeRO++). 1-bit Adam, which tutorials name, is gone
# from DeepSpeed, and so is LoCo, which corrected ZeRO++'s rounding.

# %%
@contextlib.contextmanager
def counted_bytes():
    """Yield `{collective: bytes}`, filled at the end: what this rank has given to them meanwhile.

    DeepSpeed waits for each collective in order to time it, so this is for single updates.
    """
    logger, sent = deepspeed.comm.comm.comms_logger, {}
    enabled, logger.enabled, logger.prof_all = logger.enabled, True, True
    logger.reset_data()
    yield sent
    logger.enabled = enabled
    for name, sizes in logger.get_raw_data().items():
        sent[name] = sum(size * count for size, (count, *_) in sizes.items())

# %% [markdown]
# ## One training step
# One update = accumulation × (forward, backward, step). Call all three for every micro-batch: the
# engine divides the loss by the accumulation, counts, and updates at the last one. Dividing it
# yourself, or calling `step()` only now and then, does it twice.

# %%
def language_model_loss(engine, input_ids):
    """Mean next-token loss of int64 `(B, T)` in nats. Through the engine: ZeRO-3 gathers there."""
    return engine(input_ids=input_ids, labels=input_ids, use_cache=False).loss


def train_step(engine, micro_batches):
    """One update from a list of `{"input_ids": (B, T)}`. Returns the mean loss, a tensor `()`."""
    if engine.pipeline_parallelism:  # forward, backward and step of all micro-batches, interleaved
        return engine.train_batch((batch["input_ids"],) * 2 for batch in micro_batches)
    total = 0.0
    for batch in micro_batches:
        input_ids = batch["input_ids"].to(engine.device, non_blocking=True)
        loss = language_model_loss(engine, input_ids)
        engine.backward(loss)
        engine.step()
        total += loss.detach()  # without its graph; and .item() would wait for the device
    return total / len(micro_batches)

# %% [markdown]
# ## Evaluation
# The mean loss on held-out samples; as perplexity, exp(loss); for text also as bits per byte, the
# only one to compare across tokenizers, since longer tokens have a larger loss.
#
# Trap: under ZeRO-3 a forward pass gathers weights from all ranks, so all must run equally many, or
# the run hangs. A rank that has run out of samples repeats one, with weight 0.

# %%
@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # for so few passes, compiling again would not pay
def evaluate(engine, dataset, batch_size, bytes_per_token=None):
    """`{loss, perplexity}`; with `bytes_per_token` also `bits_per_byte`. Called by all ranks.

    Raises `Fault` if the loss is not finite.
    """
    engine.eval()
    model = whole_model(engine) if engine.pipeline_parallelism else engine
    ranks, total = dist.get_world_size(), torch.zeros(2, device=engine.device)
    mine = range(dist.get_rank(), len(dataset), ranks)
    for start in range(0, math.ceil(len(dataset) / ranks), batch_size):
        indices = mine[start:start + batch_size]
        input_ids = torch.stack([dataset[index]["input_ids"] for index in indices or [0]])
        loss = language_model_loss(model, input_ids.to(engine.device)).float()
        total += torch.stack([loss * len(indices), torch.full_like(loss, len(indices))])
    dist.all_reduce(total)
    engine.train()
    loss = (total[0] / total[1]).item()
    if not math.isfinite(loss):
        raise Fault(f"update {engine.global_steps}: the held-out loss is {loss}, so weights are inf"
                    " or nan; resume from a checkpoint before")
    engine.monitor.write_events([("Eval/Samples/loss", loss, engine.global_samples)])
    result = {"loss": loss, "perplexity": math.exp(min(loss, 100))}
    if bytes_per_token:
        result["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return result


def count_bytes_per_token(dataset, tokenizer):
    """Mean number of UTF-8 bytes of text per token, in the first 256 samples."""
    samples = [dataset[index]["input_ids"] for index in range(min(256, len(dataset)))]
    special = torch.tensor(tokenizer.all_special_ids)  # transformers 5.0 skips them ever so slowly
    texts = [tokenizer.decode(ids[~torch.isin(ids, special)]) for ids in samples]
    return sum(len(text.encode()) for text in texts) / sum(map(len, samples))

# %% [markdown]
# ## Checkpoints and export
# A DeepSpeed checkpoint has all that training needs: each rank's shards of weights and optimizer,
# the schedule, the loss scale, the number of updates. It gets its name only when it is whole, so a
# run that is killed, or a disk that is full, costs at most the newest. An export is what everybody
# else needs: a folder for `from_pretrained`.
#
# Traps: rank 0 saving alone waits for the others for ever, and under ZeRO-3 a plain `state_dict()`
# holds empty placeholders: each parameter must first be gathered.

# %%
def save_checkpoint(engine, settings, run, history, position=None):
    """Write `checkpoints/global_stepN.part`. Called by all ranks. Raises `Fault` if it cannot.

    `position` is where this rank's `TextStream` goes on.
    Returns what makes it count: `finish()` waits for the disk, beside the training if it likes,
    renames the folder, removes the oldest, and returns a line about it.
    """
    root, name = Path(settings.output_dir, "checkpoints"), f"global_step{engine.global_steps}"
    part, first, began = root / f"{name}.part", dist.get_rank() == 0, time.perf_counter()
    with contextlib.suppress(ImportError):  # torch has it from 2.7: half the time from a GPU
        from torch.utils.serialization import config
        config.save.use_pinned_memory_for_d2h = True

    def remove(*leftovers):
        surplus = [note.parent for note in checkpoint_notes(root)[settings.keep_checkpoints:]]
        for folder in (*surplus, *leftovers):
            with contextlib.suppress(OSError):  # by this name, what a kill leaves of it is found
                folder = folder.rename(folder.with_suffix(".old"))
            shutil.rmtree(folder, ignore_errors=True)

    def fault(error):
        remove(part)
        return Fault(f"{part}: cannot be written ({error}); the checkpoints before it are whole,"
                     " and --resume auto continues")

    if first:
        root.mkdir(exist_ok=True)
        remove(*root.glob("global_step*.*"))  # .part, .old, .universal: of a run that was cut short
        # Weights, and in fp32 the weights again and AdamW's two moments.
        size = count_parameters(engine.module) * (engine.get_data_types()[0].itemsize + 12)
        if shutil.disk_usage(root).free < size:
            raise Fault(f"{root}: a checkpoint takes {size / 2**20:,.0f} MiB, and the disk has less"
                        ": free some, or lower --keep_checkpoints: --resume auto continues")
    dist.barrier()
    try:
        engine.save_checkpoint(root, tag=part.name, save_latest=False)
        if position:
            torch.save(position, part / f"stream{dist.get_rank()}.pt")
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk
        if "gloo/transport" in str(error):  # another rank has ended
            raise
        raise fault(error) from error
    dist.barrier()
    note = {"run": run, "samples_per_update": engine.train_batch_size(), "time": time.time(),
            "history": copy.deepcopy(history), "ranks": engine.dp_world_size,
            "zero_stage": engine.zero_optimization_stage(),
            "precision": [engine.fp16_enabled(), engine.bfloat16_enabled()]}
    seconds = time.perf_counter() - began

    def finish():
        try:
            files = {str(path.relative_to(part)): path.stat().st_size
                     for path in part.rglob("*") if path.is_file()}
            (part / "run.json").write_text(json.dumps(note | {"files": files}))
            for path in (*part.rglob("*"), part):  # to the disk, before it counts
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        except OSError as error:
            raise fault(error) from error
        old = root / f"{name}.old"  # of an earlier run into this folder
        if (root / name).exists():
            (root / name).rename(old)
        part.rename(root / name)
        (root / "latest.new").write_text(name)
        (root / "latest.new").replace(root / "latest")
        remove(old)
        return (f"saved {root / name}: {sum(files.values()) / 2**20:,.1f} MiB, for which the"
                f" training waited {seconds:.1f} s")

    return finish if first else lambda: None


def convert_checkpoint(checkpoint, target):
    """Make a universal checkpoint of `checkpoint`, for any ranks and ZeRO stage from 1 on."""
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
                    "--inject_missing_state", "--input_folder", checkpoint,
                    "--output_folder", target], check=True, capture_output=True)
    # ZeRO-3 and the other stages write and read two dialects of it. This makes it good for both.
    names = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"}
    for name in names:
        if not (target / name).exists():
            os.link(target / (names - {name}).pop(), target / name)
    common = torch.load(target / "zero/optimizer_state.pt", weights_only=False)
    steps = [torch.load(path) for path in target.glob("zero/*/step.pt")]
    step = steps[0] if steps else common["optimizer_state_dict"]["state"][0]["step"]
    common |= {"ds_version": deepspeed.__version__, "optimizer_state_dict": {
        "state": {0: {"step": step}}, "param_groups": common["param_groups"]}}
    torch.save(common, target / "zero/optimizer_state.pt")
    for path in target.glob("zero/*/*.pt"):
        value = torch.load(path, weights_only=False)
        torch.save(step, path.parent / "step.pt")
        if torch.is_tensor(value) and path.name != "step.pt":
            torch.save({"param": value.detach()}, path)


def load_checkpoint(engine, checkpoint, note):
    """Load the folder `checkpoint` into `engine`. Returns the history. Called by all ranks."""
    checkpoint, universal = Path(checkpoint), Path(f"{checkpoint}.universal")
    if engine.load_universal_checkpoint():
        print0(f"resume: converting from {note['ranks']} rank(s) at ZeRO-{note['zero_stage']}")
        if dist.get_rank() == 0:
            shutil.rmtree(universal, ignore_errors=True)
            convert_checkpoint(checkpoint, universal / "all")
        dist.barrier()
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
        engine.load_checkpoint(universal, tag="all")
        # ZeRO-3 gives all groups the weight decay of the first, and one step counter to share.
        for group, decay in zip(engine.optimizer.param_groups, decays):
            group["weight_decay"] = decay
        for parameter, state in engine.basic_optimizer.state.items():
            state["step"] = torch.as_tensor(state["step"]).to(parameter.device, copy=True)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(universal)
    else:
        engine.load_checkpoint(checkpoint.parent, tag=checkpoint.name)
    if engine.lr_scheduler is not None:  # the rate that was loaded is that of the run before
        engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration)
    print0(f"resume: continuing after update {engine.global_steps}")
    return note["history"]


def export_model(engine, tokenizer, folder):
    """Write model and tokenizer to `folder`, for `from_pretrained`. Called by all ranks."""
    state, part = {}, Path(f"{folder}.part")  # renamed at the end, so a folder is always whole
    model = whole_model(engine)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                state[name] = parameter.detach().cpu().clone()
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part, state_dict=state)
        if tokenizer:
            tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)

# %% [markdown]
# ## The training loop
# What waits for the device (`.item()`) or for other ranks happens only when a line is logged. Speed
# is tokens of whole updates, over all ranks, per second, without evaluation and saving. Ctrl-C,
# SIGTERM and a batch system's warning finish the update and save; a second one stops at once.
#
# ZeRO skips an update, on all ranks, if any gradient is inf or NaN: in fp16, where the loss scale
# then halves, a matter of course; otherwise a warning. A loss that is not finite ends the run, and
# weights that are not finite never reach the disk.

# %%
@contextlib.contextmanager
def noted_signals():
    """Yield a list that notes signals to stop instead of obeying; a second one acts as usual."""
    received = []

    def note(number, frame):
        received.append(number)
        signal.signal(number, before[number])

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, note) for number in numbers
              if signal.getsignal(number) != signal.SIG_IGN}  # as under nohup
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def runner_pid():
    """Pid of the `deepspeed` command above us. It changes with that command's end: a SIGTERM to it
    goes no further, so the ranks must see for themselves. None under other launchers."""
    return psutil.Process(os.getppid()).ppid() if "CROSS_SIZE" in os.environ else None


def agreed_signal(received, runner, device):
    """The signal that ends the training, 0 for none, as any rank `received` it. Called by all."""
    if runner_pid() != runner:
        received.append(signal.SIGTERM)
    if dist.get_world_size() == 1:  # spares the GPU the wait
        return received[0] if received else 0
    number = torch.tensor(received[0] if received else 0, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number)


def loss_scale(engine):
    """What the loss is multiplied by against underflow in fp16; otherwise 1."""
    return getattr(engine.optimizer, "cur_scale", 1)


def mean_loss(engine, loss, saving):
    """Mean of the ranks' `loss`, a tensor `()`. Called by all ranks.

    Raises `Fault` if a loss is not finite or, before `saving`, a weight.
    """
    shards = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()] if saving else []
    sound = loss.new_tensor(all(bool(shard.isfinite().all()) for shard in shards))
    mine = torch.stack([loss, sound]).float()
    reports = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(reports, mine)
    losses, sound = torch.stack(reports).T.tolist()
    for rank, loss in enumerate(losses):
        if not (math.isfinite(loss) and sound[rank]):
            raise Fault(f"update {engine.global_steps}, rank {rank}: the loss is {loss}"
                        f"{'' if sound[rank] else ', weights are inf or nan'} (loss scale"
                        f" {loss_scale(engine):.0f}); not saved: resume from the checkpoint before,"
                        " with a lower --lr or --dtype bf16")
    return sum(losses) / len(losses)


def log_update(engine, write, place, loss, lr, norm, speed):
    """`write` the line of an update, which begins with its `place`, and tell the monitors."""
    memory = memory_gib()
    kind = "rss" if get_accelerator().device_name() == "cpu" else "mem"
    write(f"{place} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:5.2f}"
          f" | scale {loss_scale(engine):.0f} | skipped {engine.skipped_steps} | {speed:,.0f} tok/s"
          f" | {kind} {memory['allocated']:.2f} GiB, peak {memory['peak']:.2f} GiB"
          f" ({memory['peak'] / memory['total']:.0%})")
    engine.monitor.write_events([(f"Train/Samples/{name}", value, engine.global_samples)
                                 for name, value in (("train_loss", loss),
                                                     ("tokens_per_second", speed),
                                                     ("peak_memory_gib", memory["peak"]))])


def train(engine, loader, held_out, settings, run, total_updates, history, bytes_per_token):
    """Train up to `total_updates`, or for `settings.stop_after` updates. Called by all ranks.

    Appends `(update, loss)` to `history["train"]` and `history["eval"]`. Returns the number of the
    signal that ended the training, 0 if none did. Raises `Fault` if nothing is learned any more.
    """
    per_epoch, begin, end = loader.updates, engine.global_steps, total_updates
    if settings.stop_after is not None:
        end = min(end, begin + settings.stop_after)
    epochs, width = math.ceil(total_updates / per_epoch), len(str(total_updates))
    tokens_per_update = engine.train_batch_size() * len(held_out[0]["input_ids"])
    visible = dist.get_rank() == 0 and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    bar = tqdm(total=total_updates, initial=begin, unit="update", disable=not visible)
    write = bar.write if visible else print0
    logged, clock, stop, skips, runner = begin, time.perf_counter(), 0, 0, runner_pid()
    pending = None  # the checkpoint that is on its way to the disk
    with noted_signals() as received, ThreadPoolExecutor(1) as writer:
        accumulation = engine.gradient_accumulation_steps()
        micro_batch = engine.train_micro_batch_size_per_gpu()
        for epoch, micro_batches in updates(loader, accumulation, begin, end):
            lr, skipped = engine.get_lr()[0], engine.skipped_steps
            counting = engine.global_steps == begin and dist.get_world_size() > 1
            with counted_bytes() if counting else contextlib.nullcontext({}) as sent:
                loss = train_step(engine, micro_batches)

            # ---- The training ends here. What follows is signals, diagnostics and saving. ----
            step, stop = engine.global_steps, agreed_signal(received, runner, engine.device)
            last = step == end or stop
            logging = step % settings.log_every == 0 or step == begin + 1 or last
            saving = step % (settings.save_every or per_epoch) == 0 or last
            skips = skips + 1 if engine.skipped_steps > skipped else 0
            bar.update()
            if logging or saving or skips:
                loss = mean_loss(engine, loss, saving)
                norm = float(engine.get_global_grad_norm() or math.nan)
            if sent:
                write("an update sends, in MiB per process: " + ", ".join(
                    f"{name} {size / 2**20:.2f}" for name, size in sent.items()))
            if skips:
                write(f"update {step} skipped: gradient norm {norm}, loss scale now"
                      f" {loss_scale(engine):.0f}")
            if skips == 50 or last and engine.skipped_steps == step:
                raise Fault(f"update {step}: {skips} updates in a row were skipped, since gradients"
                            f" are inf or nan at loss scale {loss_scale(engine):.0f}; lower --lr,"
                            " or use --dtype bf16")
            if logging:
                speed = (step - logged) * tokens_per_update / (time.perf_counter() - clock)
                log_update(engine, write, f"epoch {epoch + 1}/{epochs} | step {step:{width}}"
                           f"/{total_updates}", loss, lr, norm, speed)
                history["train"].append((step, loss))
                logged, clock = step, time.perf_counter()
            pause = time.perf_counter()
            if not stop and (step % (settings.eval_every or per_epoch) == 0 or last):
                result = evaluate(engine, held_out, micro_batch, bytes_per_token)
                write(f"held out | step {step:{width}}/{total_updates} | "
                      + " | ".join(f"{name} {value:.4f}" for name, value in result.items()))
                history["eval"].append((step, result["loss"]))
            if saving:
                if pending:
                    pending.result()
                finish = save_checkpoint(engine, settings, run, history,
                                         micro_batches[-1]["position"])
                pending = writer.submit(lambda finish=finish: write(finish()))
            clock += time.perf_counter() - pause
            if stop:
                break
        if pending:
            pending.result()
    dist.barrier()  # no rank leaves before it counts
    bar.close()
    return stop


def plot_loss(history, path, floor=None):
    """Draw `history` into the PNG `path`, with the entropy `floor` in nats if there is one."""
    with chart(path, "update", "loss (nats per token)") as axes:
        axes.plot(*zip(*history["train"]), label="training")
        axes.plot(*zip(*history["eval"]), "o-", label="held out")
        if floor:
            axes.axhline(floor, color="gray", linestyle="--", label=f"entropy floor {floor:.3f}")

# %% [markdown]
# ## Generation
# All ranks generate and rank 0 prints: under ZeRO-3 each token gathers weights from all ranks, and
# equal seeds draw equal tokens. Ids that only pad the vocabulary are suppressed.

# %%
@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # else, each new length would be compiled
def generate(engine, prompt, max_new_tokens, vocabulary, seed):
    """Continue the int64 ids `prompt` `(P,)` by ids below `vocabulary`, of the 50 likeliest."""
    model = whole_model(engine).eval()
    torch.manual_seed(seed)
    prompt = prompt[None].to(engine.device)
    length = min(prompt.shape[1] + max_new_tokens, model.config.n_positions)
    padding = list(range(vocabulary, model.config.vocab_size))
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_length=length, do_sample=True, top_k=50,
        suppress_tokens=padding or None, pad_token_id=model.config.eos_token_id or 0)
    model.train()
    return tokens[0].cpu()


def show_sample(engine, held_out, tokenizer, settings, label):
    """Print how the model continues the prompt or a held-out sample. Called by all ranks."""
    prompt = held_out[0]["input_ids"][:16]
    if settings.prompt and tokenizer:
        prompt = torch.tensor(tokenizer(settings.prompt, add_special_tokens=False)["input_ids"])
    prompt = prompt[-(engine.module.config.n_positions // 2):]  # leave room
    vocabulary = len(tokenizer) if tokenizer else held_out.vocab_size
    tokens = generate(engine, prompt, 100, vocabulary, settings.seed)
    if tokenizer:
        print0(f"sample {label}: {tokenizer.decode(tokens)!r}")
    else:
        share = held_out.follows_rule(tokens[len(prompt) - 1:])
        print0(f"sample {label}: follows the rule at {share:.0%} of the steps, as the data do at"
               f" {held_out.structure:.0%}: {tokens[len(prompt):][:8].tolist()}...")

# %% [markdown]
# ## Run
# Before: the held-out loss, about ln(vocabulary) if the model is fresh, and a sample. Then the
# training. After: the export, another sample, and the curve.

# %%
if __name__ == "__main__":
    bytes_per_token = count_bytes_per_token(held_out, tokenizer) if tokenizer else None
    floor = held_out.entropy_floor() if settings.data == ["synthetic"] else None
    history = {"train": [], "eval": []}
    if checkpoint:
        history = load_checkpoint(engine, checkpoint, note)
    before = evaluate(engine, held_out, micro_batch, bytes_per_token)["loss"]
    print0(f"held out, before: loss {before:.4f}; ln(vocabulary) {math.log(config.vocab_size):.4f}"
           + (f"; entropy floor {floor:.4f}" if floor else ""))
    show_sample(engine, held_out, tokenizer, settings, "before")

# %%
if __name__ == "__main__":
    began = time.perf_counter()
    stop = train(engine, loader, held_out, settings, run, total_updates, history,
                 bytes_per_token)
    print0(f"update {engine.global_steps} of {total_updates}, {engine.skipped_steps} skipped,"
           f" {time.perf_counter() - began:.0f} s")
    if stop:
        print0(f"stopped by {signal.Signals(stop).name} and saved; --resume auto continues")
        sys.exit(130 if stop == signal.SIGINT else 143)
    memory_gib("after training")

# %%
if __name__ == "__main__":
    output_dir = Path(settings.output_dir)
    export_model(engine, tokenizer, output_dir / "model")
    show_sample(engine, held_out, tokenizer, settings, "after")
    if rank == 0 and history["eval"]:
        plot_loss(history, output_dir / "loss.png", floor)
        after = history["eval"][-1][1]
        print0(f"held out, after: loss {after:.4f}"
               + (f", {after / floor - 1:.1%} above the entropy floor" if floor else ""))
    written = sorted(path.name for path in output_dir.glob("[!.]*"))
    print0(f"written to {output_dir}: {', '.join(written)}")
    dist.barrier()  # no rank leaves while rank 0 writes
    unset_hf_deepspeed_config()  # else, after ZeRO-3, a kernel would shard every model it loads
