"""Runs of models of layers that other groups published: how they were split, and the step or memory they report."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.planner.layers.activations import FUSED, AttentionKernel
from shardwright.planner.layers.degrees import Degrees, SequenceBatch, even_cuts
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.transformer import Transformer, load_transformer

SOURCES = {
    "narayanan": "Narayanan et al., SC 2021 (arXiv 2104.04473), table 1; micro-batches and chunks from Megatron-LM's "
    "examples/academic_paper_scripts/sc21/run_table_1.sh",
    "korthikanti": "Korthikanti et al., MLSys 2023 (arXiv 2205.05198), figure 1, table 5, MFU of its abstract; the "
    "numbers as repeated in Calculon's calculon/llm/validation.py, degrees in its validation/seqsel; MFU from "
    "Megatron-LM's README of 2023",
    "megatron-h100": "Megatron-LM, README.md, images/model_table.png (Megatron-Core 0.8)",
    "llama3": "Llama team, The Llama 3 Herd of Models (arXiv 2407.21783), table 4",
    "deepseek-v3": "DeepSeek-V3 Technical Report (arXiv 2412.19437), sections 1, 3.1, 3.2 and 4.2",
    "torchtitan-2024": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan-2025": "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
}
STORED_SCORES = AttentionKernel(stores_scores=True, dropout=True)
A100_FLOPS, H100_FLOPS = 312e12, 989e12
UNFUSED = "attention of several kernels that compute the whole matrix; predicted: one fused kernel, half of the matrix"
EXPOSED = "collectives of gradients and weights overlap with the backward and forward; predicted: after the passes"
LLAMA_MFU = "TFLOP/s taken to count the whole matrix of attention, as PaLM's MFU does, which the report cites; by "
LLAMA_MFU += "another reading half of it"
LLAMA_SHARDING = "gradients are sharded too; micro-batches of a rank run in another order; masks of documents"
H100_500W = "H100 with 2.4 TB/s of memory and a limit of 500 W"
OP_POLICY = "every second product is computed again and not saved; predicted: norms and activation functions only"
GATHERED = "inputs that tensor parallelism all-gathers; predicted: none are held"
FP8 = "products in FP8; steps are not compared"


@dataclass(frozen=True, slots=True)
class Run:
    """`seconds`: of a step, 0: not compared; `other_seconds`: by another reading of the source, 0: none. `percent`: of
    the peak that the source reports; narayanan counts what is computed again. `gib`: of memory of the fullest rank, 0:
    not published. `is_open`: micro-batch and chunks are not published. `unlike`: how the run differs from what is
    predicted. `card_bytes_per_second`: 0: the preset's."""

    source: str
    model: Transformer
    cluster_name: str
    batch: SequenceBatch
    degrees: Degrees
    seconds: float = 0.0
    other_seconds: float = 0.0
    percent: float = 0.0
    gib: float = 0.0
    is_open: bool = False
    unlike: tuple[str, ...] = ()
    attention: AttentionKernel = FUSED
    card_bytes_per_second: float = 0.0

    @property
    def cluster(self) -> Cluster:
        cluster = presets.load_cluster(self.cluster_name)
        inner, outer = cluster.levels
        rate = self.card_bytes_per_second or outer.bytes_per_second
        return replace(cluster, levels=(inner, replace(outer, bytes_per_second=rate)))


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51_200, tied: bool = True) -> Transformer:
    name = f"gpt-{layers}x{hidden}"
    return Transformer(
        1, name, layers, hidden, 4 * hidden, heads, heads, vocabulary, hidden // heads, gated=False, tied=tied
    )


def gpt_flops(model: Transformer, batch: SequenceBatch, passes: int = 3) -> float:
    """FLOPs of a step by Megatron-LM's formula; a backward counts as two passes, a second forward as one more."""
    layer = 24 * model.hidden**2 + 4 * model.hidden * batch.length
    head = 6 * model.hidden * model.vocabulary
    return batch.sequences * batch.length * (passes * model.layers * layer + head)


def narayanan() -> Iterator[Run]:
    rows = (
        # layers, hidden, heads, tensor, pipeline, ranks, sequences, micro, chunks, TFLOP/s of a GPU, percent
        (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137, 44),
        (30, 3072, 32, 2, 1, 64, 512, 16, 1, 138, 44),
        (36, 4096, 32, 4, 1, 128, 512, 16, 1, 142, 46),
        (40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135, 43),
        (48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138, 44),
        (60, 10_240, 80, 8, 4, 1024, 1792, 2, 3, 140, 45),
        (80, 12_288, 96, 8, 8, 1536, 2304, 2, 2, 148, 47),
        (96, 16_384, 128, 8, 16, 1920, 2160, 1, 2, 155, 50),
        (105, 20_480, 128, 8, 35, 2520, 2520, 1, 3, 163, 52),
        (128, 25_600, 160, 8, 64, 3072, 3072, 1, 1, 163, 52),
    )
    for layers, hidden, heads, tensor, pipeline, ranks, sequences, micro, chunks, tflops, percent in rows:
        model, batch = gpt(layers, hidden, heads), SequenceBatch(sequences, 2048, micro)
        degrees = Degrees(
            even_cuts(layers, pipeline * chunks),
            tensor=tensor,
            pipeline=pipeline,
            data=ranks // (tensor * pipeline),
            zero=0,
            sequence_parallel=False,
            recompute="full",
        )
        seconds = gpt_flops(model, batch, passes=4) / (ranks * tflops * 1e12)
        yield Run(
            "narayanan",
            model,
            "a100",
            batch,
            degrees,
            seconds,
            percent=percent,
            unlike=(UNFUSED,),
            attention=STORED_SCORES,
        )


def korthikanti() -> Iterator[Run]:
    rows = (
        # layers, hidden, heads, pipeline, sequences, micro, chunks; seconds with "full" and with "scores"; MFU with
        # the latter; GiB of states and of activations with "none" and "scores"
        (48, 6144, 64, 1, 4, 4, 1, (1.42, 1.10), 41.5, 45.5625, (59.25, 9.5625)),
        (96, 12_288, 96, 8, 64, 1, 3, (18.13, 13.75), 51.4, 45.5625, (66.84375, 12.3515625)),
        (105, 20_480, 128, 35, 280, 1, 3, (49.05, 37.83), 56.0, 31.640625, (114.0234375, 23.076171875)),
        (128, 25_600, 160, 64, 512, 1, 1, (94.42, 71.49), 56.3, 32.958984375, (131.25, 26.5625)),
    )
    for layers, hidden, heads, pipeline, sequences, micro, chunks, seconds, mfu, states, activations in rows:
        model, batch = gpt(layers, hidden, heads), SequenceBatch(sequences, 2048, micro)
        cuts = even_cuts(layers, pipeline * chunks)
        plain = Degrees(cuts, tensor=8, pipeline=pipeline, zero=0, sequence_parallel=False)
        run = Run("korthikanti", model, "a100", batch, plain, unlike=(UNFUSED,), attention=STORED_SCORES)
        selective = replace(plain, sequence_parallel=True, recompute="scores")
        flops = gpt_flops(model, batch) / (plain.num_ranks * A100_FLOPS)
        yield replace(
            run, degrees=replace(plain, recompute="full"), seconds=seconds[0], percent=100 * flops / seconds[0]
        )
        yield replace(run, degrees=selective, seconds=seconds[1], percent=mfu, gib=states + activations[1])
        yield replace(run, gib=states + activations[0])
        if pipeline == 35:  # with data parallelism: 2,240 GPUs; the abstract has the MFU
            batch, wide = SequenceBatch(8 * sequences, 2048, micro), replace(run, unlike=(UNFUSED,))
            for degrees, percent in (
                (replace(selective, data=8), 54.2),
                (replace(plain, data=8, recompute="full"), 42.1),
            ):
                yield replace(wide, batch=batch, degrees=degrees, percent=percent, seconds=100 * flops / percent)


def megatron_h100() -> Iterator[Run]:
    rows = (
        # heads, hidden, layers, tensor, pipeline, sequences, TFLOP/s of a GPU, MFU; 48 data ranks in all rows
        (16, 2048, 24, 1, 1, 192, 408.8, 41),
        (32, 4096, 30, 2, 1, 192, 465.9, 47),
        (48, 6144, 32, 4, 1, 192, 489.1, 49),
        (56, 7168, 48, 8, 1, 192, 459.6, 46),
        (64, 8192, 84, 8, 2, 384, 419.7, 42),
        (80, 10_240, 92, 8, 4, 768, 420.5, 43),
        (96, 12_288, 96, 8, 6, 1152, 432.8, 44),
        (128, 16_384, 96, 8, 8, 1536, 474.4, 48),
        (144, 18_432, 112, 8, 16, 3072, 459.9, 47),
    )
    for heads, hidden, layers, tensor, pipeline, sequences, tflops, mfu in rows:
        model, batch = gpt(layers, hidden, heads, 131_072, tied=False), SequenceBatch(sequences, 4096)
        degrees = Degrees(even_cuts(layers, pipeline), tensor=tensor, pipeline=pipeline, data=48)
        seconds = gpt_flops(model, batch) / (degrees.num_ranks * tflops * 1e12)
        yield Run("megatron-h100", model, "h100", batch, degrees, seconds, percent=mfu, is_open=True, unlike=(EXPOSED,))


def llama3() -> Iterator[Run]:
    """The first chunk has the embedding alone and the last the head; in the last row the paper's DP of 4 does not make
    16,384 GPUs and 16 M tokens, 8 does."""
    model, cuts = load_transformer("llama3-405b"), (0, *[1] * 126, 0)
    for context, data, length, sequences, tflops, mfu in (
        (1, 64, 8192, 32, 430, 43),
        (1, 128, 8192, 16, 400, 41),
        (16, 8, 131_072, 16, 380, 38),
    ):
        degrees = Degrees(cuts, tensor=8, context=context, pipeline=16, data=data)
        batch = SequenceBatch(sequences * data, length)
        run = Run("llama3", model, "h100", batch, degrees, percent=mfu, unlike=(EXPOSED, LLAMA_MFU, LLAMA_SHARDING))
        rate = degrees.num_ranks * tflops * 1e12 / (batch.sequences * length)
        half, whole = (6 * model.matrix_parameters + times * model.attention_width * length for times in (6, 12))
        yield replace(run, seconds=whole / rate, other_seconds=half / rate)


def deepseek_v3() -> Iterator[Run]:
    model, batch = load_transformer("deepseek-v3"), SequenceBatch(15_360, 4096)
    degrees = Degrees(even_cuts(61, 16), pipeline=16, data=128, expert=64, recompute="memory-bound")
    seconds = 180_000 * 3600 / 1e12 * batch.sequences * batch.length / degrees.num_ranks  # 180 K GPU hours for 1 T
    unlike = (
        "products in FP8; predicted: bfloat16",
        "DualPipe hides the exchange of experts; predicted: 1F1B, exposed",
    )
    unlike += ("a token goes to 4 hosts at most; another layer predicts a second token", EXPOSED)
    yield Run(
        "deepseek-v3", model, "h800-256", batch, degrees, seconds, unlike=unlike, card_bytes_per_second=0.936 * 50e9
    )


def torchtitan_2024() -> Iterator[Run]:
    for ranks, rate, gib in ((8, 5762, 82.4), (8, 6667, 77.0), (128, 5605, 67.0), (128, 6514, 62.0)):
        degrees = Degrees((32,), data=ranks, zero=3, recompute="memory-bound")
        compiled = "torch.compile" if rate > 6000 else "without torch.compile"
        yield _titan("8b", 2, 8192, degrees, rate, gib, (H100_500W, OP_POLICY, compiled))
    for context, length, gib in ((1, 32_768, 83.9), (2, 65_536, 84.2), (4, 131_072, 84.0), (8, 262_144, 84.5)):
        degrees = Degrees((32,), data=8 // context, context=context, zero=3, recompute="full")
        yield _titan("8b", 1, length, degrees, 0, gib, (FP8,))
    yield _titan("70b", 16, 8192, Degrees((80,), tensor=8, data=32, zero=3, recompute="full"), 0, 71.9, (FP8,))
    whole = "weights and gradients are not sharded in a step"
    for chunks, gib in ((1, 82.5), (2, 72.7)):
        degrees = Degrees(even_cuts(126, 8 * chunks), tensor=8, pipeline=8, data=8, recompute="full")
        yield _titan("405b", 32, 8192, degrees, 0, gib, (FP8, whole))
    for context, length, gib in ((1, 32_768, 75.3), (2, 65_536, 75.9), (4, 131_072, 77.1), (8, 262_144, 84.9)):
        degrees = Degrees(even_cuts(126, 8), tensor=8, pipeline=8, data=8 // context, context=context, recompute="full")
        yield _titan("405b", 8, length, degrees, 0, gib, (FP8, whole))


def torchtitan_2025() -> Iterator[Run]:
    full = Degrees((80,), tensor=8, data=32, zero=3, recompute="full")
    eight = Degrees((32,), tensor=8, data=8, zero=3, recompute="memory-bound")
    for collectives, large, small in (("plain", 597.3, 4378), ("asynchronous", 652.4, 4809.4)):
        unlike = (H100_500W, f"{collectives} tensor parallel collectives")
        yield replace(_titan("70b", 16, 8192, full, large, 0.0, unlike), source="torchtitan-2025")
        yield replace(_titan("8b", 12, 8192, eight, small, 0.0, (*unlike, OP_POLICY)), source="torchtitan-2025")


def _titan(
    size: str, local: int, length: int, degrees: Degrees, rate: float, gib: float, unlike: tuple[str, ...]
) -> Run:
    """`local`: sequences of a data rank; with a pipeline as many micro-batches as pipeline ranks, torchtitan's default.
    `rate`: tokens/s of a GPU."""
    batch = SequenceBatch(local * degrees.data, length, local // degrees.pipeline)
    seconds = batch.sequences * length / (rate * degrees.num_ranks) if rate else 0.0
    reserved = "memory that the allocator reserves; predicted: tensors"
    return Run(
        "torchtitan-2024",
        load_transformer(f"llama3-{size}"),
        "h100",
        batch,
        degrees,
        seconds,
        gib=gib,
        unlike=(*unlike, reserved, *([GATHERED] if degrees.tensor > 1 else [])) if gib else unlike,
    )


def published_runs() -> list[Run]:
    groups = (narayanan, korthikanti, megatron_h100, llama3, deepseek_v3, torchtitan_2024, torchtitan_2025)
    return [run for group in groups for run in group()]
