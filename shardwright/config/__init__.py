"""Settings of a run: a TOML recipe with key=value overrides. An unknown key is an error."""

import difflib
import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator

from shardwright.config import fuxictr
from shardwright.config.evaluations import check_evaluations
from shardwright.config.overrides import apply_overrides
from shardwright.config.sections import ByteText, Files, OpenSection, Section
from shardwright.config.servers import ServerSettings
from shardwright.errors import UserError, check_regular_file, did_you_mean, shorten

RECIPES = Path(__file__).parents[1] / "recipes"
Filled = TypeVar("Filled")


class RunSettings(Section):
    directory: str = Field("runs", description="parent of the run directories")
    name: str = Field(
        "",
        pattern=r"^[\w][\w.+-]*$|^$",
        description="name of the run directory; empty: the recipe's name and the next free number",
    )
    resume: bool = Field(False, description="continue the named run from its last checkpoint")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute: auto takes a GPU if torch sees one; cuda without a GPU is an error"
    )
    private: bool = Field(False, description="make the run directory readable by its owner only (mode 700)")
    start: str = Field("", description="a run or checkpoint: a new run starts from its weights and optimizer state")
    loggers: tuple[str, ...] = Field(
        ("tensorboard",), strict=False, description='"tensorboard", "wandb", or a Callback of yours, "module:attribute"'
    )


class DataSettings(OpenSection):
    workers: int = Field(
        1, ge=0, le=64, description="processes that prepare batches, also of each reader; 0: this process"
    )
    prefetch: int = Field(4, ge=1, le=64, description="batches prepared ahead of training")
    shuffle: bool = Field(True, description="shuffle samples; false: keep the order of the data")
    test: Files = Field("", description="of a click log: files of the test rows, in place of split.test")
    valid: Files = Field("", description="of a click log: files of the validation rows, in place of split.validation")
    partitions: int = Field(
        1,
        ge=1,
        description="of a graph: partitions with few edges between them; each has an equal share of every batch",
    )
    deal: Literal["count", "length"] = Field(
        "count", description="how ranks share a batch: equal numbers of samples, and with length also equal work"
    )
    deal_cost: tuple[float, float, float] = Field(
        (8.0, 1.0, 0.005), strict=False, description="work of a sample with n ids of histories: a + b n + c n^2"
    )
    readers: tuple[str, ...] = Field((), strict=False, description="addresses of readers, instead of local workers")
    reader_keys: str = Field("", description="key file of the trainers, for readers on other hosts")

    @field_validator("deal_cost")
    @classmethod
    def _check_deal_cost(cls, cost: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(cost) < 0 or not max(cost):
            raise ValueError(f"cost is {cost}; wanted 0 or more, and one of them above 0")
        return cost


class ModelSettings(OpenSection):
    pass


class TableSettings(OpenSection):
    kind: str = Field("rowwise_adagrad", description="sgd, adagrad, rowwise_adagrad, adam, ..., lamb")


class DenseSettings(OpenSection):
    kind: str = Field("Adam", description="an optimizer of torch.optim")
    clip: float = Field(0.0, ge=0, description="clip dense gradients to this global norm; 0: no clipping")


class TrainSettings(Section):
    batch_size: int = Field(2048, ge=1, description="global batch size; with accumulate, of each micro-batch")
    accumulate: int = Field(1, ge=1, description="micro-batches per optimizer step (gradient accumulation)")
    steps: int = Field(500, ge=0, description="training steps; 0: train until stopped")
    epochs: int = Field(0, ge=0, description="train for this many epochs; 0: use `train.steps`")
    log_every: int = Field(20, ge=1, description="steps between log lines of metrics")
    eval_every: int = Field(100, ge=0, description="steps between evaluations; 0: only at the end")
    eval_epochs: int = Field(0, ge=0, description="epochs between evaluations, with eval_every=0; 0: use `eval_every`")
    eval_samples: int = Field(100_000, ge=0, description="samples of one evaluation; 0: none")
    checkpoint_every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="latest checkpoints to keep, with the bases of increments")
    increments: int = Field(
        0, ge=0, description="incremental checkpoints after each full one; they hold only the changed rows of tables"
    )
    publish_every: int = Field(0, ge=0, description="steps between publications for predictors; 0: publish nothing")
    keep_publications: int = Field(100, ge=1, description="latest publications to keep")
    warmup: int = Field(0, ge=0, description="warmup: steps over which the learning rates rise from 0")
    scale_rates: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale learning rates by (samples per step / base_batch), or by its square root"
    )
    base_batch: int = Field(0, ge=0, description="samples per step that the learning rates were chosen for")
    decay: Literal["none", "linear", "cosine"] = Field("none", description="learning-rate decay schedule")
    final_rate: float = Field(0.0, ge=0, le=1, description="final over initial learning rate of the decay schedule")
    monitor: str = Field(
        "", description="metric that says which state is the best: loss, ne, auc, auc-log_loss, ...; empty: ne or loss"
    )
    patience: int = Field(
        0, ge=0, description="early stopping after this many evaluations without improvement; 0: never"
    )
    group: str = Field("", description="feature that groups samples for grouped AUC, one id per sample; empty: none")
    progressive: bool = Field(False, description="score every batch before training on it, about a third slower")
    overlap: bool = Field(True, description="overlap communication with computation; false: wait for each message")
    products: Literal["auto", "blas", "onednn"] = Field(
        "auto", description="library for float32 matrix products on the CPU; auto: by processor type"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="labels 0 and 1 become s/2 and 1 - s/2 in the loss")

    @property
    def keeps_best(self) -> bool:
        """Whether the best evaluated state is saved, and restored at the end."""
        return bool(self.patience or self.monitor)

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all micro-batches and ranks."""
        return self.batch_size * self.accumulate


class PlanSettings(Section):
    cluster: str = Field(
        "", description="plan several ranks for this file from `shardwright measure`, or preset; empty: not measured"
    )
    pins: dict[str, str] = Field(
        default_factory=dict, description='sharding scheme to use, by table: "row", "column:4", "table@3"'
    )
    memory: ByteText = Field(
        "", description='memory of each rank, "4 GB"; other rows are on disk, or on table servers; empty: all of it'
    )
    hits: str = Field(default="", description="hits of caches that `shardwright cache-sim --write` recorded, a file")
    balance: tuple[float, float] | None = Field(
        None,
        strict=False,
        description="weights of work and of bytes sent that tables are placed by, [1, 0.3]; empty: several are tried",
    )
    routing: str = Field(default="", description="recorded routing of experts, a .jsonl file that the plan is made for")
    dense: str = Field(
        "", description='parallelism strategy of the dense model: "HSDP", "FSDP + full", ...; empty: fastest that fits'
    )
    pipeline: int = Field(default=0, ge=0, description="ranks of a pipeline; 1: no pipeline; 0: the planner chooses")
    micro_batches: int = Field(
        default=0, ge=0, description="micro-batches of a pipeline's step; 0: the planner chooses"
    )
    experts: int = Field(
        default=0, ge=0, description="ranks that experts are split over; 1: all on every rank; 0: the planner chooses"
    )
    expert_groups: int = Field(
        default=0, ge=0, description="steps in which rows of experts are exchanged; 0: the planner chooses"
    )
    expert_copies: str = Field(
        "", description='copies of popular experts: "none", "shadows", "even", "fastest"; empty: the planner chooses'
    )
    expert_exchange: str = Field(
        "",
        description='rows to the ranks of their experts ("flat"), or tokens to their hosts ("hosts"); empty: fastest',
    )

    @field_validator("balance")
    @classmethod
    def _check_balance(cls, weights: tuple[float, float] | None) -> tuple[float, float] | None:
        if weights is not None and (min(weights) < 0 or not max(weights)):
            raise ValueError(f"weights are {weights}; wanted 0 or more, and one of them above 0")
        return weights

    @field_validator("pins", mode="before")
    @classmethod
    def _name_tables(cls, pins: Any) -> Any:
        """Table names with dots, MEMBER.NAME, are nested sections in TOML and in dotted overrides."""
        if not isinstance(pins, dict):
            return pins
        named = {}
        for name, pin in pins.items():
            named |= {f"{name}.{table}": text for table, text in pin.items()} if isinstance(pin, dict) else {name: pin}
        return named


class Settings(Section):
    recipe: str = Field("", description="the recipe's name")
    seed: int = Field(1, ge=0, lt=2**63)
    allow: tuple[str, ...] = Field((), strict=False, description='permitted changes of the mathematics: "dense.bf16"')
    ranks: int = Field(
        1, ge=1, le=1024, description="processes to start on this host; 1: ranks of the launcher, if any"
    )
    restarts: int = Field(
        0, ge=0, le=1000, description="times that the ranks restart from the last checkpoint after one of them dies"
    )
    run: RunSettings = Field(default_factory=RunSettings)  # pyright: ignore[reportArgumentType]
    data: DataSettings
    model: ModelSettings
    tables: TableSettings | None = Field(None, description="the sparse optimizer of the embedding tables")
    dense: DenseSettings = Field(default_factory=lambda: DenseSettings(kind="Adam"))  # pyright: ignore[reportCallIssue]
    train: TrainSettings = Field(default_factory=TrainSettings)  # pyright: ignore[reportArgumentType]
    plan: PlanSettings = Field(default_factory=PlanSettings)  # pyright: ignore[reportArgumentType]
    servers: ServerSettings = Field(default_factory=ServerSettings)  # pyright: ignore[reportArgumentType]


def resolve_name(key: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """Resolve a name in a recipe: a built-in, or the user's code as "module:attribute"."""
    if name in built_in:
        return built_in[name]
    module, has_attribute, attribute = name.partition(":")
    if not has_attribute:
        raise UserError(
            f'{key}="{name}" is unknown{did_you_mean(name, built_in)}; or give your own code as "module:attribute"'
        )
    if (working_directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f'{key}="{name}": {error}; put the module into this directory or on PYTHONPATH') from None


def fill_dataclass(section: str, form: Callable[..., Filled], settings: Mapping[str, Any]) -> Filled:
    """The dataclass `form` with the values of a recipe's section; an unknown or missing key is an error."""
    known = {field.name: field for field in fields(form)}  # pyright: ignore[reportArgumentType]
    for name in settings:
        if name not in known:
            raise UserError(f"{section}.{name} is unknown{did_you_mean(name, known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in settings:
            raise UserError(f"{section}.{name} is missing")
    return form(**settings)


def recipes() -> dict[str, str]:
    """Title of each built-in recipe, by name: DATA-MODEL, or the name of a whole recipe."""
    titles = {path.stem: _title(path) for path in RECIPES.glob("*.toml")}
    for path in sorted((RECIPES / "data").glob("*.toml")):
        for model in tomllib.loads(path.read_text())["models"]:
            titles[f"{path.stem}-{model}"] = f"{_title(RECIPES / 'models' / f'{model}.toml')}, on {_title(path)}"
    return titles


def _title(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ")


def recipe_values(name: str) -> dict[str, Any]:
    """Settings of a built-in recipe: of the data, overridden by the model's, then by the model on this data."""
    if (whole := RECIPES / f"{name}.toml").exists():
        values = tomllib.loads(whole.read_text())
        base = values.pop("base", "")
        return _merge(recipe_values(base), values) if base else values
    data, _, model = name.partition("-")
    values = tomllib.loads((RECIPES / "data" / f"{data}.toml").read_text())
    model_on_data = values.pop("models")[model]
    return _merge(_merge(values, tomllib.loads((RECIPES / "models" / f"{model}.toml").read_text())), model_on_data)


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, value in changes.items():
        result[key] = _merge(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def recipe_text(recipe: str) -> str:
    """The TOML text of a built-in recipe, of a recipe file, or of a FuxiCTR configuration."""
    titles = recipes()
    if recipe.startswith(fuxictr.PREFIX):
        return f"# {recipe}\n{tomli_w.dumps(fuxictr.read_recipe(recipe))}"
    if recipe in titles:
        values = recipe_values(recipe)
        sections = {key: values[key] for key in (*Settings.model_fields,) if key in values}
        return f"# {titles[recipe]}\n{tomli_w.dumps(sections)}"
    return _recipe_file(recipe).read_text()


def _recipe_file(recipe: str) -> Path:
    """Path of the TOML file that a user gave in place of a built-in recipe."""
    path, titles = Path(recipe), recipes()
    if os.path.exists(path / "config.toml"):
        raise UserError(
            f"{recipe}: a run directory; to resume from its last checkpoint: shardwright train {path / 'config.toml'} "
            f"run.resume=true; to train again: shardwright train {path / 'config.toml'} run.name=NEW"
        )
    if path.suffix == ".toml":
        return path
    nearest = difflib.get_close_matches(recipe[:100], titles, n=1)
    hint = f'did you mean "{nearest[0]}"?' if nearest else "`shardwright train` lists them"
    raise UserError(f'no recipe "{recipe}"; {hint}; or give a .toml file')


def load(recipe: str, overrides: Sequence[str] = ()) -> Settings:
    """Load settings from a built-in recipe, a TOML file or a FuxiCTR configuration, then apply key=value overrides."""
    if recipe.startswith(fuxictr.PREFIX):
        return parse(apply_overrides(fuxictr.read_recipe(recipe), overrides), where=recipe)
    if recipe in recipes():
        values, where = recipe_values(recipe) | {"recipe": recipe}, f"recipe {recipe}"
        return parse(apply_overrides(values, overrides), where=where)
    path = _recipe_file(recipe)
    check_regular_file(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: {error}") from None
    values.setdefault("recipe", path.stem)
    return parse(apply_overrides(values, overrides), where=str(path))


class _Planning(Section):
    allow: tuple[str, ...] = Field((), strict=False)
    plan: PlanSettings = Field(default_factory=PlanSettings)  # pyright: ignore[reportArgumentType]
    servers: ServerSettings = Field(default_factory=ServerSettings)  # pyright: ignore[reportArgumentType]


def parse_planning(values: dict[str, Any], where: str) -> tuple[tuple[str, ...], PlanSettings, ServerSettings]:
    """Parse `allow`, `plan` and `servers`, the keys that apply to a workload without a recipe."""
    try:
        planning = _Planning.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_format_validation_error(error, _Planning)}") from None
    planning.servers.check(where)
    return planning.allow, planning.plan, planning.servers


def parse(values: dict[str, Any], *, where: str) -> Settings:
    """Validate plain values as Settings; `where` names their source in errors."""
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_format_validation_error(error)}") from None
    train = settings.train
    if settings.restarts and settings.ranks == 1:
        raise UserError(
            f"{where}: restarts={settings.restarts} applies only to ranks that this command starts: set ranks >= 2"
        )
    if not train.steps and (train.decay != "none" or train.epochs):
        raise UserError(f"{where}: train.steps=0 trains until stopped: drop train.decay and train.epochs")
    check_evaluations(train, where)
    if settings.data.reader_keys and not settings.data.readers:
        raise UserError(f"{where}: data.reader_keys={settings.data.reader_keys} without data.readers; set data.readers")
    settings.servers.check(where)
    if (train.scale_rates == "none") != (train.base_batch == 0):
        raise UserError(
            f"{where}: train.scale_rates={train.scale_rates} with train.base_batch={train.base_batch}; to scale "
            "rates, set linear or sqrt, and base_batch to the samples per step that they were chosen for"
        )
    return settings


def dump(settings: Settings) -> str:
    """Format settings as TOML, including all defaults."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))


def get_default(key: str) -> Any:
    """Default value of a dotted key; None for keys that the settings do not define."""
    *sections, last = key.split(".")
    model: Any = Settings
    for section in sections:
        field = model.model_fields.get(section)
        types = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel)), None)
        if model is None:
            return None
    field = model.model_fields.get(last)
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def _format_validation_error(error: ValidationError, root: type[BaseModel] = Settings) -> str:
    """Format the first validation error as a line; for an unknown key, suggest the nearest known key."""
    first = error.errors()[0]
    *sections, last = (str(part) for part in first["loc"])
    dotted = ".".join((*sections, last))
    if first["type"] == "extra_forbidden":
        model: Any = root
        for section in sections:
            types = (
                model.model_fields[section].annotation,
                *get_args(model.model_fields[section].annotation),
            )
            model = next(type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel))
        suggestion = did_you_mean(last, model.model_fields)
        return f'unknown key "{dotted}"{suggestion}'
    if first["type"] == "missing":
        return f'key "{dotted}" is missing'
    return f'key "{dotted}" is {shorten(repr(first["input"]), 100)}: {first["msg"][0].lower()}{first["msg"][1:]}'
