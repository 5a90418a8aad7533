"""Trains a SentencePiece tokenizer on lines of text."""

import io
from collections.abc import Iterable

# Enough text for a few thousand pieces; more only costs time.
TRAIN_BYTES = 4_000_000


def train_on_lines(lines: Iterable[str], model_prefix: str, vocab_size: int) -> str:
    """Trains a byte-pair SentencePiece model on lines of text; returns the path MODEL_PREFIX.model.

    Lossless: characters outside the vocabulary are encoded as bytes, text is not normalised, all spaces are kept and
    runs of them (indentation) become pieces; newline and tab are separate pieces. Deterministic. 2,048 pieces from
    TRAIN_BYTES take about 1 s. Raises ValueError if the text has fewer than vocab_size pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            treat_whitespace_as_suffix=True,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentencepiece_length=32,
            max_sentence_length=1 << 16,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"data.tokenizer=sentencepiece:{vocab_size} cannot be trained on this text; "
            f"give more text, or change the number of pieces as the trainer says ({error})"
        ) from None
    with open(model_prefix + ".model", "wb") as file:
        file.write(model.getbuffer())
    return model_prefix + ".model"
