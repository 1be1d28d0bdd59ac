"""Run torchtitan's own parser and checks on lists of arguments: python torchtitan_parser.py PATH < JOBS.

PATH is a checkout of torchtitan; tyro and spmd_types must be installed. JOBS is a JSON list of {"tokens",
"world_size"}. The answer is a JSON object: the sizes of all models, and of each job its error or what torchtitan makes
of it. Modules that read data, write metrics or need a GPU are replaced.
"""

import builtins
import json
import sys
import typing
from abc import ABCMeta
from contextlib import redirect_stdout
from importlib import import_module

MISSING = ("grain", "datasets", "torch_checkpointing", "wandb", "PIL", "tokenizers", "triton", "torchao", "helion")
MODULES = {"llama3": "llama3_configs", "qwen3": "qwen3_configs", "deepseek_v3": "deepseekv3_configs"}


class Anything(ABCMeta):
    """Type of classes that have every attribute, and that other classes may derive from."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return make_class(name)

    def __getitem__(cls, _):
        return cls

    def __or__(cls, _):
        return typing.Any

    def __ror__(cls, _):
        return typing.Any


def make_class(name: str) -> type:
    members = {
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0] if args else self,
        "__getattr__": lambda self, attribute: make_class(attribute),
    }
    return Anything(name, (), members)


def replace_missing_modules() -> None:
    """For torchtitan alone: torch asks which of them are installed."""
    real_import = builtins.__import__

    def import_or_replace(name, globals=None, locals=None, fromlist=(), level=0):
        is_missing = level == 0 and (name.split(".")[0] in MISSING or name == "torch.utils.tensorboard")
        if is_missing and (globals or {}).get("__name__", "").startswith("torchtitan"):
            return make_class(name)
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = import_or_replace


def model_sizes(config) -> list:
    """As in Flavor, from `layers` on."""
    layer = config.layers[-1]
    attention, moe = layer.attention, getattr(layer, "moe", None)
    groups = getattr(attention, "n_kv_heads", None) or attention.n_heads
    experts = moe.num_experts if moe else 0
    width = moe.routed_experts.inner_experts.hidden_dim if moe else layer.feed_forward.w2.in_features
    sizes = (len(config.layers), config.dim, width, attention.n_heads, groups, config.vocab_size)
    return [*sizes, config.enable_weight_tying, experts]


def check_job(job: dict) -> dict:
    pipelining = import_module("torchtitan.distributed.pipeline_parallel")
    dims = import_module("torchtitan.distributed.parallel_dims").ParallelDims
    try:
        config = import_module("torchtitan.config").ConfigManager().parse_args(job["tokens"])
        config.__post_init__()
        parallelism, model = config.parallelism, config.model_spec.model
        mesh = dims.from_config(parallelism, job["world_size"])
        model.update_from_config(config=config)
        parts = parallelism.module_fqns_per_model_part
        if parts is None and mesh.pp > 1:
            parts = pipelining._generate_llm_fqn_per_model_part(
                *pipelining._get_pipeline_metadata(mesh, parallelism, model)
            )
    except (AssertionError, ValueError, NotImplementedError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    cuts = [sum(name.startswith("layers.") for name in part) for part in parts or ()]
    training, checkpointing = config.training, config.activation_checkpoint
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    per_pass = training.num_tokens_per_microbatch_per_dp_rank * mesh.dp_replicate * mesh.dp_shard
    return {
        "cuts": cuts or [len(model.layers)],
        "layers": len(model.layers),
        "passes": training.num_tokens_per_train_step / per_pass,
        "pp_microbatches": parallelism.num_pp_microbatches,
        "checkpointing": type(checkpointing).__qualname__ if checkpointing else "none",
        **{name: getattr(mesh, name) for name in names},
    }


def main() -> None:
    jobs = json.load(sys.stdin)
    sys.path.insert(0, sys.argv[1])
    replace_missing_modules()
    with redirect_stdout(sys.stderr):
        flavors = [
            [name, flavor, *model_sizes(module.model_registry(flavor).model)]
            for name, configs in MODULES.items()
            for module in [import_module(f"torchtitan.models.{name}")]
            for flavor in getattr(module, configs)
        ]
        answer = {"flavors": flavors, "jobs": [check_job(job) for job in jobs]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
