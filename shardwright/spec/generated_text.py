"""Text that a trained model generated at the end of a run."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Prompts from held-out data, each with the model's continuation; or the reason why there are none."""

    version: Literal[1]
    step: int
    seed: int
    prompts: tuple[str, ...] = ()
    continuations: tuple[str, ...] = ()
    reason: str = ""

    @property
    def samples(self) -> tuple[tuple[str, str], ...]:
        """Each prompt with its continuation."""
        return tuple(zip(self.prompts, self.continuations, strict=True))
