"""SVG elements for the pictures of the README, which need no script and no font of their own."""

from __future__ import annotations

from xml.sax.saxutils import escape

INK = "#24292f"
"""Of text on a page of any colour."""

CHARACTER, BIG = 6.9, 8.4
"""Width in pixels of a character of ordinary and of large text."""

_FONTS = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
_STYLE = """text{font:11.5px %s;white-space:pre;fill:%s}
text.big{font-size:14px;font-weight:600}text.dim{fill:%s}"""

DIM_ON_WHITE, DIM_ON_BLACK, INK_ON_BLACK = "#57606a", "#8b949e", "#adbac7"

_ON_BLACK = (
    f"@media(prefers-color-scheme:dark){{text{{fill:{INK_ON_BLACK}}}"
    f"text.dim{{fill:{DIM_ON_BLACK}}}}}"
)
"""What a picture without a colour behind it adds to its style."""


def text(x: float, y: float, content: str, style: str = "") -> str:
    """A line of text that is equally wide in every monospaced font.

    Args:
        x: Left end in pixels.
        y: Base line in pixels.
        content: What to write.
        style: Names of classes: "big", "dim", or a colour of the document.
    """
    content = "".join(each if each.isprintable() else "?" for each in content)
    width = len(content) * (BIG if "big" in style.split() else CHARACTER)
    named = f' class="{style}"' if style else ""
    place = f'x="{x:.1f}" y="{y:.1f}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place}{named}>{escape(content)}</text>"


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """A rectangle with round corners in a colour of the document."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" class="{style}"/>'


def between(start: float, end: float, total: float, content: str) -> str:
    """Show elements from `start` to `end`, in the loop of `total` seconds of a document.

    Viewers that do not animate show what stays to the end of the loop.
    """
    first, last = (f"{100 * at / total:.2f}" for at in (start, end))
    steps, hidden = f"0%{{opacity:0}}{first}%{{opacity:1}}", ""
    if end < total:
        steps, hidden = f"{steps}{last}%{{opacity:0}}", ' opacity="0"'
    name = f"from{first}to{last}".replace(".", "_")
    style = f"<style>@keyframes {name}{{{steps}}}</style>"
    return f'<g{hidden} style="animation-name:{name}">{style}{content}</g>'


def document(
    width: float,
    height: float,
    title: str,
    content: str,
    colours: dict[str, str],
    ink: str,
    paper: str = "none",
    loop: float = 0,
) -> str:
    """A whole picture.

    Args:
        width: Pixels.
        height: Pixels.
        title: What a screen reader says.
        content: Its elements.
        colours: Colour of each class.
        ink: Colour of text that has no class.
        paper: Colour behind everything; "none" suits viewers with a light and a dark background.
        loop: Seconds of the loop of what moves. It begins with its last second, so that the first
            frame shows a text, and stands still for readers who asked for less motion.
    """
    dim = DIM_ON_WHITE if paper == "none" else DIM_ON_BLACK
    style = _STYLE % (_FONTS, ink, dim) + "".join(
        f"text.{name},rect.{name}{{fill:{colour}}}" for name, colour in colours.items()
    )
    style += _ON_BLACK if paper == "none" else ""
    if loop:
        style += f"g{{animation:{loop:.2f}s step-end -{loop - 1:.2f}s infinite}}"
        style += "@media(prefers-reduced-motion:reduce){g{animation:none}}"
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img"><title>{escape(title)}</title><style>{style}</style>'
        f'<rect {size} rx="8" fill="{paper}"/>{content}</svg>\n'
    )


NAMES, BARS, BAR = 130, 560, 10
"""Pixels: the names of groups, the longest bar, the height of a bar."""

Bar = tuple[str, float, str]
"""A bar's series, its value, and what is written behind it."""


def bars(groups: dict[str, list[Bar]], colours: dict[str, str], title: str) -> str:
    """A picture of groups of bars.

    Args:
        groups: The bars by the name of their group.
        colours: Colour of each series, in the order of the legend.
        title: What a screen reader says.
    """
    all_bars = [bar for group in groups.values() for bar in group]
    scale = BARS / max(value for _, value, _ in all_bars)
    styles = {name: f"s{at}" for at, name in enumerate(colours)}
    parts, x, y = [], float(NAMES), 34.0
    for name, style in styles.items():
        parts += [box(x, 8, 10, 10, style), text(x + 16, 17, name)]
        x += CHARACTER * len(name) + 44
    for name, group in groups.items():
        parts.append(text(8, y + len(group) * BAR / 2 + 4, name))
        for kind, value, label in group:
            parts.append(box(NAMES, y, scale * value, BAR - 1.5, styles[kind]))
            if label:
                parts.append(text(NAMES + scale * value + 8, y + BAR - 1, label))
            y += BAR
        y += 9
    width = NAMES + BARS + CHARACTER * (2 + max(len(label) for _, _, label in all_bars))
    styled = {styles[name]: colour for name, colour in colours.items()}
    return document(max(width, x), y, title, "".join(parts), styled, INK)
