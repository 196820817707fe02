"""How does one message of any age and origin become plain text? Read line by line, attachments left out.

Nothing that a message holds is executed, fetched or believed: charsets, dates, addresses and MIME structure
are read as far as they make sense, and what had to be guessed or cut is said in ``Message.notes``.
"""

from __future__ import annotations

import binascii
import email
import email.header
import email.utils
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message as Parsed
from html.parser import HTMLParser

MOST_HEADER_BYTES = 256 * 1024
MOST_TEXT_BYTES = 1024 * 1024
"""Of a message's text parts; what comes after it is not kept."""
MOST_HTML_CHARACTERS = 200_000
MOST_ADDRESSES = 100
_MOST_BOUNDARIES = 40
_LONGEST_HEADER = 20_000
_BOUNDARY = re.compile(rb'boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;]{1,200}))', re.I)
_TYPE = re.compile(rb"^content-type\s*:\s*([\w.+-]+)/", re.I | re.M)
_ATTACHED = re.compile(rb"^content-disposition\s*:\s*attachment", re.I | re.M)
_ADDRESS = re.compile(r"[^\s<>,;:\"()\[\]]+@[^\s<>,;:\"()\[\]]+")
PARSER_BUGS = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError, binascii.Error)
"""What the standard library's parsers raise on messages that they do not expect; LookupError is within."""


@dataclass
class Message:
    """One message as text. ``date`` is ``YYYY-MM-DD HH:MM:SS`` in UTC, empty where none can be read."""

    original_id: str = ""
    date: str = ""
    subject: str = ""
    from_address: str = ""
    from_name: str = ""
    to: tuple[str, ...] = ()
    cc: tuple[str, ...] = ()
    body: str = ""
    labels: tuple[str, ...] = ()
    """Folder, or the labels of Gmail."""
    notes: set[str] = field(default_factory=set)
    """What had to be guessed, cut or left out."""
    left_out: int = 0
    """Bytes of attachments and of text beyond the limits."""


def read_message(lines: Iterable[bytes], *, received: str = "") -> Message:
    """Read a message from its lines; memory stays bounded whatever it holds.

    lines: as they stand in the file, with their ends; a line may come in pieces. received: a date to fall
    back on, of mbox's "From " line. Raises ValueError where there is no message.
    """
    skim = _Skim()
    raw = b"".join(skim.kept(lines))
    if not raw.strip():
        raise ValueError("an empty message")
    message = Message(left_out=skim.left_out, notes=skim.notes)
    try:
        # The old policy leaves headers as they are; the new one parses them, and fails on some groups.
        parsed = email.message_from_bytes(raw)
        if not parsed.keys():
            raise ValueError("no header")
        _headers(parsed, message, received)
        message.body = _body(parsed, message.notes)
    except PARSER_BUGS as error:
        raise ValueError(f"cannot be read: {type(error).__name__}: {clean(str(error))[:100]}") from error
    if not message.body:
        message.notes.add("no body")
    return message


def clean(text: str) -> str:
    """A text as SQLite and JSON take it: no NUL, no lone surrogate."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode("utf-8")


# ---- attachments ------------------------------------------------------------------------------------


class _Skim:
    """Follows a message's MIME structure line by line and keeps headers and texts only."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self.left_out = 0

    def kept(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        boundaries: set[bytes] = set()
        header, is_header, is_kept, is_first = bytearray(), True, True, True
        headers = texts = 0
        for line in lines:
            mark = line.rstrip()
            if mark[:2] == b"--" and (mark in boundaries or mark.removesuffix(b"--") in boundaries):
                is_header, is_first = mark in boundaries, False
                is_kept = is_header  # what follows the last part is no text
                header.clear()
                yield line
            elif is_header:
                if not mark:
                    is_header = False
                    is_kept = self._enters(bytes(header), boundaries, is_first)
                    yield line
                elif headers + len(line) <= MOST_HEADER_BYTES:
                    headers += len(line)
                    header += line
                    yield line
                else:
                    self._leave(line, "headers cut")
            elif not is_kept:
                self._leave(line, "attachment left out")
            elif texts + len(line) > MOST_TEXT_BYTES:
                self._leave(line, "text cut")
            else:
                texts += len(line)
                yield line

    def _leave(self, line: bytes, why: str) -> None:
        self.left_out += len(line)
        self.notes.add(why)

    @staticmethod
    def _enters(header: bytes, boundaries: set[bytes], is_first: bool) -> bool:
        """Note the boundary of a part that has parts; whether the part's own lines are text."""
        unfolded = re.sub(rb"\r?\n[ \t]+", b" ", header)
        kind = _TYPE.search(unfolded)
        if kind is None:
            return not _ATTACHED.search(unfolded) or is_first
        if kind[1].lower() in (b"multipart", b"message"):
            for found in _BOUNDARY.finditer(unfolded):
                if len(boundaries) < _MOST_BOUNDARIES:
                    boundaries.add(b"--" + (found[1] or found[2]).rstrip())
            return True
        return kind[1].lower() == b"text" and not _ATTACHED.search(unfolded)


# ---- headers ----------------------------------------------------------------------------------------


def _headers(parsed: Parsed, message: Message, received: str) -> None:
    notes = message.notes
    message.original_id = _header(parsed, "message-id").strip("<> ")[:500]
    message.subject = _header(parsed, "subject", notes)
    message.date = _date(parsed, received, notes)
    senders = addresses_of([_header(parsed, "from") or _header(parsed, "sender")])
    message.from_address = senders[0] if senders else ""
    message.from_name = _name(_header(parsed, "from", notes))
    message.to = _recipients(parsed, "to", notes)
    message.cc = _recipients(parsed, "cc", notes)
    labels = _header(parsed, "x-gmail-labels", notes)
    message.labels = tuple(part.strip() for part in labels.split(",") if part.strip())


def _header(parsed: Parsed, name: str, notes: set[str] | None = None) -> str:
    """A header on one line, decoded."""
    found = next((value for key, value in parsed.raw_items() if key.lower() == name), "")
    text = str(found)[:_LONGEST_HEADER]
    try:
        # RFC 2047 knows no 8-bit bytes; where they stand, they are text of some charset.
        parts = email.header.decode_header(text)
        words = [p if isinstance(p, str) else decoded(p, charset or "utf-8", notes) for p, charset in parts]
        text = "".join(words)
    except PARSER_BUGS:
        if notes is not None:
            notes.add("header that cannot be decoded")
    raw = text.encode("utf-8", "surrogateescape") if _is_escaped(text) else None
    text = decoded(raw, "utf-8", notes) if raw is not None else text
    return " ".join(clean(text).split())


def _is_escaped(text: str) -> bool:
    """Whether bytes that were no ASCII stand in it, and nothing that cannot be bytes again."""
    codes = [c for c in map(ord, text) if 0xD800 <= c <= 0xDFFF]
    return bool(codes) and all(0xDC80 <= c <= 0xDCFF for c in codes)


def addresses_of(headers: Iterable[str]) -> list[str]:
    """The addresses of headers, groups and names without an address included.

    >>> addresses_of(["Team: Ada <ada@example.com>, bob@example.com;", "undisclosed-recipients:;"])
    ['ada@example.com', 'bob@example.com']
    """
    found: dict[str, None] = {}
    for text in headers:
        try:
            given = [address for _, address in email.utils.getaddresses([text])]
        except PARSER_BUGS:
            given = []
        if any("@" in address for address in given):
            given = [address for address in given if "@" in address]  # the rest are halves of a name
        else:
            given = _ADDRESS.findall(text) or [part.strip("\"' ") for part in given]
        found |= dict.fromkeys(address.strip().lower()[:200] for address in given if address.strip(" :;"))
    return list(found)


def _recipients(parsed: Parsed, name: str, notes: set[str]) -> tuple[str, ...]:
    found = addresses_of([_header(parsed, name)])
    if len(found) > MOST_ADDRESSES:
        notes.add("recipients cut")
    return tuple(found[:MOST_ADDRESSES])


def _name(header: str) -> str:
    try:
        return email.utils.parseaddr(header)[0][:100]
    except PARSER_BUGS:
        return ""


def _date(parsed: Parsed, received: str, notes: set[str]) -> str:
    """Of the Date header; else of the last hop that received it, else of mbox's own line."""
    last_hop = _header(parsed, "received").rpartition(";")[2]
    for number, text in enumerate((_header(parsed, "date"), last_hop, received)):
        if date := read_date(text):
            if number:
                notes.add("date taken from another header")
            return date
    notes.add("date that cannot be read")
    return ""


def read_date(text: str) -> str:
    """A date of a mail, a table or ISO 8601 as ``YYYY-MM-DD HH:MM:SS`` in UTC; empty where it is none.

    >>> read_date("Mon, 14 May 2001 16:39:00 -0700 (PDT)"), read_date("2001-05-14"), read_date("soon")
    ('2001-05-14 23:39:00', '2001-05-14 00:00:00', '')
    """
    for read in (email.utils.parsedate_to_datetime, datetime.fromisoformat):
        try:
            found = read(text.strip())
            aware = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
            return f"{aware.year:04}-{aware:%m-%d %H:%M:%S}"
        except (*PARSER_BUGS, OverflowError):
            continue
    return ""


# ---- bodies -----------------------------------------------------------------------------------------


def _body(parsed: Parsed, notes: set[str]) -> str:
    """The plain text; of a message in HTML only, its visible text."""
    plain: list[str] = []
    marked_up: list[str] = []
    for part in parsed.walk():
        kind = part.get_content_type()
        if part.is_multipart() or not kind.startswith("text/") or part.get_filename():
            continue
        text = _text(part, notes)
        (marked_up if kind == "text/html" else plain).append(text)
    body = "\n\n".join(text.strip() for text in plain if text.strip())
    if not body and marked_up:
        notes.add("text taken out of HTML")
        body = "\n\n".join(filter(None, map(text_of_html, marked_up)))
    return body


def _text(part: Parsed, notes: set[str]) -> str:
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return clean(str(payload or ""))
    return clean(decoded(payload, part.get_content_charset() or "utf-8", notes)).replace("\r\n", "\n")


def decoded(data: bytes, charset: str, notes: set[str] | None = None) -> str:
    """Bytes as text: by the charset they claim, else by UTF-8, else by the Windows one, which takes all."""
    for name in (charset.strip("\"' "), "utf-8"):
        try:
            return data.decode(name)
        except (LookupError, ValueError):  # no such charset, or not of it; UnicodeError is a ValueError
            if notes is not None:
                notes.add("charset guessed")
    return data.decode("cp1252", "replace")


class _VisibleText(HTMLParser):
    """Collects what a reader would see."""

    _BLOCKS = frozenset(
        (
            "p",
            "div",
            "br",
            "tr",
            "li",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "table",
            "ul",
            "ol",
            "blockquote",
            "hr",
        )
    )
    _UNSEEN = frozenset(("script", "style", "head", "title", "template", "noscript", "svg"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._unseen: str | None = None
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._unseen is None and tag in self._UNSEEN:
            self._unseen, self._depth = tag, 1
        elif tag == self._unseen:
            self._depth += 1
        elif tag in ("td", "th"):
            self.parts.append(" ")
        elif tag in self._BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._unseen:
            self._depth -= 1
            self._unseen = self._unseen if self._depth else None
        elif tag in self._BLOCKS:
            self.parts.append("\n")
        if self._unseen == "head" and tag == "html":
            self._unseen = None

    def handle_data(self, data: str) -> None:
        if self._unseen is None:
            self.parts.append(data)


def text_of_html(text: str) -> str:
    """The visible text of HTML; scripts, styles and markup are gone, nothing is loaded.

    >>> text_of_html("<style>p{}</style><p>The vests<br>cost &#36;5</p><script>alert(1)</script>")
    'The vests\\ncost $5'
    """
    parser = _VisibleText()
    try:
        parser.feed(text[:MOST_HTML_CHARACTERS])
        parser.close()
    except (*PARSER_BUGS, AssertionError):  # a declaration that it does not know: the rest without its tags
        parser.parts.append(re.sub(r"<[^>]*>", " ", parser.rawdata))
    lines = [" ".join(line.split()) for line in "".join(parser.parts).splitlines()]
    return clean(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip())
