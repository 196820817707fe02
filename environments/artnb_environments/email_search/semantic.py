"""Which mails mean what was asked, in whatever words? Vectors of an embedder, alone or fused with FTS5.

The embedder that needs nothing more is latent semantic analysis: TF-IDF, then the largest singular vectors of
the inbox's own mails. It brings together words that occur in the same mails; a word that no mail holds it
cannot know. ``wordllama`` brings vectors of words from outside, and works offline.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from artnb import MissingDependency
from artnb_environments.email_search.store import SNIPPET_TOKENS, Hit, MailStore, filters

if TYPE_CHECKING:
    import numpy as np

EMBEDDERS = ("lsa", "wordllama")
SEARCHES = ("keywords", "semantic", "both")
_DEPTH = 50
"""Ranks of each list that are fused."""
_RRF = 60
"""Cormack's constant of reciprocal rank fusion (SIGIR 2009)."""
_CHARACTERS = 2000
"""Of a mail that are embedded."""


class Embedder(Protocol):
    """Texts as vectors: float32, (texts, dimensions), of length 1, or 0 where a text holds nothing known."""

    def fit(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of the mails of an inbox, which may be learned from."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of other texts."""
        ...


class Lsa:
    """TF-IDF and a truncated, randomised SVD (Halko, Martinsson and Tropp 2011) in numpy."""

    def __init__(self, dimensions: int = 128, words: int = 3000, sample: int = 2000) -> None:
        self.dimensions, self.words, self.sample = dimensions, words, sample

    def fit(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np

        counts = Counter(word for text in texts for word in set(words_of(text)))
        kept = [word for word, count in counts.most_common() if 2 <= count <= max(2, len(texts) // 2)]
        self._column = {word: column for column, word in enumerate(kept[: self.words] or counts)}
        self._idf = np.log((1 + len(texts)) / (1 + np.array([counts[word] for word in self._column], "f4")))
        some = texts[:: max(1, -(-len(texts) // self.sample))]
        matrix = self._tf_idf(some)
        size = min(
            self.dimensions, -(-min(matrix.shape) // 4)
        )  # nearly full rank would bring nothing together
        draw = np.random.default_rng(0).standard_normal((matrix.shape[1], size + 16), "f4")
        basis = np.linalg.qr(matrix @ draw)[0]
        for _ in range(2):
            basis = np.linalg.qr(matrix @ (matrix.T @ basis))[0]
        self._axes = np.linalg.svd(basis.T @ matrix, full_matrices=False)[2][:size].T  # (words, dimensions)
        return self.embed(texts)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np

        parts = [self._tf_idf(texts[at : at + 256]) @ self._axes for at in range(0, len(texts), 256)]
        found = np.concatenate(parts) if parts else np.zeros((0, self._axes.shape[1]), "f4")
        return _unit(found)

    def _tf_idf(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np

        matrix = np.zeros((len(texts), len(self._column)), "f4")
        for row, text in enumerate(texts):
            for word, count in Counter(words_of(text)).items():
                if (column := self._column.get(word)) is not None:
                    matrix[row, column] = (1 + np.log(count)) * self._idf[column]
        return _unit(matrix)


class WordLlama:
    """The word vectors of the package ``wordllama``, which brings its weights."""

    def __init__(self) -> None:
        try:
            import wordllama
        except ModuleNotFoundError as error:
            why = 'wordllama is needed for its word vectors. Install it with: pip install "artnb[email]"'
            raise MissingDependency(why) from error
        folder = Path(wordllama.__file__).parent
        self._model: Any = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)

    def fit(self, texts: Sequence[str]) -> np.ndarray:
        return self.embed(texts)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np

        return _unit(np.asarray(self._model.embed([text or " " for text in texts]), "f4"))


def make_embedder(name: str) -> Embedder:
    """One of EMBEDDERS. Raises MissingDependency."""
    return _word_llama() if name == "wordllama" else Lsa()


@lru_cache(maxsize=1)
def _word_llama() -> WordLlama:
    return WordLlama()


def _unit(matrix: np.ndarray) -> np.ndarray:
    import numpy as np

    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix / np.where(lengths > 1e-6, lengths, np.inf)


def words_of(text: str) -> list[str]:
    """Words in lower case without their commonest endings.

    >>> words_of("The vests' prices, revised")
    ['the', 'vest', 'price', 'revis']
    """
    return [_stem(word) for word in re.findall(r"[^\W_]{2,30}", text.lower())]


@lru_cache(maxsize=100_000)
def _stem(word: str) -> str:
    for ending in ("ings", "ing", "ied", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


class SemanticIndex:
    """The vectors of one inbox, oldest mail first."""

    def __init__(self, store: MailStore, inbox: str, embedder: Embedder) -> None:
        self._store, self._inbox, self._embedder = store, inbox, embedder
        query = (
            "SELECT message_id, date, subject, substr(body, 1, ?) FROM emails WHERE inbox = ? "
            "ORDER BY date, id"
        )
        rows = store.rows(query, (_CHARACTERS, inbox))
        self._ids = [row[0] for row in rows]
        self._dates = [row[1] for row in rows]
        self._vectors = embedder.fit([f"{subject}\n{body}" for _, _, subject, body in rows])

    def ranked(self, text: str, **given: Any) -> list[str]:
        """Ids of the mails nearest to a text, the nearest first, among those that the filters leave."""
        import numpy as np

        start = bisect_left(self._dates, given.pop("sent_after", None) or "")
        ends = [given.pop(name, None) for name in ("sent_before", "until")]
        end = min(bisect_left(self._dates, day or "~") for day in ends)
        if end <= start:
            return []
        scores = self._vectors[start:end] @ self._embedder.embed([text])[0]
        if any(value is not None for value in given.values()):
            where, values = filters(self._inbox, **given)
            rows = self._store.rows(f"SELECT e.message_id FROM emails e WHERE {where}", values)
            allowed = {row[0] for row in rows}
            scores[[name not in allowed for name in self._ids[start:end]]] = 0
        best = np.argsort(-scores, kind="stable")[:_DEPTH]
        return [self._ids[start + at] for at in best if scores[at] > 0]


@lru_cache(maxsize=64)
def index_of(store: MailStore, inbox: str, embedder: str) -> SemanticIndex:
    """The index of an inbox, made once."""
    return SemanticIndex(store, inbox, make_embedder(embedder))


def fused(rankings: Iterable[Sequence[str]]) -> list[str]:
    """Reciprocal rank fusion: what stands high in several lists comes first.

    >>> fused([["a", "b"], ["b", "c"]])
    ['b', 'a', 'c']
    """
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, name in enumerate(ranking, 1):
            scores[name] = scores.get(name, 0.0) + 1 / (_RRF + rank)
    return sorted(scores, key=lambda name: -scores[name])


def search(
    store: MailStore,
    inbox: str,
    keywords: Sequence[str],
    *,
    how: str,
    embedder: str = "lsa",
    max_results: int = 10,
    **given: Any,
) -> list[Hit]:
    """Mails by meaning (``semantic``), or by meaning and words (``both``), the best first.

    Takes the filters of ``MailStore.search``. Raises MissingDependency.
    """
    rankings = [index_of(store, inbox, embedder).ranked(" ".join(keywords), **given)]
    if how == "both":
        hits = store.search(inbox, keywords, any_keyword=True, max_results=_DEPTH, **given)
        rankings.append([hit.message_id for hit in hits])
    return [hit for name in fused(rankings)[:max_results] if (hit := _hit(store, name)) is not None]


def _hit(store: MailStore, message_id: str) -> Hit | None:
    query = (
        "SELECT message_id, date, from_address, subject, substr(body, 1, 300) FROM emails "
        "WHERE message_id = ?"
    )
    for name, date, sender, subject, body in store.rows(query, (message_id,)):
        words = body.split()
        end = " …" if len(words) > SNIPPET_TOKENS else ""
        return Hit(name, date, sender, subject, " ".join(words[:SNIPPET_TOKENS]) + end)
    return None
