"""FuxiCTR configurations: recipes, training, errors, and models against plain torch ones; golden/ has all recipes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from fuxictr_files import CATEGORIES, COMMON, DATASET, HISTORY, NUMBERS, write_configuration, write_data
from torch import nn

from shardwright import cli, config
from shardwright.data.loading.loader import Loader
from shardwright.errors import UserError
from shardwright.runtime.run import recipe
from shardwright.runtime.run.early_stopping import EarlyStopping
from shardwright.runtime.run.train import train

WITH_HISTORY = DATASET | {"feature_cols": [CATEGORIES, NUMBERS, HISTORY]}
UNPOOLED = DATASET | {"feature_cols": [CATEGORIES, NUMBERS, HISTORY | {"feature_encoder": None}]}
LABELS = DATASET | {"label_col": [{"name": "clk", "dtype": "float"}, {"name": "buy", "dtype": "float"}]}
TWO_TASKS = {"num_tasks": 2, "task": ["binary_classification"] * 2, "tower_hidden_units": [8]}
HIDDEN = {"hidden_units": [16, 8], "hidden_activations": "relu", "batch_norm": True, "net_dropout": 0.1}
REGULARIZED = {"embedding_regularizer": 1e-6, "net_regularizer": "l2(1.e-7)"}
CROSSED = {"model": "DCNv2", "num_cross_layers": 2, "dnn_activations": "ReLU", "batch_norm": True, "net_dropout": 0.2}
# By name: the keys of an experiment, and its dataset.
MODELS = {
    "LR": ({"model": "LR", "regularizer": 1e-5}, DATASET),
    "WideDeep": ({"model": "WideDeep", **HIDDEN}, DATASET),
    "DeepFM": ({"model": "DeepFM", **HIDDEN, **REGULARIZED}, DATASET),
    "DNN": ({"model": "DNN", "hidden_units": [16], "hidden_activations": "PReLU"}, DATASET),
    "DCN": ({"model": "DCN", "crossing_layers": 2, "dnn_hidden_units": [16, 8]}, DATASET),
    "DCNv2 parallel": (CROSSED | {"model_structure": "parallel", "parallel_dnn_hidden_units": [16, 8]}, DATASET),
    "DCNv2 stacked": (CROSSED | {"model_structure": "stacked", "stacked_dnn_hidden_units": [16]}, DATASET),
    "DCNv2 cross layers": ({"model": "DCNv2", "model_structure": "crossnet_only"}, DATASET),
    "AutoInt": ({"model": "AutoInt", "attention_dim": 8, "num_heads": 2, "dnn_hidden_units": None}, DATASET),
    "AutoInt+": ({"model": "AutoInt", "attention_layers": 1, "dnn_hidden_units": [8]}, DATASET),
    "DLRM": ({"model": "DLRM", "bottom_mlp_units": [8], "top_mlp_units": [16, 8]}, DATASET),
    "DIN": (
        {
            "model": "DIN",
            "din_target_field": ["item"],
            "din_sequence_field": ["history"],
            "attention_hidden_units": [8],
            "attention_hidden_activations": "ReLU",
            "din_use_softmax": True,
            "dnn_hidden_units": [16],
        },
        UNPOOLED,
    ),
    "SharedBottom": ({"model": "SharedBottom", "bottom_hidden_units": [16], **TWO_TASKS}, LABELS),
    "MMoE": ({"model": "MMoE", "expert_hidden_units": [8], "gate_hidden_units": [], **TWO_TASKS}, LABELS),
    "PLE": ({"model": "PLE", "expert_hidden_units": [8], "gate_hidden_units": [], **TWO_TASKS}, LABELS),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data()
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains(name):
    write_data(200)
    keys, dataset = MODELS[name]
    name = write_configuration({"test": keys}, dataset)
    train(config.load(name, ["data.workers=0", "train.epochs=0", "train.steps=2", "run.name=short"]))


@pytest.mark.parametrize("name", ["DeepFM", "DCNv2 parallel"])
def test_an_experiment_trains_with_patience_and_scores_its_test_rows(name, folder):
    write_data(1500)
    keys, dataset = MODELS[name]
    keys = keys | {"epochs": 8, "learning_rate": 0.02, "monitor": {"AUC": 1, "logloss": -1}}
    result = train(config.load(write_configuration({"tiny_001": keys}, dataset), ["data.workers=0"]))
    assert result.path == Path("runs/tiny_001-001")
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    scores = [line["auc"] - line["log_loss"] for line in lines if line["kind"] == "eval"]
    assert len(scores) <= 8 and max(scores) > 0
    best = scores.index(max(scores)) + 1
    assert len(scores) in (8, best + 2)  # two evaluations in a row that were not better end it
    test = [line for line in lines if line["kind"] == "test"]
    assert len(test) == 1 and test[0]["auc"] > 0.6


def test_a_recipe_is_that_of_a_toml_file(folder):
    name = write_configuration({"test": MODELS["DeepFM"][0]}, WITH_HISTORY)
    Path("test.toml").write_text(config.recipe_text(name))
    assert config.load("test.toml", ["train.epochs=5"]) == config.load(name, ["train.epochs=5"])
    settings = config.load(name)
    assert settings.data.arguments["schema"] == {
        "label": "clk",
        "numbers": ["price", "age"],
        "categories": ["user", "item"],
        "lists": ["history"],
        "histories": {"history": "item"},
        "separator": "^",
        "history_length": 3,
    }
    assert settings.dense.arguments["weight_decay"] == 1e-7 and settings.tables.arguments["weight_decay"] == 1e-6


def test_no_activation_is_null(folder):
    name = write_configuration({"test": {"model": "DeepFM", "hidden_activations": None}}, DATASET)
    assert config.load(name).model.arguments["mlp"]["activation"] == "none"


def test_numbers_stay_as_they_are_or_are_scaled(folder):
    write_data(100)
    scaled = [CATEGORIES, NUMBERS | {"normalizer": "StandardScaler"}]
    for columns, mean in ((DATASET["feature_cols"], None), (scaled, 0.0)):
        name = write_configuration({"test": {"model": "LR"}}, DATASET | {"feature_cols": columns})
        source = recipe.make_source(config.load(name))
        batch = Loader(source, batch_size=100).peek()
        prices = [float(line.split(",")[2]) for line in Path("data/train.csv").read_text().splitlines()[1:]]
        expected = sum(prices) / 100 if mean is None else mean
        assert batch.dense[:, 0].mean().item() == pytest.approx(expected, abs=1e-6)


# A plain torch model in the form that FuxiCTR's documentation gives: every feature, numeric ones too, has a vector.


class Plain(nn.Module):
    """What DeepFM, Wide & Deep and DCN v2 have in common: vectors and weights of features, and an MLP."""

    def __init__(self, rows: list[int], num_numbers: int, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(num, dim) for num in rows)
        self.weights = nn.ModuleList(nn.Embedding(num, 1) for num in rows)
        self.number_vectors = nn.ModuleList(nn.Linear(1, dim, bias=False) for _ in range(num_numbers))
        self.number_weights = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(num_numbers))
        self.bias = nn.Parameter(torch.zeros(()))
        widths = [(len(rows) + num_numbers) * dim, *hidden]
        layers = [
            nn.Sequential(nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.ReLU())
            for wide, narrow in zip(widths, hidden, strict=False)
        ]
        self.deep = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 1)
        self.cross = nn.ModuleList(nn.Linear(widths[0], widths[0]) for _ in range(2))
        self.cross_head = nn.Linear(widths[0], 1, bias=False)

    def embed(self, numbers, ids):
        vectors = [layer(numbers[:, [i]]) for i, layer in enumerate(self.number_vectors)]
        return torch.stack([*vectors, *(layer(ids[i]) for i, layer in enumerate(self.vectors))], dim=1)

    def linear(self, numbers, ids):
        terms = [layer(numbers[:, [i]]) for i, layer in enumerate(self.number_weights)]
        return self.bias + sum(term.squeeze(1) for term in [*terms, *(w(ids[i]) for i, w in enumerate(self.weights))])

    def wide_deep(self, numbers, ids):
        return self.linear(numbers, ids) + self.head(self.deep(self.embed(numbers, ids).flatten(1))).squeeze(1)

    def deepfm(self, numbers, ids):
        x = self.embed(numbers, ids)
        pairs = sum((x[:, i] * x[:, j]).sum(1) for i in range(x.shape[1]) for j in range(i))
        return self.wide_deep(numbers, ids) + pairs

    def dcn_v2(self, numbers, ids):
        first = x = self.embed(numbers, ids).flatten(1)
        for layer in self.cross:
            x = x + first * layer(x)
        return (self.cross_head(x) + self.head(self.deep(first))).squeeze(1)


def weights_of(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The plain model's weights, from the built-in model's state."""
    weights = {f"number_vectors.{i}.weight": state["dense.numbers.weight"][i].unsqueeze(1) for i in range(2)}
    weights |= {
        f"vectors.{i}.weight": state[f"sparse.embedding_bags.{name}.weight"] for i, name in enumerate(("user", "item"))
    }
    for layer in range(2):
        for part, place in ((0, 3 * layer), (1, 3 * layer + 1)):
            steps = f"dense.deep.steps.{place}"
            weights |= {f"deep.{layer}.{part}.{value}": state[f"{steps}.{value}"] for value in ("weight", "bias")}
    if kind == "dcn_v2":
        for i in range(2):
            weights |= {f"cross.{i}.{value}": state[f"dense.crosses.{i}.up.{value}"] for value in ("weight", "bias")}
        weights["cross_head.weight"], weights["head.weight"] = state["dense.head.weight"].split([16, 8], dim=1)
        return weights | {"head.bias": state["dense.head.bias"]}
    linear = {"deepfm": "dense.first_order", "wide_deep": "dense.wide"}[kind]
    weights |= {
        f"weights.{i}.weight": state[f"sparse.embedding_bags.{name}_1.weight"]
        for i, name in enumerate(("user", "item"))
    }
    weights |= {f"number_weights.{i}.weight": state[f"{linear}.weight"][i].reshape(1, 1) for i in range(2)}
    head = {f"head.{value}": state[f"dense.deep.steps.6.{value}"] for value in ("weight", "bias")}
    return weights | head | {"bias": state[f"{linear}.bias"]}


@pytest.mark.parametrize("kind", ["deepfm", "wide_deep", "dcn_v2"])
def test_a_model_equals_the_form_of_fuxictr(kind):
    write_data(300)
    deep = {"hidden_units": [16, 8], "batch_norm": True}
    crossed = {"parallel_dnn_hidden_units": [16, 8], "num_cross_layers": 2, "batch_norm": True}
    keys = {
        "deepfm": {"model": "DeepFM", **deep},
        "wide_deep": {"model": "WideDeep", **deep},
        "dcn_v2": {"model": "DCNv2", **crossed},
    }[kind]
    settings = config.load(write_configuration({"test": keys}, DATASET))
    source = recipe.make_source(settings)
    batch = Loader(source, batch_size=64, seed=1).peek()
    model = recipe.make_model(settings, source).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    plain = Plain([rows for _, rows, _ in source.features], 2, 4, [16, 8]).double()
    assert not plain.load_state_dict(weights_of(model.state_dict(), kind), strict=False).unexpected_keys
    vectors, numbers = model.sparse(batch), batch.dense.double()
    doubled = replace(vectors, pooled_BD=vectors.pooled_BD.double())
    logits = model.dense.double()(replace(batch, dense=numbers), doubled)
    expected = getattr(plain, kind)(numbers, batch.features.values.reshape(2, -1))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


# Errors


def column(**keys) -> dict:
    """The dataset with another first column."""
    return {"feature_cols": [CATEGORIES | keys]}


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"some_key": 3}, "model_config.yaml: test.some_key is not supported; "),
        ({"hidden_unit": [3]}, 'model_config.yaml: test.hidden_unit is not supported; did you mean "hidden_units"?'),
        ({"model": "FM"}, "test.model=FM is not supported; allowed: AutoInt, DCN, DCNv2, DIN, DLRM, DNN, DeepFM, LR"),
        ({"model": "DeepFN"}, 'test.model=DeepFN is not supported; did you mean "DeepFM"?'),
        ({"batch_size": None}, "test.batch_size is missing"),
        ({"learning_rate": "fast"}, "test.learning_rate=fast is not supported; wanted a number"),
        ({"epochs": float("inf")}, "test.epochs=inf is not supported; wanted a number"),
        ({"net_dropout": "much"}, "test.net_dropout=much is not supported; wanted a number"),
        ({"optimizer": "lion"}, "test.optimizer=lion is not supported; adam, adagrad, sgd are supported"),
        ({"task": "regression"}, "test.task=regression is not supported; only binary_classification is"),
        ({"embedding_regularizer": "l1(1e-5)"}, "test.embedding_regularizer=l1(1e-5) is not supported; a number and"),
        ({"hidden_activations": "dice"}, "test.hidden_activations=dice is not supported; relu, leakyrelu"),
        ({"net_dropout": [0.1, 0.2]}, "test.net_dropout=[0.1, 0.2] is not supported; one value for all layers"),
        ({"metrics": ["NDCG"]}, "test.metrics=['NDCG'] is not supported; AUC, logloss, binary_crossentropy, gAUC are"),
        ({"metrics": ["gAUC"]}, "test.metrics: gAUC needs group_id"),
        ({"metrics": ["gAUC"], "group_id": "uid"}, "test.group_id=uid is not supported; gAUC needs a categorical"),
        ({"monitor": {"AUC": 2, "logloss": -1}}, "is not supported; weights of 1 and -1 are supported"),
        ({"monitor_mode": "min"}, "test.monitor_mode=min is not supported; then a worse auc would be the best"),
        ({"monitor": "NDCG"}, "test.monitor=NDCG is not supported; AUC, logloss, binary_crossentropy, gAUC are"),
        ({"early_stop_patience": 0}, "test.early_stop_patience=0 is not supported; wanted 1 or more"),
        ({"use_features": ["user"]}, "test.use_features=['user'] is not supported; choose features by active"),
        ({"model": "LR", "net_regularizer": 1e-5}, "test.net_regularizer is not supported; did you mean"),
        (CROSSED | {"use_low_rank_mixture": True}, "test.use_low_rank_mixture=True is not supported"),
        (CROSSED | {"model_structure": "stacked_parallel"}, "test.model_structure=stacked_parallel is not supported"),
        (CROSSED, "test.parallel_dnn_hidden_units is empty; give widths, or set crossnet_only"),
        ({"model": "DCN"}, "test.dnn_hidden_units is empty: DCN without an MLP is not supported"),
        ({"model": "AutoInt", "layer_norm": True}, "test.layer_norm=True is not supported; set it to false"),
        ({"model": "DLRM", "batch_norm": True}, "batch_norm and dropout of a DLRM with numeric columns"),
        ({"model": "DIN"}, "test.attention_hidden_activations is missing: Dice is not supported"),
        ({"model": "MMoE"}, "test.gate_hidden_units: gates are linear here; set gate_hidden_units: []"),
        ({"model": "PLE", "gate_hidden_units": [], "num_layers": 2}, "test.num_layers=2 is not supported; one layer"),
        ({"model": "SharedBottom", "num_tasks": 2}, "test.num_tasks=2 is not supported; the dataset has 1 labels"),
        ({"dataset_id": "other"}, "test.dataset_id=other: config/dataset_config.yaml has no such section"),
    ],
)
def test_an_experiment_that_is_not_supported_is_one_line(keys, message):
    assert_one_line(write_configuration({"test": {"model": "DeepFM"} | keys}, DATASET), message)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"data_formats": "csv"},
            'dataset_config.yaml: tiny.data_formats is not supported; did you mean "data_format"',
        ),
        ({"data_format": "h5"}, "tiny.data_format=h5 is not supported; csv and parquet are supported"),
        ({"train_data": "data/gone.csv"}, "tiny.train_data=data/gone.csv: no such file, neither from here nor from"),
        ({"valid_data": None}, "tiny.valid_data is missing"),
        ({"label_col": None}, "tiny.label_col=None: wanted a column such as"),
        ({"label_col": LABELS["label_col"]}, "test.model=DeepFM has one label, and the dataset 2"),
        ({"feature_cols": None}, "tiny.feature_cols: wanted a list of columns"),
        (column(type="embedding"), "tiny.user.type=embedding is not supported; numeric, categorical, sequence and"),
        (column(preprocess="convert_to_bucket"), "tiny.user.preprocess=convert_to_bucket is not supported; compute"),
        (column(embedding_dim=3), "tiny.user.embedding_dim is not supported"),
        (column(min_categr_count=9), "tiny.user.min_categr_count=9 is not supported; one count for the dataset"),
        (column(active="yes"), "tiny.user.active=yes is not supported; wanted true or false"),
        ({"feature_cols": [NUMBERS | {"normalizer": "MinMaxScaler"}]}, "tiny.price.normalizer=MinMaxScaler is not"),
        (
            {"feature_cols": [NUMBERS | {"fill_na": -1}]},
            "tiny.price.fill_na=-1 is not supported; a missing number is 0",
        ),
        ({"feature_cols": [HISTORY]}, "tiny.history.share_embedding=item is no active categorical column"),
        ({"feature_cols": [CATEGORIES, HISTORY | {"padding": "post"}]}, "tiny.history.max_len=3 is not supported"),
        ({"feature_cols": UNPOOLED["feature_cols"]}, "history: feature_encoder: null is for DIN"),
        (
            {"feature_cols": [CATEGORIES, HISTORY, HISTORY | {"name": "b", "splitter": "|"}]},
            "tiny.feature_cols: sequences have splitter ^, |; one for all",
        ),
        (
            {"feature_cols": [NUMBERS, {"name": "buy", "type": "numeric", "normalizer": "StandardScaler"}]},
            "tiny.feature_cols: normalizer=StandardScaler is set for some numeric columns only",
        ),
    ],
)
def test_a_dataset_that_is_not_supported_is_one_line(change, message):
    assert_one_line(write_configuration({"test": {"model": "DeepFM"}}, DATASET | change), message)


def test_several_experiments_and_missing_files_are_one_line(folder):
    name = write_configuration({"a": {"model": "LR"}, "b": {"model": "DeepFM"}}, DATASET)
    path = name.removeprefix("fuxictr:")
    assert_one_line(name, f"{path}: 2 experiments; choose one as fuxictr:{path}#a: a, b")
    assert_one_line(f"{name}#c", f"{path}: no experiment c; allowed: a, b")
    assert config.load(f"{name}#b").recipe == "b" and config.load("fuxictr:config#a").recipe == "a"
    Path("config/dataset_config.yaml").unlink()
    assert_one_line(
        f"{name}#a", "a.dataset_id=tiny: config/model_config.yaml has no such section, and there is no file"
    )
    assert_one_line("fuxictr:gone.yaml", "gone.yaml: no such file; wanted a model_config.yaml of FuxiCTR")
    Path("config/model_config.yaml").write_text("Base: {a: [}")
    assert_one_line(name, f"{path}: line 1: ")
    Path("config/model_config.yaml").write_text("- a\n- b\n")
    assert_one_line(name, f"{path}: wanted sections of keys")


def test_model_and_dataset_may_be_in_one_file_and_paths_relative_to_it(folder, monkeypatch):
    sections = {"alone": COMMON | {"model": "LR"}, "tiny": DATASET}
    Path("data/model_config.yaml").write_text(yaml.safe_dump(sections).replace("data/t", "t").replace("data/v", "v"))
    settings = config.load("fuxictr:data/model_config.yaml", ["train.batch_size=32"])
    assert settings.data.arguments["path"] == "data/train.csv" and settings.train.batch_size == 32


def assert_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        config.load(name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_monitor_may_be_a_sum_of_metrics(folder):
    for monitor, mode, expected in (
        ("logloss", "min", "log_loss"),
        ({"AUC": 1, "logloss": -1}, "max", "auc-log_loss"),
        ({"AUC": -1, "logloss": 1, "gAUC": 0}, "min", "-auc+log_loss"),
    ):
        keys = {"model": "LR", "monitor": monitor, "monitor_mode": mode}
        assert config.load(write_configuration({"test": keys}, DATASET)).train.monitor == expected
    tasks = MODELS["SharedBottom"][0]
    for monitor, expected in (("AUC", "clk.auc+buy.auc"), ("buy_AUC", "buy.auc")):
        name = write_configuration({"test": tasks | {"monitor": monitor}}, LABELS)
        assert config.load(name).train.monitor == expected
    stopping = EarlyStopping(2, "auc-log_loss")
    assert stopping.metric_of({"auc": 0.75, "log_loss": 0.5, "step": 1}) == ("auc-log_loss", 0.25)
    assert stopping.update(0.2, 1) and stopping.update(0.3, 2) and not stopping.update(0.1, 3)
    for monitor in ("auc+log_loss", "auc-", "auc-acu"):
        with pytest.raises(UserError, match="train.monitor=auc"):
            config.load(name, [f"train.monitor={monitor}"])


def test_the_command_line_plans_and_prints_a_configuration(folder, monkeypatch, capsys):
    write_data(300)
    name = write_configuration({"test": MODELS["DeepFM"][0]}, DATASET)
    for arguments, expected in (
        (["recipe", name], f"# {name}\nrecipe = "),
        (["plan", "fuxictr:config", "--cluster", "two-cores"], "user"),
        (["train", "fuxictr:config#other"], "config/model_config.yaml: no experiment other; allowed: test"),
    ):
        monkeypatch.setattr("sys.argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        output = capsys.readouterr()
        assert expected in output.out + output.err
        assert exit_info.value.code == (2 if arguments[0] == "train" else 0)
    assert Path("plan.json").exists()


def test_a_model_with_a_bottom_mlp_refuses_vectors_of_numbers(folder):
    write_data(100)
    settings = config.load(write_configuration({"test": MODELS["DLRM"][0]}, DATASET), ["model.mlp.number_vectors=true"])
    with pytest.raises(UserError, match="DLRM: number_vectors=true, but it reads"):
        recipe.make_model(settings, recipe.make_source(settings))
