"""Exact and near-duplicate prompts: only the first of a group stays, so none can straddle the split."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from datasketch import MinHash, MinHashLSH

from eagle.dataset.prompts import Prompt

PERMUTATIONS = 128
_NGRAM = 3
# Scripts without blanks count each character as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


@dataclass(frozen=True)
class Deduplicated:
    """What stayed, in order, and how many were dropped."""

    prompts: list[Prompt]
    exact: int
    near: int


def drop_duplicates(prompts: list[Prompt], threshold: float) -> Deduplicated:
    """Drop every prompt that is equal to an earlier one, or has at least `threshold` Jaccard similarity with one that stayed.

    Similarity is that of the sets of word 3-grams. Candidates come from MinHash LSH, tuned below the threshold so that
    few are missed (a pair at the threshold is found with probability above 0.99), and are then compared exactly.
    With threshold 1 only exact duplicates are dropped. Deterministic: the order of prompts decides which one stays.
    """
    exact = near = 0
    seen: set[str] = set()
    kept: list[Prompt] = []
    grams: list[frozenset[str]] = []
    bands, rows = _bands(threshold)
    index = MinHashLSH(num_perm=PERMUTATIONS, params=(bands, rows))
    for prompt in prompts:
        if prompt.id in seen:
            exact += 1
            continue
        seen.add(prompt.id)
        if threshold < 1.0:
            mine = word_ngrams(prompt.text)
            sketch = MinHash(num_perm=PERMUTATIONS)
            sketch.update_batch(sorted(gram.encode() for gram in mine))
            if any(jaccard(mine, grams[at]) >= threshold for at in index.query(sketch)):
                near += 1
                continue
            index.insert(len(kept), sketch)
            grams.append(mine)
        kept.append(prompt)
    return Deduplicated(kept, exact, near)


def word_ngrams(text: str) -> frozenset[str]:
    """Return the word 3-grams of a text, compared without case and compatibility forms; a shorter text is one gram."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    if len(words) < _NGRAM:
        return frozenset([" ".join(words) or text])
    return frozenset(" ".join(words[at : at + _NGRAM]) for at in range(len(words) - _NGRAM + 1))


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Return |left & right| / |left | right|; both must be non-empty."""
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def _bands(threshold: float) -> tuple[int, int]:
    """Return the most selective (bands, rows) that still finds a pair at the threshold with probability > 0.99."""
    for rows in range(PERMUTATIONS // 2, 0, -1):
        bands = PERMUTATIONS // rows
        if 1.0 - (1.0 - threshold**rows) ** bands > 0.99:
            return bands, rows
    return PERMUTATIONS, 1
