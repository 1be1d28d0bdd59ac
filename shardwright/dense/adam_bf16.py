"""torch's Adam and AdamW with moments in bf16, rounded stochastically, and one native pass over all parameters.

What is computed is what torch computes, in the weights' own precision; only what stays of the moments from one step to
the next is rounded. With 8 bits the square could not follow at all if it were rounded to the nearest: with beta2 0.999
a step moves it by a thousandth, and numbers in bf16 are four to eight thousandths apart.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.kernels import adam_step
from shardwright.kernels.reference import AdamCoefficients
from shardwright.kernels.rounding import derive_seed

ElementOffsets = Callable[[Sequence[Tensor]], Sequence[int]]
UNSUPPORTED_OPTIONS = ("amsgrad", "capturable", "differentiable")
MOMENTS = ("exp_avg", "exp_avg_sq")


def sequential_offsets(parameters: Sequence[Tensor]) -> list[int]:
    return [0, *accumulate(parameter.numel() for parameter in parameters)]


class AdamBf16(torch.optim.Optimizer):
    """`theirs`, which has not stepped yet, with moments in `dtype`.

    `places` says of all parameters, in their order, where the first number of each stands among all; parameters that
    are pieces of larger ones are then rounded as these would be.
    """

    def __init__(
        self, optimizer: torch.optim.Adam, dtype: torch.dtype, element_offsets: ElementOffsets = sequential_offsets
    ) -> None:
        _check(optimizer, dtype)
        super().__init__([{**group} for group in optimizer.param_groups], optimizer.defaults)
        self.kind = type(optimizer).__name__  # by what its state is known: torch's own can take it over
        self._dtype, self._places = dtype, element_offsets
        self.rounding_key = derive_seed("moments of the dense optimizer")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        places = iter(self._places([parameter for group in self.param_groups for parameter in group["params"]]))
        stepped: list[adam_step.AdamParameter] = []
        for group in self.param_groups:
            numbers = cache(partial(_numbers, group))
            for parameter, place in zip(group["params"], places, strict=False):
                if parameter.grad is not None:
                    stepped.append(self._stepped(parameter, numbers, place))
        adam_step.fused_adam(stepped, self.rounding_key)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch loads moments in the dtype of their parameter."""
        super().__setstate__(state)
        for kept in self.state.values():
            kept.update({name: kept[name].to(self._dtype) for name in MOMENTS if name in kept})

    def _stepped(
        self, parameter: Tensor, numbers: Callable[[int], AdamCoefficients], place: int
    ) -> adam_step.AdamParameter:
        assert parameter.grad is not None
        kept = self.state[parameter]
        if not kept:
            like = {"dtype": self._dtype, "memory_format": torch.contiguous_format}
            kept["step"] = torch.tensor(0.0)
            kept |= {name: torch.zeros_like(parameter, **like) for name in MOMENTS}
        kept["step"] += 1
        step = int(kept["step"])
        gradient, (mean, square) = parameter.grad.contiguous(), MOMENTS
        return adam_step.AdamParameter(parameter, gradient, kept[mean], kept[square], step, place, numbers(step))


def convert_state_dtype(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, element_offsets: ElementOffsets = sequential_offsets
) -> torch.optim.Optimizer:
    """This optimizer with its state in bf16 where the plan says so; else as it is."""
    if dtype != torch.bfloat16:
        return optimizer
    if not isinstance(optimizer, torch.optim.Adam) or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UserError(
            f"the plan keeps the dense optimizer's state in bfloat16, which this version does for torch.optim.Adam and "
            f'AdamW, not for {type(optimizer).__name__}: take one of them, or drop "optimizer.bf16" from allow'
        )
    return AdamBf16(optimizer, dtype, element_offsets)


def _numbers(group: dict[str, Any], step: int) -> AdamCoefficients:
    lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    return AdamCoefficients(
        beta2=beta2,
        one_minus_beta1=1 - beta1,
        one_minus_beta2=1 - beta2,
        step_size=lr / (1 - beta1**step),
        denominator_scale=(1 - beta2**step) ** -0.5,
        eps=group["eps"],
        weight_decay=0.0 if decoupled else decay,
        weight_scale=1 - lr * decay if decoupled else 1.0,
        sign=-1.0 if group["maximize"] else 1.0,
    )


def _check(theirs: torch.optim.Adam, dtype: torch.dtype) -> None:
    name = type(theirs).__name__
    for group in theirs.param_groups:
        for option in UNSUPPORTED_OPTIONS:
            if group[option]:
                raise UserError(f"{name}({option}=True) cannot have its state in {dtype}: drop one of them")
        for parameter in group["params"]:
            if (parameter.dtype, dtype) not in adam_step.DTYPE_PAIRS:
                raise UserError(
                    f"{name}: a parameter {tuple(parameter.shape)} is of {parameter.dtype}; "
                    f"state in {dtype} is for parameters of float32"
                )
    if theirs.state or theirs._optimizer_step_pre_hooks or theirs._optimizer_step_post_hooks:
        raise UserError(f"{name} has stepped, or has hooks, which would be lost: give a fresh one")
