"""Which characters of a rendered template the template has written itself, and which come from what it was given."""

from collections.abc import Iterable

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

# Names that no template can spell.
LITERAL = "<literal>"
JOIN = "<join>"


class Text(str):
    """Text with, for each character, whether the template has written it: `written`, 1 or 0, a byte each.

    Adding, joining, slicing and stripping keep this. All other operations of str give a plain str, which counts as not
    written by the template: losing the mark errs on the safe side.
    """

    written: bytes

    def __new__(cls, text: str = "", written: bytes | None = None) -> "Text":
        """written: none of it by the template, if not given: jinja2 makes its results of this type by itself."""
        self = super().__new__(cls, text)
        self.written = bytes(len(text)) if written is None else written
        return self

    def is_written(self, begin: int, part: str) -> bool:
        """Whether the template has written all of the part that begins there."""
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
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> "Text":
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> "Text":
        return self.lstrip(chars).rstrip(chars)


def literal(text: str) -> Text:
    """Text that the template has written."""
    return Text(text, b"\1" * len(text))


def join(parts: Iterable) -> Text:
    """Parts one after the other, each as str() has it."""
    texts = [part if isinstance(part, Text) else Text(str(part)) for part in parts]
    return Text("".join(texts), b"".join(text.written for text in texts))


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates render to a Text."""

    concat = staticmethod(join)

    def __init__(self, **options):
        super().__init__(**options)
        self.filters[LITERAL] = _literal_at_run_time
        self.filters[JOIN] = join

    def from_string(self, source: str, *arguments, **options) -> jinja2.Template:
        return super().from_string(_MarkLiterals().visit(self.parse(source)), *arguments, **options)


@jinja2.pass_context
def _literal_at_run_time(_, text: str) -> Text:
    """With the context as its argument it is not computed when the template is compiled, into a plain str."""
    return literal(text)


class _MarkLiterals(jinja2.visitor.NodeTransformer):
    """Passes what stands in a template, between its tags and as texts within them, through `literal`."""

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData) -> jinja2.nodes.Node:
        return _filtered(jinja2.nodes.Const(node.data, lineno=node.lineno), LITERAL)

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:
        return _filtered(node, LITERAL) if isinstance(node.value, str) else node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(jinja2.nodes.List(node.nodes, lineno=node.lineno), JOIN)


def _filtered(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
