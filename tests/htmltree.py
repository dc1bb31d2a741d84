"""A page as a tree of elements, for tests of what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    parent: Element | None = None
    nodes: list[Element | str] = field(default_factory=list)  # elements and texts, in order

    @property
    def children(self) -> list[Element]:
        return [node for node in self.nodes if isinstance(node, Element)]

    def all(self, tag: str) -> list[Element]:
        found = [each for child in self.children for each in child.all(tag)]
        return [*([self] if tag in (self.tag, "*") else []), *found]

    def text(self) -> str:
        return "".join(node if isinstance(node, str) else node.text() for node in self.nodes)


class Tree(HTMLParser):
    """Builds elements, and insists that each is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self.here = Element("", {})
        self.feed(text)
        self.close()
        assert self.here is self.root

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, dict(attrs), self.here)
        assert len(made.attributes) == len(attrs), f"an attribute twice in {tag}"
        self.here.nodes.append(made)
        if tag not in VOID:
            self.here = made

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.here.tag == tag, f"</{tag}> closes <{self.here.tag}>"
        assert self.here.parent is not None
        self.here = self.here.parent

    def handle_data(self, data: str) -> None:
        self.here.nodes.append(data)


def in_section(root: Element, name: str) -> Element:
    (section,) = [each for each in root.all("section") if each.attributes["id"] == name]
    return section
