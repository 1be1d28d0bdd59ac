"""Generate text from the model at the end of a run: one token after the other, each drawn from the model's output.

All ranks run every forward pass, on the same prompts, since a rank may hold only a part of the weights; each continues
its own copy, so nothing is exchanged besides what a forward pass exchanges.

Shape legend: B prompts, T positions, V ids.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.jagged import Batch, Jagged
from shardwright.layers.loss import NextTokenLoss
from shardwright.runtime.job import Job
from shardwright.spec.generated_text import GeneratedText

NUM_PROMPTS = 3
MAX_PROMPT_TOKENS = 32
MAX_NEW_TOKENS = 160


def generate_text(job: Job, source: Any, seed: int) -> GeneratedText | None:
    """Continue the first held-out sequences; None for a model of other data. All ranks call it."""
    if not isinstance(job.model.loss, NextTokenLoss):
        return None
    tokenizer = getattr(source, "tokenizer", None)
    if tokenizer is None:
        return GeneratedText(1, job.step, seed, reason="the data source has no tokenizer, which turns tokens into text")
    if job.plan.pipeline is not None:
        return GeneratedText(1, job.step, seed, reason="in a pipeline, only the ranks with the last blocks have logits")
    prompt_BT = torch.from_numpy(read_prompts(source))
    text_BT = continue_tokens(job, prompt_BT, min(MAX_NEW_TOKENS, source.length - prompt_BT.shape[1]), seed)
    prompts, continuations = (
        tuple(_printable(tokenizer.decode(tokens.numpy())) for tokens in part_BT)
        for part_BT in (prompt_BT, text_BT[:, prompt_BT.shape[1] :])
    )
    return GeneratedText(1, job.step, seed, prompts, continuations)


def read_prompts(source: Any) -> np.ndarray:
    """The beginnings (B, T) of the first held-out sequences; of training sequences if none are held out."""
    held_out = getattr(source, "evaluation", lambda: source)()
    samples = held_out if held_out.size != 0 else source
    num = NUM_PROMPTS if samples.size is None else min(NUM_PROMPTS, samples.size)
    tokens_BT = samples.take(np.arange(num)).values.reshape(num, source.length)
    return tokens_BT[:, : max(1, min(MAX_PROMPT_TOKENS, source.length // 2))]


def continue_tokens(job: Job, tokens_BT: Tensor, num: int, seed: int) -> Tensor:
    """Append `num` tokens to each row, drawn from the model's probabilities by a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        lengths = torch.full((1, len(tokens_BT)), tokens_BT.shape[1])
        batch = Batch(Jagged(("tokens",), tokens_BT.flatten(), lengths), None, {"next": tokens_BT})
        (output,) = job.evaluate([batch])
        logits_BTV = output.logits[0] if isinstance(output.logits, tuple) else output.logits  # of a pair with penalties
        probabilities_BV = logits_BTV[:, -1].double().cpu().softmax(1)
        tokens_BT = torch.cat([tokens_BT, torch.multinomial(probabilities_BV, 1, generator=generator)], dim=1)
    return tokens_BT


def _printable(text: str) -> str:
    """The text with a replacement character for each control character."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
