"""Loggers that a recipe names in `run.loggers`: callbacks that write the lines of a run elsewhere."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardwright.config import resolve_name
from shardwright.errors import UserError
from shardwright.runtime.run.callback import Callback, RunResult, RunStart, scalars
from shardwright.runtime.run.directory import explain_write_errors
from shardwright.runtime.run.tensorboard import EventFileWriter
from shardwright.spec import files

WANDB_ID_FILE = "wandb-id"  # in the run directory: the id of the run at W&B, to resume it there


class TensorBoardLogger(Callback):
    """Writes TensorBoard events into the run directory."""

    def begin(self, run: RunStart) -> None:
        self._path = run.path / "tensorboard"
        with explain_write_errors(self._path):
            self._events = EventFileWriter(self._path)

    def line(self, line: Mapping[str, Any]) -> None:
        with explain_write_errors(self._path):
            self._events.add_scalars(line["step"], scalars(line))


class WandbLogger(Callback):
    """Sends the settings and lines of a run to Weights & Biases; its environment variables apply."""

    def __init__(self) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UserError(
                "run.loggers has wandb, but the package wandb is not installed: pip install shardwright[wandb]"
            ) from None

    def begin(self, run: RunStart) -> None:
        id_path = run.path / WANDB_ID_FILE
        self._run = self._wandb.init(
            name=run.path.name,
            dir=str(run.path),
            config=run.settings.model_dump(mode="json", exclude_none=True),
            id=id_path.read_text() if id_path.exists() else None,
            resume="allow",
        )
        files.write_text(self._run.id, id_path)
        # W&B refuses smaller step numbers than before, and a resumed run repeats steps: an axis of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def line(self, line: Mapping[str, Any]) -> None:
        self._run.log({"step": line["step"]} | scalars(line))

    def end(self, result: RunResult | None) -> None:
        self._run.finish(exit_code=0 if result else 1)


LOGGERS: MappingProxyType[str, Callable[[], Callback]] = MappingProxyType(
    {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
)


def make_loggers(names: Sequence[str]) -> tuple[Callback, ...]:
    """The loggers of `run.loggers`: built-in ones, and what the user's "module:attribute" returns."""
    loggers = []
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UserError(f'run.loggers has "{name}" twice; drop one of them')
        make = resolve_name("run.loggers", name, LOGGERS)
        if not callable(make):
            raise UserError(f'run.loggers: "{name}" is {make!r}; wanted a class or function without arguments')
        loggers.append(_make_logger(name, make))
    return tuple(loggers)


def _make_logger(name: str, make: Callable[[], Any]) -> Callback:
    try:
        logger = make()
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(
            f'run.loggers: "{name}" called without arguments raised {type(error).__name__}: {text}'
        ) from error
    if not isinstance(logger, Callback):
        raise UserError(f'run.loggers: "{name}" makes a {type(logger).__name__}; wanted a shardwright.Callback')
    return logger
