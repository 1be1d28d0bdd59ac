"""Models of FuxiCTR as the section [model] of a recipe: those whose form a built-in model has."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from shardwright.config.fuxictr.dataset import Dataset
from shardwright.config.fuxictr.keys import Keys
from shardwright.errors import UserError, did_you_mean

ACTIVATIONS = MappingProxyType(
    {
        "relu": "relu",
        "leakyrelu": "leaky_relu",
        "prelu": "prelu",
        "gelu": "gelu",
        "silu": "silu",
        "sigmoid": "sigmoid",
        "tanh": "tanh",
        "none": "none",
    }
)
WIDTHS = (64, 64, 64)  # FuxiCTR's default
GATE_WIDTHS = (128, 64)
INITIAL_BOUND = round(1e-4 * 3**0.5, 9)  # uniform values within it have the deviation of FuxiCTR's normal ones, 1e-4


def read_model(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    """The section [model] of an experiment."""
    name = keys.text("model")
    if name not in MODELS:
        raise UserError(f"{keys.where}.model={name} is not supported{did_you_mean(name, MODELS)}")
    if name != "DIN" and dataset.unpooled:
        raise UserError(
            f"{dataset.unpooled[0]}: feature_encoder: null is for DIN, and {keys.where} is {name}; drop it to average "
            "the sequence"
        )
    if name not in MULTI_TASK and len(dataset.labels) > 1:
        raise UserError(f"{keys.where}.model={name} has one label, and the dataset {len(dataset.labels)}; drop others")
    dim = keys.integer("embedding_dim", 10)
    model = MODELS[name](keys, dataset)
    return model | ({} if name == "LR" else {"dim": dim}) | {"init": INITIAL_BOUND}


def _logistic(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    return {"kind": "logistic"}


def _wide_deep(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    return {
        "kind": "wide_deep",
        "hidden": keys.widths("hidden_units", WIDTHS),
        "mlp": _form(keys, numbers=dataset.num_numbers > 0),
    }


def _deepfm(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    return {"kind": "deepfm", "hidden": keys.widths("hidden_units", WIDTHS), "mlp": _form(keys)}


def _dnn(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    """An MLP is DCN v2 without cross layers."""
    hidden = keys.widths("hidden_units", WIDTHS)
    return {
        "kind": "dcn_v2",
        "num_cross": 0,
        "stacked": True,
        "hidden": hidden,
        "mlp": _form(keys, numbers=dataset.num_numbers > 0),
    }


def _dcn(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    hidden = keys.widths("dnn_hidden_units")
    if not hidden:
        raise UserError(f"{keys.where}.dnn_hidden_units is empty: DCN without an MLP is not supported; give its widths")
    form = _form(keys, activation="dnn_activations", numbers=dataset.num_numbers > 0)
    num_cross = keys.integer("num_cross_layers", keys.integer("crossing_layers", 3))  # the latter is the older name
    return {"kind": "dcn", "num_cross": num_cross, "hidden": hidden, "mlp": form}


def _dcn_v2(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    keys.require("use_low_rank_mixture", (False,), "cross layers with a full matrix are; set it to false")
    keys.ignore(("low_rank", "num_experts"))  # of the mixture
    structure = keys.text("model_structure", "parallel")
    stacked, parallel = (keys.widths(f"{name}_dnn_hidden_units") for name in ("stacked", "parallel"))
    hidden = {"crossnet_only": [], "stacked": stacked, "parallel": parallel}.get(structure)
    if hidden is None:
        raise keys.error("model_structure", "crossnet_only, stacked and parallel are")
    if structure != "crossnet_only" and not hidden:
        raise UserError(f"{keys.where}.{structure}_dnn_hidden_units is empty; give widths, or set crossnet_only")
    return {
        "kind": "dcn_v2",
        "num_cross": keys.integer("num_cross_layers", 3),
        "stacked": structure != "parallel",
        "hidden": hidden,
        "mlp": _form(keys, activation="dnn_activations", numbers=dataset.num_numbers > 0),
    }


def _autoint(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    keys.require("use_residual", (True,), "AutoInt has a shortcut in every layer; set it to true")
    for name in ("layer_norm", "use_wide"):
        keys.require(name, (False,), "set it to false")
    if keys.same_for_all("net_dropout", 0):
        raise keys.error("net_dropout", "weights of attention have no dropout here; set it to 0")
    heads, width = keys.integer("num_heads", 1), keys.integer("attention_dim", 8)
    if heads < 1 or width % heads:
        raise keys.error("attention_dim", f"wanted a multiple of num_heads={heads}")
    keys.require("use_scale", (True, False), "wanted true or false")
    return {
        "kind": "autoint",
        "num_layers": keys.integer("attention_layers", 2),
        "num_heads": heads,
        "head_dim": width // heads,
        "hidden": keys.widths("dnn_hidden_units", WIDTHS),
        "mlp": _form(keys, activation="dnn_activations"),
    }


def _dlrm(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    keys.require("interaction_op", ("dot",), "dot is")
    bottom = keys.widths("bottom_mlp_units", WIDTHS)
    form = _form(keys, activation="top_mlp_activations", dropout="top_mlp_dropout")
    other = _form(keys, activation="bottom_mlp_activations", dropout="bottom_mlp_dropout")
    if dataset.num_numbers and other != form:
        raise keys.error("bottom_mlp_activations", "both MLPs have one activation and one dropout; make them equal")
    if dataset.num_numbers and len(form) > 2:
        raise UserError(
            f"{keys.where}: batch_norm and dropout of a DLRM with numeric columns are not supported, since its bottom "
            "MLP would have them after its last layer, too; set them to 0"
        )
    bottom = [*bottom, keys.integer("embedding_dim", 10)] if dataset.num_numbers else []
    return {"kind": "dlrm", "bottom": bottom, "top": keys.widths("top_mlp_units", WIDTHS), "mlp": form}


def _din(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    keys.require("attention_hidden_activations", ("ReLU", "relu"), "ReLU is")
    if keys.take("attention_hidden_activations") is None:
        raise UserError(f"{keys.where}.attention_hidden_activations is missing: Dice is not supported; set it to ReLU")
    keys.require("attention_output_activation", (), "drop it")
    keys.require("attention_dropout", (0,), "set it to 0")
    targets, sequences = keys.names("din_target_field"), keys.names("din_sequence_field")
    if dict(zip(sequences, targets, strict=False)) != dataset.histories or len(sequences) != len(targets):
        raise UserError(
            f"{keys.where}: din_sequence_field and din_target_field are {sequences} and {targets}; wanted the "
            f"sequences with share_embedding and the columns that they name, {dict(dataset.histories)}"
        )
    return {
        "kind": "din",
        "attention": keys.widths("attention_hidden_units", (64,)),
        "normalize": keys.flag("din_use_softmax", False),
        "hidden": keys.widths("dnn_hidden_units", (512, 128, 64)),
        "mlp": _form(keys, activation="dnn_activations", numbers=dataset.num_numbers > 0),
    }


def _shared_bottom(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    bottom = keys.widths("bottom_hidden_units", WIDTHS)
    return {"kind": "shared_bottom", "bottom": bottom, **_towers(keys, dataset, (64,))}


def _mmoe(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    _refuse_deep_gates(keys)
    return {
        "kind": "mmoe",
        "num_experts": keys.integer("num_experts", 4),
        "expert_hidden": keys.widths("expert_hidden_units", (512, 256, 128)),
        **_towers(keys, dataset, (128, 64)),
    }


def _ple(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    _refuse_deep_gates(keys)
    if keys.integer("num_layers", 1) != 1:
        raise keys.error("num_layers", "one layer is, since the gate of the shared experts has all experts here")
    extraction = {
        "experts": keys.integer("num_specific_experts", 1),
        "shared": keys.integer("num_shared_experts", 1),
        "hidden": keys.widths("expert_hidden_units", (512, 256, 128)),
        "layers": 1,
    }
    return {"kind": "ple", "extraction": extraction, **_towers(keys, dataset, (128, 64))}


MULTI_TASK = ("SharedBottom", "MMoE", "PLE")
MODELS: MappingProxyType[str, Callable[[Keys, Dataset], dict[str, Any]]] = MappingProxyType(
    {
        "LR": _logistic,
        "WideDeep": _wide_deep,
        "DeepFM": _deepfm,
        "DNN": _dnn,
        "DCN": _dcn,
        "DCNv2": _dcn_v2,
        "AutoInt": _autoint,
        "DLRM": _dlrm,
        "DIN": _din,
        "SharedBottom": _shared_bottom,
        "MMoE": _mmoe,
        "PLE": _ple,
    }
)


def _form(
    keys: Keys, *, activation: str = "hidden_activations", dropout: str = "net_dropout", numbers: bool = False
) -> dict[str, Any]:
    """The section [model.mlp]; the bias of the logit begins at 0, as in FuxiCTR.

    `numbers`: whether the model has numeric columns, which need number_vectors to have vectors as in FuxiCTR.
    """
    is_null = keys.take(activation, "ReLU") is None  # which FuxiCTR reads as linear layers
    name = "none" if is_null else str(keys.same_for_all(activation, "ReLU"))
    known = ACTIVATIONS.get(name.lower().replace("_", ""))
    if known is None:
        raise keys.error(activation, f"{', '.join(ACTIVATIONS)} are supported")
    form: dict[str, Any] = {"activation": known, "output_bias": 0.0}
    if numbers:
        form["number_vectors"] = True
    if keys.flag("batch_norm", False):
        form["norm"] = "batch"
    rate = keys.same_for_all(dropout, 0)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise keys.error(dropout, "wanted a number")
    if rate:
        form["dropout"] = float(rate)
    return form


def _towers(keys: Keys, dataset: Dataset, default: tuple[int, ...]) -> dict[str, Any]:
    """The keys that all models of several tasks share."""
    form = _form(keys)
    if keys.integer("num_tasks", len(dataset.labels)) != len(dataset.labels):
        raise keys.error("num_tasks", f"the dataset has {len(dataset.labels)} labels")
    keys.require("loss_weight", ("EQ",), "EQ is")
    tasks: dict[str, Any] = {name: {} for name in dataset.labels}
    return {"tower_hidden": keys.widths("tower_hidden_units", default), "tasks": tasks, "mlp": form}


def _refuse_deep_gates(keys: Keys) -> None:
    if keys.widths("gate_hidden_units", GATE_WIDTHS):
        raise UserError(f"{keys.where}.gate_hidden_units: gates are linear here; set gate_hidden_units: []")
