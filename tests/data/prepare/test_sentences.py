"""Splitting into sentences: where a reader would, and in time that grows with the text only."""

import time

import pytest

from megajax.data.prepare.sentences import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. J. R. Smith paid $3.14 to Acme Inc. in Jan. 5 days later he left.", "He came back!"],
        ['"Stop!" she cried.', '"Why?" he asked.', "Nobody knew."],
        ['He said "No."', "Then he left.", "(It was late.)", "So what?"],
        ["See Fig. 3, e.g. the U.S. Senate vs. the House.", "No. 5 is missing."],
        ["He said no.", "It was I.", "Wait...", "What?!", "In 1999.", "Écoute-moi."],
        ["1. Item one.", "2. Item two."],
        ["これは文です。", "「はい。」", "次です！"],
        ["A heading without a mark", "Text after a blank line"],
        ["v1.2.3 and x.y are no ends, nor is 10.5 or a.b."],
    ],
)
def test_sentences_end_where_a_reader_says(sentences):
    glue = "\n\n" if "mark" in sentences[0] else "" if "。" in sentences[0] else " "
    assert split_sentences(glue.join(sentences)) == sentences


def test_splitting_takes_time_in_proportion_to_the_text():
    hard = [
        "." * 100_000,
        ".'" * 50_000,
        "\n" * 100_000,
        " ." * 50_000,
        "\n" + " " * 100_000,
        "a" * 99_999 + ".",
        "1. " * 30_000,
    ]
    hard += ["A. " * 30_000, "。" * 100_000, "." + '"' * 100_000]
    begin = time.process_time()
    for text in hard:
        split_sentences(text)
    assert time.process_time() - begin < 2  # a square would take minutes
