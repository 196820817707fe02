"""Does mail of every origin and state get into the store, and does the report say what did not?"""

from __future__ import annotations

import base64
import csv
import datetime
import mailbox
import random
import stat
import tracemalloc
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from artnb.errors import ConfigurationError
from artnb_environments.email_search.importers import ImportReport, import_mailbox
from artnb_environments.email_search.mail_text import addresses_of, read_date, read_message, text_of_html
from artnb_environments.email_search.store import MailStore
from artnb_environments.email_search.world import Mail

PLAIN = b"""\
From: Ada Marsh <Ada@example.com>
To: bob@example.com, "Doe, Jo" <jo@example.com>
Cc: Team: cc@example.com, dd@example.com;
Date: Mon, 14 May 2001 16:39:00 -0700 (PDT)
Message-ID: <1@example.com>
Subject: Safety vests

The vests cost $4,310.
"""


def lines(raw: bytes) -> list[bytes]:
    return raw.splitlines(keepends=True)


def with_headers(raw: bytes = PLAIN, **headers: str | bytes) -> bytes:
    """The message with headers exchanged; ``from_`` is From."""
    head, _, body = raw.partition(b"\n\n")
    kept = head.split(b"\n")
    for name, value in headers.items():
        label = name.rstrip("_").replace("_", "-").title().encode()
        value = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        kept = [line for line in kept if not line.lower().startswith(label.lower() + b":")]
        kept.append(label + b": " + value)
    return b"\n".join(kept) + b"\n\n" + body


def write_files(folder: Path, *messages: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, raw in enumerate(messages, 1):
        (folder / f"{number}.eml").write_bytes(raw)
    return folder


def imported(source: Path, tmp_path: Path, **options: Any) -> tuple[ImportReport, list[Mail], MailStore]:
    path = tmp_path / "mail.sqlite"
    report = import_mailbox(source, path, progress=False, replace=True, **options)
    store = MailStore.open(path)
    found = [store.read(box, name) for name, box in store.rows("SELECT message_id, inbox FROM emails")]
    assert report.read == report.kept + report.skipped.total() and len(found) == report.kept
    return report, [mail for mail in found if mail is not None], store


# ---- formats ------------------------------------------------------------------------------------


def assert_is_plain(mail: Mail) -> None:
    assert (mail.from_address, mail.subject, mail.date) == (
        "ada@example.com",
        "Safety vests",
        "2001-05-14 23:39:00",
    )
    assert mail.to == ("bob@example.com", "jo@example.com")
    assert mail.cc == ("cc@example.com", "dd@example.com")
    assert mail.body == "The vests cost $4,310."


def enron(folder: Path) -> Path:
    for person, box, number, raw in (
        ("allen-p", "_sent_mail", 1, PLAIN),
        ("allen-p", "inbox", 2, with_headers(message_id="<2>", subject="Other")),
        ("bass-e", "inbox", 1, PLAIN),
    ):
        place = folder / "maildir" / person / box
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.").write_bytes(raw)
    return folder / "maildir"


def test_enrons_maildir_gives_an_inbox_for_each_person(tmp_path: Path) -> None:
    report, mails, store = imported(enron(tmp_path / "enron"), tmp_path)
    assert report.format == "files" and report.inboxes == {"allen-p": 2, "bass-e": 1}
    assert (
        store.owners["allen-p"].address == "ada@example.com" and store.owners["allen-p"].name == "Ada Marsh"
    )
    assert_is_plain(mails[0])
    assert [hit.subject for hit in store.search("bass-e", ["vest"])] == ["Safety vests"]
    assert store.rows("SELECT labels, original_id FROM emails")[0] == ("_sent_mail", "1@example.com")


def test_maildir_leaves_deleted_mail_and_dot_files_out(tmp_path: Path) -> None:
    box = mailbox.Maildir(tmp_path / "Mail")
    sent = box.add_folder("Sent")
    box.add(PLAIN)
    sent.add(with_headers(message_id="<2>", subject="Mine"))
    deleted = mailbox.MaildirMessage(with_headers(message_id="<3>", subject="Gone"))
    deleted.set_subdir("cur")
    deleted.add_flag("T")
    box.add(deleted)
    (tmp_path / "Mail" / "cur" / ".hidden").write_bytes(PLAIN)
    report, mails, store = imported(tmp_path / "Mail", tmp_path)
    assert report.format == "maildir" and dict(report.skipped) == {"marked as deleted": 1}
    assert {mail.subject for mail in mails} == {"Safety vests", "Mine"}
    assert sorted(store.rows("SELECT labels FROM emails")) == [("INBOX",), ("Sent",)]


def mbox_of(path: Path, *messages: bytes) -> Path:
    box = mailbox.mbox(path)
    for raw in messages:
        box.add(raw)
    box.close()
    return path


def test_an_mbox_is_split_where_the_standard_library_splits_it(tmp_path: Path) -> None:
    bodies = ["From here on it is text.\n", "a\n\nFrom there, too\n", ">From quoted\n", "no end"]
    raws = [with_headers(subject=str(i)) + text.encode() for i, text in enumerate(bodies)]
    path = mbox_of(tmp_path / "all.mbox", *raws)
    theirs = [str(message["subject"]) for message in mailbox.mbox(path)]
    report, mails, _ = imported(path, tmp_path)
    assert report.format == "mbox" and [mail.subject for mail in mails] == theirs == ["0", "1", "2", "3"]
    assert "From here on it is text." in mails[0].body, "the > that mbox put there is gone"
    assert "\n\nFrom there, too" in mails[1].body


def test_a_takeout_keeps_gmails_labels_and_leaves_spam_out(tmp_path: Path) -> None:
    labelled = [
        with_headers(x_gmail_labels="Inbox,Important,=?UTF-8?Q?B=C3=BCro?="),
        with_headers(subject="Buy", x_gmail_labels="Spam,Unread"),
        with_headers(subject="Sent one", x_gmail_labels="Sent"),
    ]
    path = mbox_of(tmp_path / "All mail Including Spam and Trash.mbox", *labelled)
    report, mails, store = imported(path, tmp_path)
    assert dict(report.skipped) == {"in Spam": 1} and len(mails) == 2
    assert store.rows("SELECT labels FROM emails")[0] == ("Inbox, Important, Büro",)
    assert store.owners["mailbox"].address == "ada@example.com"
    assert len(imported(path, tmp_path, skip_labels=())[1]) == 3


ROW = {
    "Message-ID": "<1@example.com>",
    "Date": "2001-05-14 16:39:00-07:00",
    "From": "Ada Marsh <Ada@example.com>",
    "To": "bob@example.com, jo@example.com",
    "Cc": "cc@example.com; dd@example.com",
    "Subject": "Safety vests",
    "Body": "The vests cost $4,310.",
}


def write_csv(path: Path, rows: list[dict[str, str]], encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding, errors="surrogateescape") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_csv_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    odd = ROW | {"Date": "soon", "Body": "x" * 200_000, "Message-ID": ""}
    empty = dict.fromkeys(ROW, "")
    limit = csv.field_size_limit()
    report, mails, _ = imported(write_csv(tmp_path / "a.csv", [ROW, odd, empty]), tmp_path)
    assert_is_plain(mails[0])
    assert mails[1].date == "" and len(mails[1].body) == 5000
    assert dict(report.skipped) == {"an empty message": 1} and report.noted["body cut"] == 1
    assert csv.field_size_limit() == limit


def test_a_csv_of_raw_messages_and_one_in_a_windows_charset_are_read(tmp_path: Path) -> None:
    raw = {"file": "allen-p/_sent_mail/1.", "message": PLAIN.decode()}
    _, mails, _ = imported(write_csv(tmp_path / "raw.csv", [raw]), tmp_path)
    assert_is_plain(mails[0])
    assert mails[0].inbox == "allen-p"
    _, mails, _ = imported(write_csv(tmp_path / "w.csv", [ROW | {"Body": "Café"}], "cp1252"), tmp_path)
    assert mails[0].body == "Café"


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    nothing = write_csv(tmp_path / "a.csv", [{"date": "2001-01-01", "colour": "red"}])
    with pytest.raises(ConfigurationError, match=r"no column for the text.*date, colour"):
        imported(nothing, tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigurationError, match="no parquet file"):
        imported(tmp_path / "b.parquet", tmp_path)
    assert not list(tmp_path.glob("*.partial*")) and not (tmp_path / "mail.sqlite").exists()


def test_parquet_with_enrons_columns(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    when = datetime.datetime(2001, 5, 14, 23, 39, tzinfo=datetime.UTC)
    row = {
        "message_id": "<1@example.com>",
        "subject": "Safety vests",
        "from": "ada@example.com",
        "to": ["bob@example.com", "jo@example.com"],
        "cc": ["cc@example.com", "dd@example.com"],
        "bcc": [],
        "date": when,
        "body": "The vests cost $4,310.",
        "file_name": "allen-p/_sent_mail/1.",
    }
    other = row | {"body": None, "to": None, "subject": None, "date": None}
    parquet.write_table(pyarrow.Table.from_pylist([row, other]), tmp_path / "a.parquet")
    report, mails, _ = imported(tmp_path / "a.parquet", tmp_path)
    assert_is_plain(mails[0])
    assert report.inboxes == {"allen-p": 2} and report.noted["no body"] == 1
    assert (mails[1].subject, mails[1].to, mails[1].date) == ("", (), "")


# ---- what mail is like --------------------------------------------------------------------------


def test_groups_that_the_new_parser_fails_on_are_read() -> None:
    for header in ("Group: a@b.de; <c@d.de>", "a: b <c@d.de>; e <f@g.de>"):
        message = read_message(lines(with_headers(from_=header, reply_to=header, to=header)))
        assert message.to and all("@" in address for address in message.to)
    assert addresses_of(["undisclosed-recipients:;"]) == []
    assert addresses_of(["/O=ENRON/CN=JDOE"]) == ["/o=enron/cn=jdoe"]


@pytest.mark.parametrize(
    ("header", "read"),
    [
        ("Mon, 14 May 2001 16:39:00 -0700 (PDT)", "2001-05-14 23:39:00"),
        ("14 May 01 16:39", "2001-05-14 16:39:00"),
        ("2001-05-14T16:39:00Z", "2001-05-14 16:39:00"),
        ("Fri, 99 Foo 2001 99:99", ""),
        ("Mon, 14 May 99999 16:39:00 +0000", ""),
        ("Mon, 14 May 2001 16:39:00 +9999999", ""),
        ("yesterday", ""),
        ("", ""),
        ("\ud800", ""),
    ],
)
def test_dates(header: str, read: str) -> None:
    assert read_date(header) == read


def test_a_date_that_cannot_be_read_is_taken_from_another_header() -> None:
    odd = with_headers(date="Tue, 0 Zzz")
    assert read_message(lines(odd)).date == ""
    hop = with_headers(odd, received="from a by b; Mon, 14 May 2001 16:39:00 +0000")
    message = read_message(lines(hop))
    assert message.date == "2001-05-14 16:39:00" and "date taken from another header" in message.notes
    assert read_message(lines(odd), received="Mon May 14 16:39:00 2001").date == "2001-05-14 16:39:00"


@pytest.mark.parametrize(
    ("charset", "body"),
    [
        ("utf-8", "Café".encode()),
        ("us-ascii", "Café".encode()),
        ("x-unknown", "Café".encode("cp1252")),
        ("hex", "Café".encode()),
        ("utf-8", "Café".encode("latin-1")),
        ('"utf-8', "Café".encode()),
        ("", "Café".encode("cp1252")),
    ],
)
def test_bodies_of_wrong_charsets(charset: str, body: bytes) -> None:
    raw = with_headers(content_type=f"text/plain; charset={charset}").partition(b"\n\n")[0] + b"\n\n" + body
    assert read_message(lines(raw)).body == "Café"


def test_encoded_and_raw_headers() -> None:
    subjects = {
        "=?utf-8?b?Q2Fmw6k=?= =?iso-8859-1?q?_au_lait?=": "Café au lait",
        "=?x-none?q?Caf=E9?=": "Café",
        "Café": "Café",
        b"Caf\xe9": "Café",
        "=?utf-8?b?!!!?=": None,
        "=?utf-8?q?a=ED=A0=80b?=": None,
        "a\r\n\tb": "a b",
    }
    for header, read in subjects.items():
        message = read_message(lines(with_headers(subject=header)))
        message.subject.encode("utf-8")
        assert read is None or message.subject == read
    names = read_message(lines(with_headers(from_="=?utf-8?q?M=C3=BCller=2C_Jo?= <jo@example.com>")))
    assert names.from_address == "jo@example.com"


def test_html_only_mail_becomes_its_visible_text() -> None:
    page = (
        "<html><head><title>T</title><style>p{color:red}</style></head><body><p>The vests cost&nbsp;&#36;5"
        "</p><script>alert('x')</script><table><tr><td>a</td><td>b</td></tr></table><img src='http://x/y.png'>"
    )
    message = read_message(lines(with_headers(content_type="text/html").replace(b"The vests", page.encode())))
    assert message.body.startswith("The vests cost $5\n") and "a b" in message.body
    assert not any(word in message.body for word in ("alert", "color", "http", "<", "T\n"))
    assert "text taken out of HTML" in message.notes
    assert text_of_html("a<![weird[ b") and text_of_html("<" * 100_000) is not None


def test_the_plain_part_is_preferred_and_attachments_are_not_text() -> None:
    message = EmailMessage()
    message["Subject"] = "Two"
    message.set_content("plain text")
    message.add_alternative("<p>marked up</p>", subtype="html")
    message.add_attachment(b"\0\1" * 500, maintype="application", subtype="pdf", filename="a.pdf")
    message.add_attachment("secret notes\n" * 50, filename="notes.txt")
    message.add_attachment(EmailMessage(), filename="forwarded.eml")
    read = read_message(lines(message.as_bytes()))
    assert read.body == "plain text" and read.left_out > 1500 and "attachment left out" in read.notes


@pytest.mark.parametrize("line", [76, 4_000_000])
def test_fifty_megabytes_of_attachment_are_never_held(line: int, tmp_path: Path) -> None:
    size = 50_000_000 if line > 76 else 3_000_000
    head = with_headers(content_type='multipart/mixed; boundary="x"').partition(b"\n\n")[0]
    with (tmp_path / "big.mbox").open("wb") as file:
        file.write(b"From x Mon May 14 16:39:00 2001\n" + head + b"\n\n--x\n\nBefore.\n--x\n")
        file.write(b"Content-Type: application/zip\nContent-Transfer-Encoding: base64\n\n")
        encoded = base64.b64encode(b"\0" * 3_000_000)[:line] + b"\n"
        for _ in range(size // len(encoded)):
            file.write(encoded)
        file.write(b"--x\nContent-Type: text/plain\n\nAfter.\n--x--\n\n")
        file.write(b"From y Mon May 14 16:39:00 2001\n" + with_headers(subject="next") + b"\n")
    tracemalloc.start()
    try:
        report, mails, _ = imported(tmp_path / "big.mbox", tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000
    assert [mail.body for mail in mails] == ["Before.\n\nAfter.", "The vests cost $4,310."]
    assert report.left_out > 0.9 * size
    assert (tmp_path / "mail.sqlite").stat().st_size < 200_000


def test_a_text_without_end_is_cut(tmp_path: Path) -> None:
    write_files(tmp_path / "m", PLAIN + b"endless words\n" * 200_000)
    report, mails, _ = imported(tmp_path / "m", tmp_path, longest_body=100)
    assert len(mails[0].body) == 100 and report.noted["text cut"] == report.noted["body cut"] == 1


def test_copies_are_kept_once_and_a_message_id_may_be_used_twice(tmp_path: Path) -> None:
    other = with_headers(subject="Another mail of the same id")
    write_files(tmp_path / "m", PLAIN, PLAIN, with_headers(message_id="<new>"), other, b"", b"\xff\xfe\n\n")
    report, mails, _ = imported(tmp_path / "m", tmp_path)
    assert len(mails) == 2 and len({mail.id for mail in mails}) == 2
    assert report.skipped["a copy of another message"] == 2
    assert report.skipped["an empty message"] == 1 and report.skipped.total() == 4
    assert report.noted["message id that another message has, too"] == 1


def test_missing_headers_and_bodies(tmp_path: Path) -> None:
    write_files(tmp_path / "m", b"Subject: only this\n", b"From: a@b.de\n\n", b"\nno header at all\n")
    report, mails, _ = imported(tmp_path / "m", tmp_path)
    assert {mail.subject for mail in mails} == {"only this", ""}
    assert report.noted["no body"] == 2 and "cannot be read: ValueError: no header" in report.skipped


def test_deep_and_unclosed_structures_end(tmp_path: Path) -> None:
    deep = b"".join(b'Content-Type: multipart/mixed; boundary="%d"\n\n--%d\n' % (i, i) for i in range(3000))
    unclosed = with_headers(content_type='multipart/mixed; boundary="x"') + b"--x\n\nstill text"
    write_files(tmp_path / "m", b"Subject: deep\n" + deep, unclosed, b"X: " + b"y" * 3_000_000 + b"\n\ntext")
    report, mails, _ = imported(tmp_path / "m", tmp_path)
    assert "still text" in [mail.body for mail in mails] and report.noted["headers cut"] == 1


@settings(max_examples=100, deadline=None)
@given(some.randoms(use_true_random=False))
def test_no_message_however_damaged_does_more_than_raise_value_error(draw: random.Random) -> None:
    message = EmailMessage()
    message["Subject"], message["To"], message["Date"] = "A", "g: a@b.de, c@d.de;", "1 Jan 2020"
    message.set_content("text " * 20)
    message.add_attachment(b"\0" * 50, maintype="image", subtype="png", filename="a")
    raw = bytearray(message.as_bytes())
    for _ in range(draw.randrange(1, 30)):
        raw[draw.randrange(len(raw))] = draw.choice(b'\0\xff\n\r:;<>"=?@-(),\\ \t%')
    try:
        read = read_message(lines(bytes(raw)))
    except ValueError:
        return
    for text in (read.subject, read.body, read.from_address, read.original_id, *read.to, *read.labels):
        text.encode("utf-8")


# ---- report and file ----------------------------------------------------------------------------


def test_the_report_says_why_and_escapes_what_mail_says(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "<img src=x onerror=alert(1)>", PLAIN, with_headers(date="x"), b"")
    report, _, _ = imported(folder, tmp_path)
    html = report._repr_html_()
    assert "<img" not in html and "&lt;img" in html and "an empty message" in html
    assert "nothing was sent" in html and "3 messages read, 2 kept" in repr(report)
    assert report.places["an empty message"] == ["3.eml"]


def test_the_file_is_private_whole_and_not_overwritten(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "m", PLAIN)
    imported(folder, tmp_path, owner="Me@Example.com")
    path = tmp_path / "mail.sqlite"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert MailStore.open(path).owners["mailbox"].address == "me@example.com"
    with pytest.raises(ConfigurationError, match="replace=True"):
        import_mailbox(folder, path, progress=False)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="no mbox"):
        import_mailbox(folder / "1.eml", path, replace=True, progress=False)
    assert path.read_bytes() == before and not list(tmp_path.glob("*.partial*"))


def test_what_is_no_mailbox_is_refused(tmp_path: Path) -> None:
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "none", {}, "no mailbox at"),
        (tmp_path, {"format": "pst"}, "files, maildir, mbox"),
        (tmp_path, {"format": "mbox"}, "is a folder"),
        (tmp_path, {"longest_body": 0}, "longest_body"),
    ]
    for source, options, why in wrong:
        with pytest.raises(ConfigurationError, match=why):
            import_mailbox(source, tmp_path / "out.sqlite", progress=False, **options)
    (tmp_path / "no.sqlite").write_text("not a database, not at all")
    for name in ("no.sqlite", "absent.sqlite"):
        with pytest.raises(ConfigurationError, match="no mailbox"):
            MailStore.open(tmp_path / name)


def test_links_out_of_the_mailbox_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(PLAIN)
    folder = write_files(tmp_path / "m", with_headers(subject="mine"))
    (folder / "link.eml").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder)
    assert [mail.subject for mail in imported(folder, tmp_path)[1]] == ["mine"]


def test_a_long_import_shows_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_mailbox(write_files(tmp_path / "m", PLAIN), tmp_path / "a.sqlite")
    said = capsys.readouterr()
    assert "import, files: 1/1" in said.out + said.err
