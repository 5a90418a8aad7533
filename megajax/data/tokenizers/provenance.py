"""Tracks which characters of a rendered template come from the template itself, and which from its variables."""

from collections.abc import Iterable

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.visitor

from megajax.data.tokenizers.sandbox import Sandbox, filtered, size, spend_characters

# Names that no template can use.
LITERAL = "<literal>"
JOIN = "<join>"


class Text(str):
    """Text with a flag per character, whether the template has written it: `written`, bytes of 1 or 0.

    Adding, joining, slicing and stripping keep the flags. All other operations of str return a plain str, which counts
    as not written by the template: losing the flags is safe.
    """

    written: bytes

    def __new__(cls, text: str = "", written: bytes | None = None) -> "Text":
        """written: None: not written by the template; jinja2 constructs its results without this argument."""
        self = super().__new__(cls, text)
        self.written = bytes(len(text)) if written is None else written
        return self

    def is_written(self, begin: int, part: str) -> bool:
        """Whether the template has written all of `part`, which begins at `begin`."""
        return 0 not in self.written[begin : begin + len(part)]

    def __str__(self) -> "Text":
        return self

    def __add__(self, other: str) -> "Text":
        return join([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "Text":
        return join([other, self]) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key) -> str:
        found = super().__getitem__(key)
        return Text(found, self.written[key]) if isinstance(key, slice) else found

    def join(self, parts: Iterable) -> "Text":
        between = [piece for part in parts for piece in (self, part)]
        return join(between[1:])

    def lstrip(self, chars: str | None = None) -> "Text":
        found = super().lstrip(chars)
        return Text(found, self.written[len(self) - len(found) :])

    def rstrip(self, chars: str | None = None) -> "Text":
        found = super().rstrip(chars)
        return Text(found, self.written[: len(found)])

    def strip(self, chars: str | None = None) -> "Text":
        return self.lstrip(chars).rstrip(chars)


def literal(text: str) -> Text:
    """Text that the template has written."""
    return Text(text, b"\1" * len(text))


def join(parts: Iterable) -> Text:
    """Concatenates str() of the parts."""
    parts = list(parts)
    spend_characters(sum(map(size, parts)))
    texts = [part if isinstance(part, Text) else Text(str(part)) for part in parts]
    return Text("".join(texts), b"".join(text.written for text in texts))


class Generation(jinja2.ext.Extension):
    """The tags `{% generation %}` and `{% endgeneration %}`, with which Hugging Face templates mark answers, write
    nothing: `ChatTemplate.spans` finds the answers of all templates."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(Sandbox):
    """A sandbox whose templates render to a Text."""

    concat = staticmethod(join)  # pyrefly: ignore[bad-override]: of an overload for LiteralString

    def __init__(self, **options):
        super().__init__(join, **options)
        self.filters[LITERAL] = _literal_at_run_time
        self.filters[JOIN] = join

    def prepared(self, tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
        return super().prepared(_MarkLiterals().visit(tree))


@jinja2.pass_context
def _literal_at_run_time(_, text: str) -> Text:
    """Takes the context so that jinja2 does not evaluate it at compile time, which would give a plain str."""
    return literal(text)


class _MarkLiterals(jinja2.visitor.NodeTransformer):
    """Passes the text of a template, outside tags and in string constants, through `literal`."""

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Node:
        return filtered(jinja2.nodes.Const(node.data, lineno=node.lineno), LITERAL)

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:
        return filtered(node, LITERAL) if isinstance(node.value, str) else node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), JOIN)
