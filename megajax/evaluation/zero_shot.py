"""LAMBADA and WikiText as Megatron-LM's tasks/zeroshot_gpt computed them, by file.

LAMBADA (Paperno et al. 2016, https://arxiv.org/abs/1606.06031): the share of passages whose end is the most likely
continuation. WikiText-103 (Merity et al. 2016, https://arxiv.org/abs/1609.07843): the perplexity of the whole file as
one text, per token, and per word of the original file, which does not depend on the tokenizer.
"""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from megajax.evaluation.perplexity import check_overlap, exp
from megajax.evaluation.text_model import TextModel, TokenText

# WikiText separates punctuation by spaces and writes numbers as 1 @,@ 000. In the order in which they are replaced;
# Megatron's pattern for years ('/' [0-9]/', with slashes) matches no text and is left out.
REPLACEMENTS = (
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
PAIRS = ("()", "[]", "{}", '""', "''")  # no spaces inside
LATER_REPLACEMENTS = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def lambada(model: TextModel, path: str, *, strict: bool = False, limit: int | None = None) -> dict[str, Any]:
    """{"accuracy", "correct", "examples", "perplexity" of the targets}.

    path: JSON lines with a field `text`. strict: the target is the last word, all of whose tokens must be the most
    likely ones; else the last token. Raises ValueError for a line without text or without a target.
    """
    with open(path, encoding="utf-8") as file:
        lines = list(itertools.islice(file, limit))
    texts = [_passage(model, line, strict, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    if not texts:
        raise ValueError(f"data={path} has no passages")
    found = model.likelihoods(texts)
    num_tokens = sum(len(text.tokens) - text.num_context for text in texts)
    correct = sum(likelihood.is_greedy for likelihood in found)
    loss = -sum(likelihood.log_prob for likelihood in found) / num_tokens
    return dict(accuracy=correct / len(texts), correct=correct, examples=len(texts), target_perplexity=exp(loss))


def _passage(model: TextModel, line: str, strict: bool, where: str) -> TokenText:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: not an object with a field text") from None
    if strict:
        words = text.split()
        target = words[-1] if words else ""
        context = model.encode(text[: text.rfind(target)].strip())
        tokens = [*context, *model.tokenizer.encode(f" {target}")]
        num_context = len(context)
    else:
        tokens = model.encode(text)
        num_context = len(tokens) - 1
    if num_context < 1:
        raise ValueError(f"{where}: {text[:40]!r} has nothing before its last word")
    return TokenText(tokens, num_context)


def wikitext(model: TextModel, path: str, *, overlap: int | None = None) -> dict[str, Any]:
    """{"loss", "perplexity" per token, "word_perplexity", "tokens", "words", "token_ratio"}.

    path: a file of WikiText as published, with spaces around punctuation. overlap: see windows.py; default: none, each
    window begins anew, as in Megatron without --overlapping-eval (which is max_length - overlap). The first token of
    the file is not scored, unless `start` precedes it. The perplexity per word is exp(nats / (words - 1)), words being
    what single spaces separate.
    """
    overlap = check_overlap(overlap or 0, model.max_length)
    with open(path, encoding="utf-8") as file:
        original = file.read()
    words = len(original.strip().split(" "))
    text = TokenText(model.encode(detokenized(original)), max(len(model.start), 1))
    num_scored = len(text.tokens) - text.num_context
    if num_scored < 1 or words < 2:
        raise ValueError(f"data={path} needs at least two words")
    (log_prob,) = model.log_probs([text], model.max_length, overlap, shifts_last=False)
    loss = -log_prob / num_scored
    token_ratio = num_scored / (words - 1)
    return dict(
        loss=loss,
        perplexity=exp(loss),
        word_perplexity=exp(loss * token_ratio),
        tokens=num_scored,
        words=words - 1,
        token_ratio=token_ratio,
    )


def detokenized(text: str) -> str:
    """The text of WikiText as it is usually written: without spaces before punctuation and in headings."""
    text = _replaced(text, REPLACEMENTS)
    for left, right in PAIRS:
        inside = f"[^{re.escape(right)}]*?"
        text = re.sub(rf"{re.escape(left)}\s*({inside})\s*{re.escape(right)}", rf"{left}\1{right}", text)
    return _replaced(text, LATER_REPLACEMENTS)


def _replaced(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    for old, new in replacements:
        text = text.replace(old, new)
    return text
