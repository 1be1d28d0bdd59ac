"""Save and restore a rank's random generators: torch's, Python's and NumPy's."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

RANDOM = "random.torch"
RANDOM_CUDA = "random.cuda"


def torch_random_states() -> dict[str, Tensor]:
    """The states of torch's generators."""
    cuda = {RANDOM_CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {RANDOM: torch.get_rng_state()} | cuda


def python_random_states() -> dict[str, Any]:
    """The states of Python's and NumPy's generators, which user code may use."""
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    return json.loads(json.dumps(states, default=np.ndarray.tolist))


def restore_random_states(saved: Mapping[str, Any], states: Sequence[Tensor | None], rank: int) -> None:
    """Restore this rank's generators; a rank without saved states gets the first rank's.

    `saved`: the state's numbers; `states`: torch's CPU and CUDA states, None if not saved.
    """
    for state, set_state in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state), strict=True):
        if state is not None and (set_state is torch.set_rng_state or torch.cuda.is_available()):
            set_state(state)
    rank_numbers = saved.get("ranks", ())
    numbers = rank_numbers[rank] if rank < len(rank_numbers) else saved["random"]
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(numbers["numpy"]))
