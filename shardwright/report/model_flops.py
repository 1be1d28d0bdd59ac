"""How the MFU of a run on tokens was computed, for its page."""

from shardwright.report.html_template import Grid
from shardwright.report.run_record import Metrics
from shardwright.report.units import si_text
from shardwright.spec.model_flops import FORMULA, FULL_FORMULA, ModelFlops


def flops_grid(flops: ModelFlops, metrics: Metrics) -> Grid:
    """The formula of MFU, its numbers, and its values over the whole run."""
    rows = [
        ("N: weights of matrix products, with the head, without the input embedding", f"{flops.matrix_parameters:,}"),
        ("A: heads x channels of a head, summed over the blocks", f"{flops.attention_width:,}"),
        ("s: tokens of a sequence", f"{flops.length:,}"),
        ("FLOPs of a token, causal half of attention", f"{flops.per_token:,}"),
        ("FLOPs of a token, full attention matrix", f"{flops.per_token_full:,}"),
        ("ranks", f"{flops.num_ranks:,}"),
        (f"peak of a rank: {flops.peak_source}", f"{si_text(flops.peak_flops_per_second)}FLOP/s"),
    ]
    if metrics.end and metrics.end.tokens_per_second is not None:
        rows.append(("tokens/s over the whole run", f"{metrics.end.tokens_per_second:,.0f}"))
    if metrics.end and metrics.end.mfu is not None and metrics.end.mfu_full is not None:
        rows += [(FORMULA, f"{metrics.end.mfu:.1%}"), (FULL_FORMULA, f"{metrics.end.mfu_full:.1%}")]
    return Grid(("model FLOPs utilization", "value"), tuple(rows))
