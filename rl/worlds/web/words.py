"""Words of an answer as WebArena's evaluators count them: the rules of NLTK's `word_tokenize`, for text in lower case
and without its data.

The text is cut into sentences, since a full stop is a word of its own only where a sentence ends, and each sentence
into words by the Penn Treebank rules. A hyphen, a slash and an underscore join: `in-store` is one word.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import pairwise

# What the English sentence model takes for an abbreviation. Dotted initials (u.s, a.m) follow a rule of their own
# below.
_ABBREVIATIONS = frozenset(
    """
    adm ala ariz aug ave bros calif chg cie co col colo conn corp cos ct dec dr feb fla fri ft ga gen ill inc jan
    jr kan ky lt ltd maj messrs mg mich minn mr mrs ms nev nov oct ok okla ore pa ph.d prof rep reps sen sep
    sept sr st sw tenn tues va vs vt wash wed wis w.va yr c d e f g h k l m n p r s t v w a.a a.c a.d a.g a.h
    a.m a.m.e a.s a.t b.f b.v c.i.t c.o.m.b c.v d.c d.h d.w e.f e.h e.l e.m f.g f.j g.d g.f g.k h.c h.f h.m
    i.m.s j.b j.c j.j j.k j.p j.r l.a l.f l.p m.b.a m.d.c m.j n.c n.d n.h n.j n.m n.v n.y p.a.m p.m r.a r.h
    r.i r.j r.k r.t s.a s.a.y s.c s.g s.p.a s.s t.j u.k u.n u.s u.s.a u.s.s.r w.c w.r w.w
    """.split()
)
_APART = r"[)\";}\]*:@'({\[‘’“”«»?!]"  # never inside a word
_END = re.compile(rf"[.?!](?={_APART}|\s+\S)")
_RUN = r"-{2,}|\.{2,}"
_CHUNK = re.compile(r"\S+")
_PIECE = re.compile(rf"{_RUN}|[^\s(\"`{{\[:;&#*@)}}\]\-,]\S*?(?=\s|$|{_APART}|{_RUN}|,(?:$|\s|{_APART}|{_RUN}))|\S")
_CLOSING = re.compile(r"""["')\]}‘’“”«»]+?(?:\s+|(?=--)|$)""", re.MULTILINE)
_NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*")
_INITIAL = re.compile(r"[^\W\d_]")

_SPACED = r" \g<0> "
_RULES = [
    (re.compile(r"[«“‘„]|``|`"), _SPACED),
    (re.compile(r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)"), "' "),
    (re.compile(r"([^.])(\.)([\])}>\"'»”’ ]*+)\s*$"), r"\1 \2 \3 "),  # the full stop of the sentence
    (re.compile(r"([:,])(\D)"), r" \1 \2"),
    (re.compile(r"[:,]$"), _SPACED),
    (re.compile(r"\.{2,}|[;@#$%&‒-―?!*]"), _SPACED),
    (re.compile(r"[\]\[(){}<>]"), _SPACED),
    (re.compile(r"--"), _SPACED),
    (re.compile(r"\A|\Z"), " "),
    (re.compile(r"[»”’]|''|\""), _SPACED),
    (re.compile(r"\s+"), " "),
    (re.compile(r"([^' ])('[smd]|') "), r"\1 \2 "),
    (re.compile(r"([^' ])('ll|'re|'ve|n't) "), r"\1 \2 "),
    (
        re.compile(
            r"\b(can)(not)\b|\b(d)('ye)\b|\b(gim|lem)(me)\b|\b(gon)(na)\b|\b(got)(ta)\b|\b(more)('n)\b"
            r"|\b(wan)(na)(?=\s)"
        ),
        None,
    ),
    (re.compile(r" ('t)(is|was)\b"), r" \1 \2 "),
]


def _ends(piece: str, following: str) -> bool:
    """Whether a sentence ends after a piece of text."""
    word = piece[:-1]
    if piece in ("?", "!", ".") or not piece.endswith(".") or word.endswith("."):  # two dots or more end none
        return piece in ("?", "!", ".")
    if word in _ABBREVIATIONS or word.rsplit("-", 1)[-1] in _ABBREVIATIONS:
        return False
    if _NUMBER.fullmatch(word) or _INITIAL.fullmatch(word):
        return not (following[:1].islower() or following in (";", ":", ",", ".", "!", "?"))
    return True


def sentences(text: str) -> list[str]:
    """The sentences of a text in lower case; quotes and brackets that close one stay with it."""
    found, start = [], 0
    ends = [end.end() for end in _END.finditer(text)]
    for chunk in _CHUNK.finditer(text):
        here = ends[bisect_right(ends, chunk.start()) : bisect_right(ends, chunk.end())]
        if not here:
            continue
        end = here[-1]  # only the last sign of a chunk can end a sentence, but every piece of it has a say
        following = _CHUNK.search(text, end) if text[end].isspace() else None
        pieces = _PIECE.findall(text[chunk.start() : following.end() if following else end + 1])
        if not any(_ends(piece, after) for piece, after in pairwise(pieces)):
            continue
        stop = following.start() if following else end
        closing = _CLOSING.match(text, stop)
        stop = closing.end() if closing else stop
        found.append(text[start:stop].strip())
        start = stop
    return [sentence for sentence in [*found, text[start:].strip()] if sentence]


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    found = []
    for sentence in sentences(text):
        for rule, spaced in _RULES:
            if spaced is None:
                sentence = rule.sub(lambda m: f" {' '.join(part for part in m.groups() if part)} ", sentence)
            else:
                sentence = rule.sub(spaced, sentence)
        found += sentence.split()
    return found
