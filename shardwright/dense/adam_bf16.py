"""torch's Adam and AdamW with stochastically rounded bf16 moments.

One native call updates all parameters. It computes what torch computes, in the weights' precision; the moments are
rounded only where they are stored. Rounding to nearest would freeze the second moment: with beta2 0.999 a step changes
it by a thousandth, and neighboring bf16 numbers (8 significant bits) are four to eight thousandths apart.
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
    """Offsets of the parameters' first elements when all are concatenated."""
    return [0, *accumulate(parameter.numel() for parameter in parameters)]


class AdamBf16(torch.optim.Optimizer):
    """The given optimizer, which must not have stepped yet, with moments in `dtype`.

    `element_offsets` returns, for all parameters in order, the offset of each one's first element among all elements.
    Stochastic rounding depends on it: with offsets in the full parameters, shards round as the full parameters would.
    """

    def __init__(
        self, optimizer: torch.optim.Adam, dtype: torch.dtype, element_offsets: ElementOffsets = sequential_offsets
    ) -> None:
        _check_optimizer(optimizer, dtype)
        # torch loads a fused optimizer's steps onto the GPU, where reading them would synchronize
        super().__init__([{**group, "fused": None} for group in optimizer.param_groups], optimizer.defaults)
        self.kind = type(optimizer).__name__  # kind of the saved state, which torch's optimizer can load
        self._dtype, self._offsets = dtype, element_offsets
        self.rounding_key = derive_seed("moments of the dense optimizer")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        offsets = iter(self._offsets([parameter for group in self.param_groups for parameter in group["params"]]))
        adam_parameters: list[adam_step.AdamParameter] = []
        for group in self.param_groups:
            coefficients = cache(partial(_adam_coefficients, group))
            for parameter, offset in zip(group["params"], offsets, strict=False):
                if parameter.grad is not None:
                    adam_parameters.append(self._prepare_parameter(parameter, coefficients, offset))
        adam_step.fused_adam(adam_parameters, self.rounding_key)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Convert the moments to `dtype`: torch loads them in the dtype of their parameter."""
        super().__setstate__(state)
        for values in self.state.values():
            values.update({name: values[name].to(self._dtype) for name in MOMENTS if name in values})

    def _prepare_parameter(
        self, parameter: Tensor, coefficients: Callable[[int], AdamCoefficients], offset: int
    ) -> adam_step.AdamParameter:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=self._dtype, memory_format=torch.contiguous_format)
        state["step"] += 1
        step = int(state["step"])
        grad, (mean, square) = parameter.grad.contiguous(), MOMENTS
        return adam_step.AdamParameter(parameter, grad, state[mean], state[square], step, offset, coefficients(step))


def convert_state_dtype(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, element_offsets: ElementOffsets = sequential_offsets
) -> torch.optim.Optimizer:
    """Wrap an Adam or AdamW to keep its state in bf16; for another `dtype`, return it unchanged."""
    if dtype != torch.bfloat16:
        return optimizer
    if not isinstance(optimizer, torch.optim.Adam) or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UserError(
            f"the plan keeps the dense optimizer's state in bfloat16, which only torch.optim.Adam and AdamW support, "
            f'not {type(optimizer).__name__}: use one of them, or drop "optimizer.bf16" from allow'
        )
    return AdamBf16(optimizer, dtype, element_offsets)


def _adam_coefficients(group: dict[str, Any], step: int) -> AdamCoefficients:
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


def _check_optimizer(optimizer: torch.optim.Adam, dtype: torch.dtype) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        for option in UNSUPPORTED_OPTIONS:
            if group[option]:
                raise UserError(f"{name}({option}=True) cannot have its state in {dtype}: drop one of them")
        for parameter in group["params"]:
            if (parameter.dtype, dtype) not in adam_step.DTYPE_PAIRS:
                raise UserError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                    f"state in {dtype} needs float32 parameters"
                )
    if optimizer.state or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UserError(f"{name} has stepped or has step hooks, and they would be lost: give a new optimizer")
