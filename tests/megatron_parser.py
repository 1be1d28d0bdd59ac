"""Run Megatron-LM's own parser and checks on lists of arguments: python megatron_parser.py PATH < JOBS.

PATH is a checkout of Megatron-LM. JOBS is a JSON list of {"tokens", "world_size"}. The answer is a JSON object: the
names of all options, and of each job its error or what Megatron-LM makes of it. Modules that do not install without a
GPU are replaced.
"""

import argparse
import builtins
import json
import os
import sys
import typing
from contextlib import redirect_stdout
from importlib import import_module
from unittest.mock import MagicMock

import torch


def replace_missing_modules() -> None:
    """Triton, for Megatron-LM alone: torch asks whether it is installed."""
    real_import = builtins.__import__

    def import_or_replace(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and name.split(".")[0] == "triton" and (globals or {}).get("__name__", "").startswith("megatron"):
            return MagicMock(__version__="3.0.0")
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = import_or_replace
    typing.override = lambda function: function  # of Python 3.12
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def check_job(arguments, job: dict) -> dict:
    block = import_module("megatron.core.transformer.transformer_block")
    decoder = import_module("megatron.core.transformer.enums").LayerType.decoder
    sys.argv = ["pretrain_gpt.py", *job["tokens"], "--no-rope-fusion"]  # which needs Transformer Engine
    os.environ |= {"WORLD_SIZE": str(job["world_size"]), "RANK": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if "--use-megatron-fsdp" in job["tokens"]:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    try:
        args = arguments.validate_args(arguments.parse_args())
        config = arguments.core_transformer_config_from_args(args)
        layers = [
            block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
            if config.pipeline_model_parallel_layout is None
            else config.pipeline_model_parallel_layout.layout[rank][chunk].count(decoder)
            for chunk in range(config.virtual_pipeline_model_parallel_size or 1)
            for rank in range(config.pipeline_model_parallel_size)
        ]
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    names = ("data_parallel_size", "sequence_parallel", "ffn_hidden_size", "kv_channels", "moe_layer_freq", "bf16")
    names = (*names, "recompute_modules", "use_distributed_optimizer", "data_parallel_sharding_strategy")
    return {"layers": layers, **{name: getattr(args, name) for name in names}}


def main() -> None:
    jobs = json.load(sys.stdin)
    sys.path.insert(0, sys.argv[1])
    replace_missing_modules()
    with redirect_stdout(sys.stderr):
        arguments = import_module("megatron.training.arguments")
        arguments.get_device_arch_version = lambda: 9
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
        answer = {"options": sorted(parser._option_string_actions), "jobs": [check_job(arguments, job) for job in jobs]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
