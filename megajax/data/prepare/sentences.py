"""Splits text into sentences by rules, for `preprocess --split_sentences`: reproducible, and no model to download."""

import re

# Abbreviations whose full stop does not end a sentence; those of BEFORE_NUMBER only before a number.
ABBREVIATION = re.compile(
    r"mrs?|ms|dr|prof|rev|hon|gen|col|capt|lt|sgt|maj|adm|sen|rep|gov|st|mt|ft|jr|sr|messrs|mme|mlle|dept|univ|inc|ltd|co"
    r"|corp|bros|assn|vs|viz|al|cf|ca|approx|est|eds?|resp",
    re.IGNORECASE,
)
BEFORE_NUMBER = re.compile(
    r"nos?|pp?|figs?|eqs?|sec|ch|chap|art|vols?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.IGNORECASE
)
# Possible ends of a sentence: punctuation, closing quotes or brackets, white space (not needed after full-width
# punctuation); or a blank line.
ENDS = re.compile(r"""(?<![.!?…])([.!?…]++)["'”’»)\]]*+\s++|[。！？]++["'”’»）」』]*+\s*+|\n\s*\n""")
OPENING = "\"'“‘«([¿¡"


def split_sentences(text: str) -> list[str]:
    """Sentences, stripped of white space; the rules are for languages with Latin script, Chinese and Japanese.

    A sentence ends at . ! ? or … before white space and a possible beginning (not a lower-case letter), at
    。！？, and at a blank line. A full stop does not end it after an ABBREVIATION, an initial (J.), letters with stops
    between them (U.S., e.g.), or the number of a list item (1.); decimals have no space after the stop.
    Known errors: a sentence that ends in "U.S." or "Inc.", or is followed by a lower-case letter (iPhone), is joined
    with the next one; an unknown abbreviation before a capital ends a sentence; lines without punctuation are not
    split.
    """
    sentences = []
    begin = 0
    for match in ENDS.finditer(text):
        if match[1] is None or match[0].count("\n") > 1 or _ends(text, begin, match):
            sentences.append(text[begin : match.end()].strip())
            begin = match.end()
    sentences.append(text[begin:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends(text: str, begin: int, match: re.Match) -> bool:
    """Whether a mark before white space ends the sentence that began at `begin`."""
    following = text[match.end() : match.end() + 4].lstrip(OPENING)[:1]
    if following.islower():
        return False
    if match[1] != ".":
        return True
    # limited, because a text without spaces would otherwise take quadratic time
    before = text[max(begin, match.start() - 40) : match.start()]
    word = re.split(r"[\s(\[\"'“‘«—–-]", before)[-1]
    is_list_item = word.isdecimal() and text[begin : match.start()].strip() == word
    letters = re.fullmatch(r"[^\W\d_](\.[^\W\d_])*", word) and word != "I"
    is_short = ABBREVIATION.fullmatch(word) or (BEFORE_NUMBER.fullmatch(word) and following.isdecimal())
    return not (is_list_item or letters or is_short)
