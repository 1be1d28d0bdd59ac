"""The random generators of a rank, as a state keeps them: torch's, Python's and NumPy's."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

RANDOM = "random.torch"
RANDOM_CUDA = "random.cuda"


def random_tensors() -> dict[str, Tensor]:
    cuda = {RANDOM_CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {RANDOM: torch.get_rng_state()} | cuda


def random_numbers() -> dict[str, Any]:
    """The generators of Python and NumPy, which a user's own code may draw from."""
    states = {"python": random.getstate(), "numpy": np.random.get_state()}
    return json.loads(json.dumps(states, default=np.ndarray.tolist))


def set_random(saved: Mapping[str, Any], states: Sequence[Tensor | None], rank: int) -> None:
    """Those of this rank, where it had some; else the first rank's."""
    for state, put in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state), strict=True):
        if state is not None and (put is torch.set_rng_state or torch.cuda.is_available()):
            put(state)
    own = saved.get("ranks", ())
    numbers = own[rank] if rank < len(own) else saved["random"]
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(numbers["numpy"]))
