"""Prepare a run on all ranks and train it to its end."""

import random
from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np
import torch

from shardwright.comm.mesh import current_rank, is_first_rank
from shardwright.config import Settings
from shardwright.kernels.matmul import library_in_use, preferred_library, use_library
from shardwright.runtime import memory_check
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.planning import plan_run
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run import recipe
from shardwright.runtime.run.callback import Callback, CallbackList, RunResult, RunStart
from shardwright.runtime.run.device import run_device
from shardwright.runtime.run.directory import RunDirectory
from shardwright.runtime.run.loggers import make_loggers
from shardwright.runtime.run.setup import (
    COLLECTIVE_TIMEOUT_SECONDS,
    hottest_ids,
    load_start_checkpoint,
    make_rank_loader,
    open_directory,
    set_threads,
    start_notes,
    table_servers,
)
from shardwright.runtime.run.token_meter import TokenMeter, describe_model_flops
from shardwright.runtime.run.trainer import Trainer


def train(settings: Settings, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train a run to its last step, or until a stop signal (runtime/launch/signals.py). All ranks call it.

    The loggers of `run.loggers` and the callbacks receive the events of the run on the first rank. Before the settings
    and the first batch are checked nothing is written, and before the memory check nothing large is allocated.
    """
    events = CallbackList((*make_loggers(settings.run.loggers), *callbacks) if is_first_rank() else ())
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    library = (
        RunDirectory.saved_matmul_library(settings) if settings.train.products == "auto" else settings.train.products
    )
    use_library(library or preferred_library())
    source = recipe.make_source(settings)
    settings = recipe.epochs_to_steps(settings, source)
    model = recipe.make_model(settings, source)
    optimizer = recipe.make_dense_optimizer(settings)
    overlap = settings.train.overlap and not settings.train.progressive  # progressive: a batch is scored when read
    with ExitStack() as stack:
        threads = set_threads(settings, stack)  # before the plan: it measures the model
        workload, plan, predicted = plan_run(settings, source, model)
        starts_servers = bool(settings.servers.start)
        device = run_device(settings.run.device, plan, model)
        memory_check.check_fits(
            workload, plan, model, current_rank(), settings.train, starts_servers=starts_servers, device=device
        )
        stack.enter_context(memory_check.explain_out_of_memory(workload))
        mesh = stack.enter_context(closing(mesh_for(plan, COLLECTIVE_TIMEOUT_SECONDS, device=device)))
        directory = stack.enter_context(table_servers(settings, plan, mesh))
        flops = describe_model_flops(settings, source, model, plan, mesh)
        job = build(
            model,
            plan,
            mesh,
            optimizer=optimizer,
            hottest=hottest_ids(settings, source, model, plan),
            overlap=overlap,
            accumulate=settings.train.accumulate,
            clip=settings.dense.clip,
        )
        loader = stack.enter_context(
            closing(make_rank_loader(settings, source, plan.position(mesh.rank, plan.sample_axes)))
        )
        load_start_checkpoint(settings, job, RankGroup(mesh))
        directory = directory or stack.enter_context(closing(open_directory(settings, RankGroup(mesh))))
        run = settings.run.model_copy(update={"name": directory.path.name})
        train_settings = settings.train.model_copy(update={"products": library_in_use()})
        settings = settings.model_copy(update={"run": run, "train": train_settings})
        previous = directory.read_environment().get("threads", torch.get_num_threads())
        directory.write_description(settings, workload, plan, predicted, threads, device)
        if flops is not None:
            directory.write("model_flops.json", flops)
        token_meter = TokenMeter(job.model.loss, getattr(source, "length", 0), flops)
        stack.enter_context(events)
        events.begin(RunStart(directory.path, settings, directory.last_step(), source.size))
        for note in (str(threads), *start_notes(settings, source, job, previous)):
            events.note(note)
        result = Trainer(settings, source, job, loader, directory, events, token_meter).run()
        events.end(result)
        return result
