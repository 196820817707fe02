"""What do hostile texts look like, and what may a page hold that shows them?

A model, a tool, a user or another's run may have written any text that artnb shows. PAYLOADS are texts that
try to run, to close what surrounds them, or to hide; a page in which one of them ran has ``window.HURT``.
"""

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser

HURT = "window.HURT=(window.HURT||0)+1"

PAYLOADS = {
    "script": f"<script>{HURT}</script>",
    "image": f'<img src=x onerror="{HURT}">',
    "svg": f"<svg/onload={HURT}><animate onbegin={HURT} attributeName=x dur=1s>",
    "style": f"<style>*{{display:none}}</style><link rel=stylesheet href=//evil.invalid/a onerror={HURT}>",
    "double quotes": f'" onmouseover="{HURT}" autofocus onfocus="{HURT}" x="',
    "single quotes": f"' onmouseover='{HURT}' autofocus onfocus='{HURT}' x='",
    "backticks": f"` onmouseover=`{HURT}` autofocus onfocus=`{HURT}`",
    "closes what is open": (
        "</td></tr></table></pre></summary></details></textarea></title></style></script>"
        f"<script>{HURT}</script>"
    ),
    "comment": f"--><script>{HURT}</script><!-- -->",
    "cdata": f"]]><script>{HURT}</script><![CDATA[",
    "half a tag": f'<img src="x" onerror="{HURT}" ',
    "link": (
        f"<a href=\"javascript:{HURT}\">click</a> <a href='data:text/html,<script>{HURT}</script>'>here</a>"
    ),
    "frame": f"<iframe srcdoc='<script>parent.{HURT}</script>'></iframe><object data=javascript:{HURT}>",
    "form": f"<form action=javascript:{HURT}><button formaction=javascript:{HURT}>ok</button></form>",
    "base": "<base href=//evil.invalid/><meta http-equiv=refresh content='0;url=//evil.invalid'>",
    "markdown": (
        f'[click](javascript:{HURT}) ![x](x"onerror="{HURT}) **bold** | a | b |\n|---|---|\n```html\n<b>\n```'
    ),
    "latex": (
        rf"$\href{{javascript:{HURT}}}{{x}}$ \(\unicode[some-font;{HURT}]{{x3c}}\) $$\require{{html}}$$"
    ),
    "template": f"{{{{constructor.constructor('{HURT}')()}}}} ${{{HURT}}} {{%raw%}} <%= 1 %> #{{7*7}}",
    "entities": f"&lt;script&gt;{HURT}&lt;/script&gt; &#60;b&#62; &amp;amp; &quot; &nbsp;",
    "escapes": rf"\u003cscript\u003e{HURT}\u003c/script\u003e \x3cb\x3e \74b\76",
    "broken script": f"<scr\x00ipt>{HURT}</scr\x00ipt><script\x0b>{HURT}</script\n>",
    "namespace": (
        f"<math><mtext><table><mglyph><style><img src=x onerror={HURT}></style></mglyph></table>"
        "</mtext></math>"
    ),
    "details": f"<details open ontoggle={HURT}><summary>x</summary></details><marquee onstart={HURT}>",
    "terminal": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[8mhid\x1b[0m \x9b2J over\rwritten b\x08ack \x7f",
    "bidi": "user\u202ecod.exe \u2066isolated\u2069 \u200fmark \u061c",
    "invisible": (
        "zero\u200bwidth \u00adsoft \u2060joined \ufeffmark \U000e0041\U000e0042tags"
        " \u2028line \u2029paragraph"
    ),
    "surrogates": "lone \ud83d here and \ude00 there",
    "nonsense": "\ufffe \uffff \ufffd \U0010ffff 👩‍👩‍👧 é ß 你好 \u202e",
    "keys": "__proto__ constructor toString hasOwnProperty",
}

HUGE = "<b>large &amp; long</b> " * 450_000
"""10 MB."""

_STRUCTURE = {
    *(
        "div",
        "span",
        "b",
        "i",
        "em",
        "strong",
        "small",
        "code",
        "pre",
        "p",
        "br",
        "hr",
        "h1",
        "h2",
        "h3",
        "h4",
    ),
    *("table", "thead", "tbody", "tfoot", "caption", "tr", "th", "td", "details", "summary", "progress"),
    *(
        "ul",
        "ol",
        "li",
        "dl",
        "dt",
        "dd",
        "section",
        "article",
        "header",
        "footer",
        "main",
        "nav",
        "figure",
        "figcaption",
    ),
    *(
        "svg",
        "g",
        "path",
        "polyline",
        "polygon",
        "line",
        "rect",
        "circle",
        "text",
        "tspan",
        "title",
        "desc",
        "img",
        "a",
    ),
}
_PAGE = {"html", "head", "body", "meta", "style"}
_ATTRIBUTES = {
    *(
        "style",
        "class",
        "id",
        "title",
        "role",
        "lang",
        "open",
        "value",
        "max",
        "colspan",
        "rowspan",
        "scope",
        "alt",
    ),
    *("href", "src", "charset", "name", "content", "http-equiv", "border", "align", "tabindex", "datetime"),
    *("xmlns", "viewbox", "width", "height", "fill", "stroke", "stroke-width", "stroke-dasharray", "opacity"),
    *(
        "fill-opacity",
        "stroke-opacity",
        "stroke-linejoin",
        "stroke-linecap",
        "d",
        "points",
        "transform",
        "x",
        "y",
    ),
    *(
        "x1",
        "x2",
        "y1",
        "y2",
        "cx",
        "cy",
        "r",
        "rx",
        "ry",
        "dx",
        "dy",
        "text-anchor",
        "font-size",
        "font-family",
    ),
    *("font-weight", "dominant-baseline", "preserveaspectratio", "vector-effect", "clip-path"),
}
_VOID = {"br", "hr", "img", "meta"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _STRUCTURE | _PAGE:
            self.wrong.append(f"<{tag}>")
        for name, value in attrs:
            self._check(tag, name, value or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def _check(self, tag: str, name: str, value: str) -> None:
        is_known = name in _ATTRIBUTES or name.startswith(("aria-", "data-"))
        if not is_known or name.startswith("on"):
            self.wrong.append(f"{tag} {name}={value[:60]!r}")
        if name == "href" and not value.startswith("#"):
            self.wrong.append(f"a link to {value[:60]!r}")
        if name == "src" and not value.startswith("data:image/png;base64,"):
            self.wrong.append(f"a source {value[:60]!r}")
        if name == "style" and re.search(r"url\(|expression|@import|[<>]", value):
            self.wrong.append(f"a style {value[:60]!r}")
        if name in ("id", "name") and "HURT" in value:
            self.wrong.append(f"{name}={value[:60]!r}")  # a name that scripts of the page may trip over

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"a comment {data[:60]!r}")

    def unknown_decl(self, data: str) -> None:
        self.wrong.append(f"a declaration {data[:60]!r}")

    def handle_pi(self, data: str) -> None:
        self.wrong.append(f"an instruction {data[:60]!r}")


def is_hidden(character: str) -> bool:
    """A character that shows nothing, or changes how its neighbours are shown."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in "\n\t\u200d\ufe0f"


def problems(html: str) -> list[str]:
    """Everything in a piece of HTML or a page of ours that has no place there."""
    reader = _Reader()
    reader.feed(html.removeprefix("<!DOCTYPE html>"))
    reader.close()
    hidden = {f"U+{ord(c):04X}" for c in html if is_hidden(c)}
    return [
        *reader.wrong,
        *(f"never closed: {tag}" for tag in reader.open),
        *(f"a raw {c}" for c in sorted(hidden)),
    ]


def text_of(html: str) -> str:
    """What a page shows, without its markup."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return "".join(reader.text)


def pieces(payload: str) -> list[str]:
    """What of a payload must be readable wherever it is shown: what hidden characters and spaces leave."""
    parts = "".join(" " if is_hidden(c) or c in "\u200d\ufe0f" else c for c in payload)
    return [part for part in re.split(r"\s+", parts) if part]


def unseen(payload: str, shown: str) -> list[str]:
    """Pieces of a payload that a text does not show."""
    return [piece for piece in pieces(payload) if piece not in shown]
