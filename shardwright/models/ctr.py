"""Click-through-rate models by the names that recipes use, built for the features of a source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

from torch import nn

from shardwright.config import fill_dataclass, resolve_name
from shardwright.errors import UserError, did_you_mean
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import EnsembleSpec
from shardwright.layers.in_batch_softmax import SoftmaxSpec
from shardwright.layers.mixing import INTERACTIONS, InteractionBuilder
from shardwright.layers.mlp import MLPForm
from shardwright.layers.moe import MoESpec
from shardwright.layers.task_experts import ExtractionSpec
from shardwright.layers.task_losses import LabelTask
from shardwright.models.autoint import AutoInt
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.dcn import DCN
from shardwright.models.deepfm import DeepFM
from shardwright.models.dhen import DHEN
from shardwright.models.dlrm import DLRM
from shardwright.models.het import HetDCN, HetDeepFM, HetModel, HetWideDeep
from shardwright.models.logistic import LogisticRegression
from shardwright.models.multi_task import MMoEDense, MultiTaskModel, PLEDense, SharedBottomDense
from shardwright.models.two_tower import make_two_tower
from shardwright.models.wide_deep import WideDeep


def logistic(inputs: ClickInputs, *, init: float | None = None) -> nn.Module:
    return LogisticRegression(
        inputs.embedding_bags(1, init=init), inputs.source.num_dense, form=inputs.form(MappingProxyType({}))
    )


def dlrm(
    inputs: ClickInputs,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    experts: Mapping[str, Any] = MappingProxyType({}),
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """DLRM; with `experts`, the arguments of `MoESpec`, the top MLP has mixture-of-experts layers."""
    mixture = fill_dataclass("model.experts", MoESpec, experts) if experts else None
    return DLRM(
        inputs.embedding_bags(dim, init=init),
        inputs.source.num_dense,
        bottom=bottom,
        top=top,
        mixture=mixture,
        form=inputs.form(mlp),
    )


def dlrm_moe(
    inputs: ClickInputs,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    num_experts: int,
    num_chosen: int,
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """DLRM whose top MLP has mixture-of-experts layers, without auxiliary losses."""
    experts = {"num_experts": num_experts, "num_chosen": num_chosen}
    return dlrm(inputs, dim=dim, bottom=bottom, top=top, experts=experts, init=init, mlp=mlp)


def dhen(
    inputs: ClickInputs,
    *,
    dim: int,
    bottom: list[int],
    top: list[int],
    modules: list,
    stack: Mapping[str, Any] = MappingProxyType({}),
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """DHEN; `modules` is one list for every layer, or a list of lists, one per layer.

    `stack` has the arguments of `ensemble_specs`.
    """
    layers = ensemble_specs(modules, **stack)
    return DHEN(
        inputs.embedding_bags(dim, init=init),
        inputs.source.num_dense,
        bottom=bottom,
        top=top,
        layers=layers,
        form=inputs.form(mlp),
    )


def ensemble_specs(
    modules: Sequence[Any], *, layers: int = 0, embeddings: int = 0, **spec_fields: Any
) -> tuple[EnsembleSpec, ...]:
    """Specs of the layers of DHEN: `layers` equal specs, or one per list of modules.

    `embeddings` is the number of embeddings per layer; `spec_fields`: further fields of EnsembleSpec.
    """
    allowed = {field.name for field in fields(EnsembleSpec)} - {"modules", "num_out"}
    for key in spec_fields:
        if key not in allowed:
            raise UserError(f'unknown key "model.stack.{key}"{did_you_mean(key, allowed | {"layers", "embeddings"})}')
    are_lists = {isinstance(module, list | tuple) for module in modules}
    if isinstance(modules, str) or len(are_lists) > 1:
        raise UserError(f"model.modules is {modules!r}; wanted a list of modules, or a list of lists, one per layer")
    lists = [list(module) for module in modules] if True in are_lists else None
    if lists is not None and layers not in (0, len(lists)):
        raise UserError(f"model.stack.layers={layers}, and model.modules has {len(lists)} lists; drop one of the two")
    modules_by_layer = [modules] * (layers or 1) if lists is None else lists
    return tuple(
        EnsembleSpec(tuple(resolve_interaction(module) for module in layer_modules), embeddings, **spec_fields)
        for layer_modules in modules_by_layer
    )


def resolve_interaction(choice: Any) -> InteractionBuilder:
    """Resolve a module given by name, by {kind = name, ...} with its options, or as a function."""
    if isinstance(choice, str | Mapping):
        return _resolve_named(dict(choice) if isinstance(choice, Mapping) else {"kind": choice})
    if not callable(choice):
        raise UserError(
            f'model.modules: {choice!r} is not a module; wanted a name, {{kind = "name"}} or "module:attribute"'
        )
    builder: Any = choice
    return builder


def _resolve_named(options: dict[str, Any]) -> InteractionBuilder:
    name = str(options.pop("kind", ""))
    builder: Any = resolve_name("model.modules", name, INTERACTIONS)
    allowed_keys = list(signature(builder).parameters)[3:]  # after num_in, dim, num_out
    for key in options:
        if key not in allowed_keys:
            raise UserError(f'model.modules: unknown key "{key}" of "{name}"{did_you_mean(key, allowed_keys)}')
    return partial(builder, **options) if options else builder


def wide_deep(
    inputs: ClickInputs,
    *,
    dim: int,
    hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    sparse = inputs.embedding_bags(dim, 1, init=init)
    return WideDeep(sparse, inputs.source.num_dense, hidden=hidden, form=inputs.form(mlp))


def deepfm(
    inputs: ClickInputs,
    *,
    dim: int,
    hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    sparse = inputs.embedding_bags(dim, 1, init=init)
    return DeepFM(sparse, inputs.source.num_dense, hidden=hidden, form=inputs.form(mlp))


def dcn(
    inputs: ClickInputs,
    *,
    dim: int,
    num_cross: int,
    hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    sparse = inputs.embedding_bags(dim, init=init)
    return DCN(sparse, inputs.source.num_dense, num_cross=num_cross, hidden=hidden, form=inputs.form(mlp))


def dcn_v2(
    inputs: ClickInputs,
    *,
    dim: int,
    num_cross: int,
    hidden: list[int],
    rank: int = 0,
    stacked: bool = False,
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    sparse = inputs.embedding_bags(dim, init=init)
    return DCN(
        sparse,
        inputs.source.num_dense,
        hidden=hidden,
        num_cross=num_cross,
        v2=True,
        rank=rank,
        stacked=stacked,
        form=inputs.form(mlp),
    )


def het_wide_deep(inputs: ClickInputs, *, dim: int, hidden: list[int], init: float | None = None) -> nn.Module:
    sparse = inputs.embedding_bags(dim, init=init)
    return HetModel(sparse, HetWideDeep(sparse.dims, inputs.source.num_dense, hidden))


def het_deepfm(inputs: ClickInputs, *, dim: int, hidden: list[int], init: float | None = None) -> nn.Module:
    sparse = inputs.embedding_bags(dim, 1, init=init)
    return HetModel(sparse, HetDeepFM(sparse.dims, inputs.source.num_dense, hidden))


def het_dcn(inputs: ClickInputs, *, dim: int, hidden: list[int], init: float | None = None) -> nn.Module:
    sparse = inputs.embedding_bags(dim, init=init)
    return HetModel(sparse, HetDCN(sparse.dims, inputs.source.num_dense, hidden))


def autoint(
    inputs: ClickInputs,
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    hidden: list[int] | None = None,
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    return AutoInt(
        inputs.embedding_bags(dim, init=init),
        inputs.source.num_dense,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        hidden=hidden or (),
        form=inputs.form(mlp),
    )


def two_tower(
    inputs: ClickInputs,
    *,
    dim: int,
    user: list[str],
    item: list[str],
    hidden: list[int],
    softmax: Mapping[str, Any] = MappingProxyType({}),
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Two towers; `user`, `item`: features of each, the id first; `softmax`: the arguments of `SoftmaxSpec`."""
    spec, form = fill_dataclass("model.softmax", SoftmaxSpec, softmax), fill_dataclass("model.mlp", MLPForm, mlp)
    return make_two_tower(inputs.source, inputs.embedding_bags(dim, init=init), user, item, hidden, spec, form)


def shared_bottom(
    inputs: ClickInputs,
    *,
    tasks: Mapping[str, Any],
    dim: int,
    bottom: list[int],
    tower_hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    build = partial(SharedBottomDense, bottom=bottom, tower_hidden=tower_hidden)
    return _multi_task(build, inputs, inputs.embedding_bags(dim, init=init), tasks, mlp)


def mmoe(
    inputs: ClickInputs,
    *,
    tasks: Mapping[str, Any],
    dim: int,
    num_experts: int,
    expert_hidden: list[int],
    tower_hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    build = partial(MMoEDense, num_experts=num_experts, expert_hidden=expert_hidden, tower_hidden=tower_hidden)
    return _multi_task(build, inputs, inputs.embedding_bags(dim, init=init), tasks, mlp)


def ple(
    inputs: ClickInputs,
    *,
    tasks: Mapping[str, Any],
    dim: int,
    extraction: Mapping[str, Any],
    tower_hidden: list[int],
    init: float | None = None,
    mlp: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """PLE; `extraction` has the arguments of `ExtractionSpec`."""
    spec = fill_dataclass("model.extraction", ExtractionSpec, extraction)
    build = partial(PLEDense, extraction=spec, tower_hidden=tower_hidden)
    return _multi_task(build, inputs, inputs.embedding_bags(dim, init=init), tasks, mlp)


def _multi_task(
    build: Callable[..., nn.Module],
    inputs: ClickInputs,
    sparse: EmbeddingBags,
    tasks: Mapping[str, Any],
    mlp: Mapping[str, Any],
) -> nn.Module:
    """A multi-task model; `tasks`: the label and weight of each, by name; a label's default is the task's name."""
    specs, form = label_tasks(tasks), inputs.form(mlp)
    form.refuse_number_vectors("a model of several tasks")
    width = inputs.source.num_dense + sum(sparse.dims)
    output_biases = [inputs.form(mlp, spec.label).output_bias for spec in specs]
    return MultiTaskModel(sparse, build(width, len(specs), form=form, output_biases=output_biases), specs)


def label_tasks(tasks: Mapping[str, Any]) -> tuple[LabelTask, ...]:
    """The tasks of a recipe's section `model.tasks`."""
    if not isinstance(tasks, Mapping) or not all(isinstance(settings, Mapping) for settings in tasks.values()):
        raise UserError(f"model.tasks is {tasks!r}; wanted a section such as {{click = {{}}, buy = {{weight = 2.0}}}}")
    for name in tasks:
        if not name.isidentifier():
            raise UserError(f'model.tasks: "{name}" is not a name of letters, digits and underscores')
    return tuple(
        fill_dataclass(f"model.tasks.{name}", LabelTask, {"label": name, **settings, "name": name})
        for name, settings in tasks.items()
    )


CTR_MODELS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "logistic": logistic,
        "dlrm": dlrm,
        "dlrm_moe": dlrm_moe,
        "wide_deep": wide_deep,
        "deepfm": deepfm,
        "dcn": dcn,
        "dcn_v2": dcn_v2,
        "autoint": autoint,
        "dhen": dhen,
        "het_wide_deep": het_wide_deep,
        "het_deepfm": het_deepfm,
        "het_dcn": het_dcn,
        "two_tower": two_tower,
        "shared_bottom": shared_bottom,
        "mmoe": mmoe,
        "ple": ple,
    }
)
