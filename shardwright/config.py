"""A run's settings: a TOML recipe, with key=value overrides. An unknown key is an error with the nearest name."""

import difflib
import importlib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.errors import UserError, check_regular_file, did_you_mean, shorten

RECIPES = Path(__file__).parent / "recipes"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OpenSection(BaseModel):
    """A section whose further keys are the arguments of what its `kind` names."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    kind: str = Field(description='a built-in name, or "module:attribute" of your own')

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class RunSettings(Section):
    directory: str = Field("runs", description="where run directories are made")
    name: str = Field(
        "",
        pattern=r"^[\w][\w.+-]*$|^$",
        description="the run's directory; empty: the recipe's name and the next free number",
    )
    resume: bool = Field(False, description="continue the named run from its last checkpoint")
    private: bool = Field(False, description="make the run directory readable by its owner only (mode 700)")
    start: str = Field("", description="a run or checkpoint whose weights and optimizer state a new run begins with")


class DataSettings(OpenSection):
    workers: int = Field(1, ge=0, le=64, description="processes that prepare batches, of each reader too; 0: this one")
    prefetch: int = Field(4, ge=1, le=64, description="batches prepared ahead")
    shuffle: bool = Field(True, description="false: in the order of the data")
    readers: tuple[str, ...] = Field((), strict=False, description="addresses of readers, in place of workers here")
    reader_keys: str = Field("", description="the trainers' file of keys, for readers on other hosts")


class ModelSettings(OpenSection):
    pass


class TableSettings(OpenSection):
    kind: str = Field("rowwise_adagrad", description="sgd, adagrad, rowwise_adagrad, adam, ..., lamb")


class DenseSettings(OpenSection):
    kind: str = Field("Adam", description="an optimizer of torch.optim")
    clip: float = Field(0.0, ge=0, description="the longest that all dense gradients may be together; 0: any")


class TrainSettings(Section):
    batch_size: int = Field(2048, ge=1, description="samples of a batch, of all ranks together")
    accumulate: int = Field(1, ge=1, description="batches that make a step")
    steps: int = Field(500, ge=0, description="training steps; 0: until it is stopped")
    epochs: int = Field(0, ge=0, description="passes over the data instead of steps; 0: steps")
    log_every: int = Field(20, ge=1, description="steps between lines of metrics")
    eval_every: int = Field(100, ge=0, description="steps between evaluations; 0: only at the end")
    eval_samples: int = Field(100_000, ge=0, description="samples of one evaluation; 0: none")
    checkpoint_every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="that are kept, and what they go on from")
    increments: int = Field(
        0, ge=0, description="checkpoints after each whole one that have only rows of tables that changed"
    )
    publish_every: int = Field(0, ge=0, description="steps between publications for predictors; 0: none")
    keep_publications: int = Field(100, ge=1, description="the last ones that stay")
    warmup: int = Field(0, ge=0, description="steps over which the learning rates rise from 0")
    scale_rates: Literal["none", "linear", "sqrt"] = Field(
        "none", description="times a step's samples over base_batch, or the root of that"
    )
    base_batch: int = Field(0, ge=0, description="samples of the step that the learning rates are for")
    decay: Literal["none", "linear", "cosine"] = Field("none", description="how they fall until the last step")
    final_rate: float = Field(0.0, ge=0, le=1, description="share of the learning rates at the end of the decay")
    patience: int = Field(0, ge=0, description="evaluations without a better one until the run stops; 0: it does not")
    group: str = Field("", description="a feature of one id per sample, for the AUC within its groups; empty: none")
    progressive: bool = Field(False, description="score every batch before training on it, about a third slower")
    overlap: bool = Field(True, description="of several ranks: false waits for every message at once")
    products: Literal["auto", "blas", "onednn"] = Field(
        "auto", description="library for float32 matrix products on the CPU; auto: by processor type"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="labels 0 and 1 become s/2 and 1 - s/2 in the loss")

    @property
    def samples_per_step(self) -> int:
        """Of a step."""
        return self.batch_size * self.accumulate


class PlanSettings(Section):
    cluster: str = Field(
        "", description="of several ranks: a file that measure wrote, or a published cluster; empty: not measured"
    )
    pins: dict[str, str] = Field(
        default_factory=dict, description='by table, how it must lie: "row", "column:4", "table@3"'
    )
    dense: str = Field(
        "", description='how the dense part is held: "HSDP", "FSDP + full", ...; empty: the fastest way that fits'
    )


class Settings(Section):
    recipe: str = Field("", description="the recipe's name")
    seed: int = Field(1, ge=0, lt=2**63)
    allow: tuple[str, ...] = Field((), strict=False, description='what may change the mathematics: "dense.bf16"')
    ranks: int = Field(1, ge=1, le=1024, description="processes to train in, started here; 1: as a launcher has it")
    restarts: int = Field(
        0, ge=0, le=1000, description="times that ranks started here start again from the last checkpoint when one dies"
    )
    run: RunSettings = Field(default_factory=RunSettings)  # pyright: ignore[reportArgumentType]
    data: DataSettings
    model: ModelSettings
    tables: TableSettings | None = Field(None, description="the optimizer inside the tables")
    dense: DenseSettings = Field(default_factory=lambda: DenseSettings(kind="Adam"))  # pyright: ignore[reportCallIssue]
    train: TrainSettings = Field(default_factory=TrainSettings)  # pyright: ignore[reportArgumentType]
    plan: PlanSettings = Field(default_factory=PlanSettings)  # pyright: ignore[reportArgumentType]


def resolve_name(key: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """What a name in a recipe stands for: a built-in, or one's own as "module:attribute"."""
    if name in built_in:
        return built_in[name]
    module, found, attribute = name.partition(":")
    if not found:
        raise UserError(
            f'{key}="{name}" is unknown{did_you_mean(name, built_in)}; or name your own as "module:attribute"'
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f'{key}="{name}": {error}; is it here or on PYTHONPATH?') from None


def recipes() -> dict[str, str]:
    """The recipes that come with Shardwright, DATA-MODEL, each with one line that describes it."""
    titles: dict[str, str] = {}
    for path in sorted((RECIPES / "data").glob("*.toml")):
        for model in tomllib.loads(path.read_text())["models"]:
            titles[f"{path.stem}-{model}"] = f"{_title(RECIPES / 'models' / f'{model}.toml')}, on {_title(path)}"
    return titles


def _title(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# ")


def recipe_values(name: str) -> dict[str, Any]:
    """A recipe from its parts: the data's settings, the model's, and those of the model on this data."""
    data, _, model = name.partition("-")
    values = tomllib.loads((RECIPES / "data" / f"{data}.toml").read_text())
    differences = values.pop("models")[model]
    return _merged(_merged(values, tomllib.loads((RECIPES / "models" / f"{model}.toml").read_text())), differences)


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def recipe_text(recipe: str) -> str:
    """A recipe as TOML, given its name or a file: as it is shipped, or as the file has it."""
    known = recipes()
    if recipe in known:
        values = recipe_values(recipe)
        ordered = {key: values[key] for key in ("seed", "data", "model", "tables", "dense", "train") if key in values}
        return f"# {known[recipe]}\n{tomli_w.dumps(ordered)}"
    return _recipe_file(recipe).read_text()


def _recipe_file(recipe: str) -> Path:
    """The TOML file that a user names in place of a recipe."""
    path, known = Path(recipe), recipes()
    if os.path.exists(path / "config.toml"):
        raise UserError(
            f"{recipe}: a run directory; to resume from its last checkpoint: shardwright train {path / 'config.toml'} "
            f"run.resume=true; to train it anew: shardwright train {path / 'config.toml'} run.name=NEW"
        )
    if path.suffix == ".toml":
        return path
    close = difflib.get_close_matches(recipe[:100], known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else "`shardwright train` lists them"
    raise UserError(f'no recipe "{recipe}"; {hint}; or give a .toml file')


def load(recipe: str, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a recipe's name or a TOML file, with dotted key=value overrides."""
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


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """These values with dotted key=value overrides."""
    for override in overrides:
        _apply(values, override)
    return values


class _Planning(Section):
    allow: tuple[str, ...] = Field((), strict=False)
    plan: PlanSettings = Field(default_factory=PlanSettings)  # pyright: ignore[reportArgumentType]


def parse_planning(values: dict[str, Any], where: str) -> tuple[tuple[str, ...], PlanSettings]:
    """`allow` and `plan`: the keys that a workload without a recipe has use for."""
    try:
        found = _Planning.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_told(error, _Planning)}") from None
    return found.allow, found.plan


def parse(values: dict[str, Any], *, where: str) -> Settings:
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_told(error)}") from None
    train = settings.train
    if settings.restarts and settings.ranks == 1:
        raise UserError(
            f"{where}: restarts={settings.restarts} is for ranks that are started here: set ranks=2 or more"
        )
    if not train.steps and (train.decay != "none" or train.epochs):
        raise UserError(f"{where}: train.steps=0 trains until it is stopped: drop train.decay and train.epochs")
    if train.patience and train.publish_every:
        raise UserError(
            f"{where}: train.patience={train.patience} takes the best state back at the end, which nobody who follows "
            "publications would hear of; drop it or train.publish_every"
        )
    if train.patience and not train.eval_samples:
        raise UserError(f"{where}: train.patience={train.patience} needs evaluations; set train.eval_samples")
    if settings.data.reader_keys and not settings.data.readers:
        raise UserError(f"{where}: data.reader_keys={settings.data.reader_keys} without data.readers; name the readers")
    if (train.scale_rates == "none") != (train.base_batch == 0):
        raise UserError(
            f"{where}: train.scale_rates={train.scale_rates} with train.base_batch={train.base_batch}; to scale rates "
            "set linear or sqrt, and base_batch to the samples of the step that they are for"
        )
    return settings


def dump(settings: Settings) -> str:
    """The settings as TOML, every default written out."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))


def get_default(key: str) -> Any:
    """The default of a dotted key; None for keys that the settings do not define."""
    *sections, last = key.split(".")
    place: Any = Settings
    for section in sections:
        field = place.model_fields.get(section)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        place = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if place is None:
            return None
    field = place.model_fields.get(last)
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def _apply(values: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f'override "{override}" is not of the form key=value, as in train.steps=1000')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise UserError(f'override "{override}": "{section}" is a value, not a section')
    place[last] = {**place[last], "path": value} if isinstance(place.get(last), dict) else value


def _told(error: ValidationError, of: type[BaseModel] = Settings) -> str:
    """The first complaint in one line; for an unknown key the nearest known one."""
    first = error.errors()[0]
    *sections, last = (str(part) for part in first["loc"])
    dotted = ".".join((*sections, last))
    if first["type"] == "extra_forbidden":
        place: Any = of
        for section in sections:
            kinds = (
                place.model_fields[section].annotation,
                *get_args(place.model_fields[section].annotation),
            )
            place = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        hint = did_you_mean(last, place.model_fields)
        return f'unknown key "{dotted}"{hint}'
    if first["type"] == "missing":
        return f'key "{dotted}" is missing'
    return f'key "{dotted}" is {shorten(repr(first["input"]), 100)}: {first["msg"][0].lower()}{first["msg"][1:]}'
