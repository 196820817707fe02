"""How long do a mailbox of 11,000 mails and a search in it take?

Generated is the test world, eleven inboxes of 1,000 mails; all of them then lie in one store, as an imported
mailbox does. A search with its filters is compared with the bare FTS5 query for the same words in the same
database, in the same run. Searches by meaning run over an index of one inbox of 11,000 mails.

    python tests/benchmarks/email_search.py [--repeats 3] [--quick] [--json]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "environments"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Machine, arguments, median, report, table

from artnb_environments.email_search import semantic
from artnb_environments.email_search.baselines import keywords_of
from artnb_environments.email_search.questions import draw_question
from artnb_environments.email_search.store import MailStore
from artnb_environments.email_search.world import DISTRACTORS, INBOXES, _Writer

WORLD = 1000


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def searches(store: MailStore, address: str, queries: list[list[str]], how: str) -> list[float]:
    """Seconds of each search."""
    found = []
    for words in queries:
        if how == "raw FTS5":
            sql = "SELECT rowid FROM emails_fts WHERE emails_fts MATCH ? LIMIT 10"
            match = " AND ".join(f'"{word}"' for word in words)
            found.append(seconds_of(lambda sql=sql, match=match: store.rows(sql, (match,)))[0])
        elif how == "keywords":
            found.append(seconds_of(lambda words=words: store.search(address, words, until="2025-11-01"))[0])
        else:
            work = lambda words=words: semantic.search(store, address, words, how=how, until="2025-11-01")  # noqa: E731
            found.append(seconds_of(work)[0])
    return found


def measure(messages: int, repeats: int, asked: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    def generate() -> list[Any]:
        return [_Writer("test", WORLD, number, messages, DISTRACTORS).inbox() for number in range(INBOXES)]

    generated = [seconds_of(generate) for _ in range(repeats)]
    inboxes = generated[0][1]
    mails = [mail for inbox in inboxes for mail in inbox.mails]
    stored, store = seconds_of(lambda: MailStore(mails))
    address = inboxes[0].owner.address
    together = MailStore(replace(mail, inbox=address) for mail in mails)
    draw = random.Random(0)
    queries = [
        keywords_of(draw_question(draw.choice(inboxes), "test", draw, 0.0)["question"])[-2:]
        for _ in range(asked)
    ]
    indexed, _ = seconds_of(lambda: semantic.index_of(together, address, "lsa"))
    rows = []
    for how in ("raw FTS5", "keywords", "semantic", "both"):
        times = [t for _ in range(repeats) for t in searches(together, address, queries, how)]
        rows.append({"search": how, "milliseconds": 1e3 * median(times), "slowest_ms": 1e3 * max(times)})
    for row in rows:
        row["over_raw"] = row["milliseconds"] / rows[0]["milliseconds"]
    totals = {
        "mails": len(mails),
        "generate_seconds": median([seconds for seconds, _ in generated]),
        "store_seconds": stored,
        "lsa_seconds": indexed,
    }
    store.close()
    return totals, rows


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    machine = Machine()
    repeats = options.repeats or (1 if options.quick else 3)
    totals, rows = measure(100 if options.quick else 1000, repeats, 20 if options.quick else 200)
    columns = (
        ("search", "search", "s"),
        ("milliseconds", "ms (median)", ".2f"),
        ("slowest_ms", "slowest", ".2f"),
        ("over_raw", "over raw FTS5", ".1f"),
    )
    head = (
        f"{totals['mails']:,} mails: generated in {totals['generate_seconds']:.2f} s, stored in "
        f"{totals['store_seconds']:.2f} s, indexed by meaning in {totals['lsa_seconds']:.2f} s\n"
    )
    figures = {"benchmark": "email_search", **totals, "rows": rows}
    report(machine, figures, head + table(rows, columns), only_json=options.json)


if __name__ == "__main__":
    main()
