"""Read an experiment of a FuxiCTR model configuration, and the dataset that it names, from YAML files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwright.config.fuxictr.keys import Keys
from shardwright.errors import UserError, check_regular_file, did_you_mean

BASE = "Base"  # the section with defaults of all experiments
MODEL_FILE, DATASET_FILE = "model_config.yaml", "dataset_config.yaml"
OF_DATASETS = ("feature_cols", "label_col", "data_format", "train_data")  # keys by which a section is a dataset


@dataclass(frozen=True)
class Experiment:
    """An experiment with the defaults of its file, and its dataset. `folder` has the file of the dataset."""

    name: str
    model: Keys
    dataset: Keys
    folder: Path


def read_experiment(text: str) -> Experiment:
    """Read FILE or FILE#EXPERIMENT; FILE may be the folder of model_config.yaml."""
    file_name, _, name = (text, "", "") if Path(text).exists() else text.partition("#")
    path = Path(file_name) / MODEL_FILE if Path(file_name).is_dir() else Path(file_name)
    sections = _read_sections(path)
    name = name or _only_experiment(path, sections)
    if name not in sections:
        raise UserError(f"{path}: no experiment {name}{did_you_mean(name, _experiments(sections))}")
    model = Keys(f"{path.name}: {name}", sections.get(BASE, {}) | sections[name])
    dataset, folder = _read_dataset(model, path, sections)
    return Experiment(name, model, dataset, folder)


def _experiments(sections: Mapping[str, Any]) -> list[str]:
    """The names of the experiments of a file, which may also have datasets."""
    return [name for name, keys in sections.items() if name != BASE and not any(key in keys for key in OF_DATASETS)]


def _only_experiment(path: Path, sections: Mapping[str, Any]) -> str:
    names = _experiments(sections)
    if not names:
        raise UserError(f"{path}: no experiment; wanted a section with model, dataset_id, batch_size and so on")
    if len(names) > 1:
        raise UserError(
            f"{path}: {len(names)} experiments; choose one as fuxictr:{path}#{names[0]}: {', '.join(names)}"
        )
    return names[0]


def _read_dataset(model: Keys, path: Path, sections: Mapping[str, Any]) -> tuple[Keys, Path]:
    """The dataset that an experiment names, of its own file or of the file beside it."""
    name, beside = model.text("dataset_id"), path.with_name(DATASET_FILE)
    if name in sections:
        return Keys(f"{path.name}: {name}", sections[name]), path.parent
    if not beside.exists():
        raise UserError(f"{model.where}.dataset_id={name}: {path} has no such section, and there is no file {beside}")
    datasets = _read_sections(beside)
    if name not in datasets:
        raise UserError(f"{model.where}.dataset_id={name}: {beside} has no such section{did_you_mean(name, datasets)}")
    return Keys(f"{beside.name}: {name}", datasets[name]), beside.parent


def _read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a YAML file by name."""
    check_regular_file(path)
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; wanted a {MODEL_FILE} of FuxiCTR") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path}: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not all(isinstance(keys, dict) for keys in content.values()):
        raise UserError(f"{path}: wanted sections of keys, {BASE} and experiments or datasets by name")
    return {str(name): keys for name, keys in content.items()}
