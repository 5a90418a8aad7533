"""The special tokens of BERT: those of a tokenizer, or ids beyond its own for those that it lacks."""

from typing import NamedTuple

from megajax.data.tokenizers.tokenizer import Tokenizer

# As BERT and as RoBERTa spell them.
SPELLINGS = {
    "cls_id": ("[CLS]", "<s>"),
    "sep_id": ("[SEP]", "</s>"),
    "mask_id": ("[MASK]", "<mask>"),
    "pad_id": ("[PAD]", "<pad>"),
}


class MaskingTokens(NamedTuple):
    """Ids of the special tokens of BERT."""

    cls_id: int
    """Before every text."""
    sep_id: int
    """After every text."""
    mask_id: int
    """In place of a token that is to be predicted."""
    pad_id: int
    """After the end of a sample."""
    vocab_size: int
    """Number of ids of the tokenizer and of these."""


def masking_tokens(tokenizer: Tokenizer) -> MaskingTokens:
    """The ids of the first spelling that the tokenizer knows; for the others the first ids that it does not use."""
    ids = {}
    size = tokenizer.vocab_size
    for name, spellings in SPELLINGS.items():
        known = [tokenizer.token_id(spelling) for spelling in spellings]
        found = next((number for number in known if number is not None), None)
        if found is None:
            found = size
            size += 1
        ids[name] = found
    return MaskingTokens(**ids, vocab_size=size)
