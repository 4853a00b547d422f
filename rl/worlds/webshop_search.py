"""WebShop's search: what Lucene does to English text, and its BM25, in plain Python and numpy.

Text is split as the Unicode rules for words have it (without those for Chinese, Japanese and Thai), possessive 's and
stop words go, and the rest is cut by Porter's stemmer with its author's two later rules.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

K1, B = 0.9, 0.4
# A dot, an apostrophe and a colon join letters; a dot, a comma and a semicolon join digits.
_WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])[.:'’·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*")
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
_STEP_2 = {
    "a": {"ational": "ate", "tional": "tion"},
    "c": {"enci": "ence", "anci": "ance"},
    "e": {"izer": "ize"},
    "l": {"bli": "ble", "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous"},
    "o": {"ization": "ize", "ation": "ate", "ator": "ate"},
    "s": {"alism": "al", "iveness": "ive", "fulness": "ful", "ousness": "ous"},
    "t": {"aliti": "al", "iviti": "ive", "biliti": "ble"},
    "g": {"logi": "log"},
}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize".split()
)  # the longest that fits counts: ement before ment before ent


def _shape(word: str) -> str:
    """A letter v for every vowel and c for every consonant; y is a vowel after a consonant."""
    shape = ""
    for at, letter in enumerate(word):
        vowel = letter in "aeiou" or (letter == "y" and at > 0 and shape[-1] == "c")
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    return len(re.findall("v+c+", _shape(word)))


def _ends_short(word: str) -> bool:
    return _shape(word)[-3:] == "cvc" and word[-1] not in "wxy"


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """Porter's stem of a lower-case word."""
    if len(word) < 3:
        return word
    if word.endswith("s"):  # step 1a
        word = word[:-2] if word.endswith(("sses", "ies")) else word if word.endswith("ss") else word[:-1]
    if word.endswith("eed"):  # step 1b
        word = word[:-1] if _measure(word[:-3]) > 0 else word
    else:
        ending = next((e for e in ("ed", "ing") if word.endswith(e) and "v" in _shape(word[: -len(e)])), None)
        if ending:
            word = word[: -len(ending)]
            if word.endswith(("at", "bl", "iz")):
                word += "e"
            elif len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c":
                word = word if word[-1] in "lsz" else word[:-1]
            elif _measure(word) == 1 and _ends_short(word):
                word += "e"
    if word.endswith("y") and "v" in _shape(word[:-1]):  # step 1c
        word = word[:-1] + "i"
    for endings in (_STEP_2.get(word[-2:-1], {}), _STEP_3):
        ending = next((e for e in endings if word.endswith(e)), None)
        if ending and _measure(word[: -len(ending)]) > 0:
            word = word[: -len(ending)] + endings[ending]
    ending = max((e for e in _STEP_4 if word.endswith(e)), key=len, default=None)
    if ending and _measure(word[: -len(ending)]) > 1 and (ending != "ion" or word[:-3].endswith(("s", "t"))):
        word = word[: -len(ending)]
    if word.endswith("e"):  # step 5
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def terms(text: str) -> list[str]:
    """What of a text is indexed and searched for."""
    found = (re.sub(r"['’]s$", "", word) for word in _WORD.findall(text.lower()))
    return [stem(word) for word in found if word not in STOP_WORDS]


def stored_length(length: int) -> int:
    """A document's length as one byte of the index keeps it: exact to 39, then with four significant bits."""
    shift = max(0, (length - 24).bit_length() - 4) if length > 24 else 0
    return length if not shift else 24 + ((length - 24) >> shift << shift)


class Bm25:
    """An inverted index; scores as Lucene's BM25 with k1 0.9 and b 0.4. Equal scores are ordered by document id."""

    def __init__(self, documents: dict[str, str]) -> None:
        self.postings: dict[str, tuple[array[int], array[int]]] = {}
        self.ids = list(documents)
        rank = {name: place for place, name in enumerate(sorted(self.ids))}
        self.ranks = np.array([rank[name] for name in self.ids], dtype=np.int64)
        lengths = []
        for number, text in enumerate(documents.values()):
            counts = Counter(terms(text))
            lengths.append(sum(counts.values()))
            for term, count in counts.items():
                numbers, often = self.postings.setdefault(term, (array("I"), array("I")))
                numbers.append(number)
                often.append(count)
        mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        self.norms = K1 * (1 - B + B * np.array([stored_length(n) for n in lengths], dtype=np.float64) / mean)

    def search(self, query: str, limit: int = 50) -> Sequence[str]:
        """Ids of documents, best first."""
        scores = np.zeros(len(self.ids))
        for term, repeat in Counter(terms(query)).items():
            if term not in self.postings:
                continue
            numbers, often = (np.frombuffer(part, dtype=np.uint32) for part in self.postings[term])
            idf = math.log(1 + (len(self.ids) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            scores[numbers] += repeat * idf * often / (often + self.norms[numbers])
        hits = np.flatnonzero(scores)
        order = np.lexsort((self.ranks[hits], -scores[hits].astype(np.float32)))
        return [self.ids[n] for n in hits[order[:limit]]]
