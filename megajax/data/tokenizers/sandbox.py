"""A jinja2 environment for templates of strangers: compiling computes nothing, and rendering ends soon.

Every loop, call, filter, operator and output takes from the budget of its rendering what it makes, if possible before
it makes it. What takes from no budget (comparing, slicing) is as fast as what exists is small, and a clock ends loops
over it.
"""

import contextlib
import contextvars
import functools
import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MOST_SOURCE = 1 << 20  # characters of a template
MOST_OPERATIONS = 1 << 22  # of one rendering; a conversation needs tens per message
OPERATION_CHARACTERS = 64  # are made in the time of one operation
MOST_SECONDS = 20.0  # of one rendering
MOST_SIZE = 1 << 26  # characters of a list when it is written
MOST_BITS = 4096  # of a number
MOST_WIDTH = 10_000  # of a number that says how much a filter makes
# Names that no template can use.
COUNTED = "<counted>"
MADE = "<made>"
UNNEEDED_FILTERS = ("pprint", "random", "urlize", "xmlattr")
UNNEEDED_METHODS = ("encode", "translate", "maketrans", "to_bytes")
WIDE_FORMAT = re.compile(r"%[-+ #0\d.]*(\*|\d{5})")
WIDE_FIELD = re.compile(r"\{[^{}]*(\{|\d{5})")


class TooMuch(Exception):
    """A template would compute for too long, or make too much."""


class _Budget:
    """What is left of one rendering."""

    def __init__(self, operations: float, seconds: float):
        self._left = operations
        self._end = time.monotonic() + seconds
        # id of a list that the template has made -> (the list, its size): one may contain another many times
        self._sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, operations: float) -> None:
        """Raises TooMuch if not as many are left."""
        self._left -= operations
        if self._left < 0:
            raise TooMuch("the template computes or writes too much")
        if time.monotonic() > self._end:
            raise TooMuch(f"the template takes longer than {MOST_SECONDS:g} seconds")

    def size(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (list, tuple, dict, set)):
            return 1
        known = self._sizes.get(id(value))
        if known is None:
            parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            known = value, len(parts) + sum(map(self.size, parts))
            if known[1] > MOST_SIZE:
                raise TooMuch("a list of the template holds too much")
            self._sizes[id(value)] = known
        return known[1]


_current: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")
_UNLIMITED = _Budget(math.inf, math.inf)  # outside of a rendering


@contextlib.contextmanager
def limited() -> Generator[None]:
    """What is rendered inside has one budget."""
    token = _current.set(_Budget(MOST_OPERATIONS, MOST_SECONDS))
    try:
        yield
    finally:
        _current.reset(token)


def spend_characters(count: int) -> None:
    """Takes `count` characters from the budget; call it before they are made. Raises TooMuch."""
    _current.get(_UNLIMITED).spend(1 + count // OPERATION_CHARACTERS)


def size(value: Any) -> int:
    """About the number of characters that writing the value needs. Raises TooMuch for more than MOST_SIZE."""
    return _current.get(_UNLIMITED).size(value)


def _made(value: Any) -> Any:
    """The value, which an operation has made."""
    if isinstance(value, str):
        spend_characters(len(value))
    elif isinstance(value, (list, tuple, dict, set)):
        _current.get(_UNLIMITED).spend(1 + len(value))
        size(value)
    else:
        spend_characters(0)
    return value


def _counted(items: Any) -> Iterable:
    """What a loop goes through."""
    if hasattr(items, "__len__"):
        _current.get(_UNLIMITED).spend(len(items))
        return items
    return _each_counted(items)


def _each_counted(items: Iterable) -> Iterator:
    for item in items:
        _current.get(_UNLIMITED).spend(1)
        yield item


@jinja2.pass_context
def _output(_, value: Any) -> str:
    """Takes the context so that jinja2 does not evaluate what a template writes when it compiles it."""
    if not isinstance(value, str):
        spend_characters(size(value))
        value = str(value)
    spend_characters(len(value))
    return value


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self, join: Callable[[Iterable], str], **options):
        """join: concatenates str() of the parts, and takes their characters from the budget."""
        super().__init__(optimized=False, finalize=_output, **options)
        self.join = join
        del self.globals["lipsum"]
        for name in UNNEEDED_FILTERS:
            del self.filters[name]
        self.filters["format"] = self._format
        self.filters["join"] = self._joined
        self.filters["tojson"] = _to_json
        self.filters |= {name: _checked(name, function) for name, function in self.filters.items()}
        self.filters[COUNTED] = _counted
        self.filters[MADE] = _made

    def from_string(self, source: str, *arguments, **options) -> jinja2.Template:
        """Raises TemplateError for what cannot be compiled."""
        if len(source) > MOST_SOURCE:
            raise jinja2.TemplateError(f"it has {len(source)} characters; at most {MOST_SOURCE} are allowed")
        try:
            return super().from_string(self.prepared(self.parse(source)), *arguments, **options)
        except jinja2.TemplateError:
            raise
        except Exception as error:  # nested too deeply for the parser, or for Python
            raise jinja2.TemplateError(f"it cannot be compiled ({type(error).__name__}: {error})") from None

    def prepared(self, tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
        """What is compiled in place of a parsed template."""
        return _Counting().visit(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_needed = not isinstance(obj, (str, int)) or attr not in UNNEEDED_METHODS
        return is_needed and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context, __obj: Any, *args, **kwargs) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = __obj.__name__
            if name == "join":
                return __self._joined(*args, d=owner)
            _spend_method(owner, name, args, kwargs)
        return _made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        for number in (left, right):
            _check_bits(number.bit_length() if isinstance(number, int) else 0)
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(items, (str, list, tuple)):
                    spend_characters((size(items) + OPERATION_CHARACTERS) * max(count, 0))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        if operator == "%" and isinstance(left, str):
            _check_width(WIDE_FORMAT, left)
            spend_characters(left.count("%") * size(right))
        return _made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is None:
            return None
        text = value.__self__

        def formatted(*args, **kwargs) -> str:
            _check_width(WIDE_FIELD, text.replace("{{", "").replace("}}", ""))
            spend_characters(text.count("{") * (size(args) + size(kwargs)))
            return function(*args, **kwargs)

        return functools.update_wrapper(formatted, value)

    def _format(self, text: Any, *args, **kwargs) -> str:
        return self.call_binop(None, "%", str(text), kwargs or args)

    def _joined(self, items: Iterable, d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            items = map(jinja2.filters.make_attrgetter(self, attribute), items)
        between = [piece for item in _counted(items) for piece in (d, item)]
        return self.join(between[1:])


class _Counting(jinja2.visitor.NodeTransformer):
    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = filtered(node.iter, COUNTED)
        return node

    def _make(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"  # of an assignment
        return node if is_target or node.find(jinja2.nodes.Name) is None else filtered(node, MADE)

    visit_List = visit_Tuple = visit_Dict = _make


def filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_bits(count: int) -> None:
    if count > MOST_BITS:
        raise TooMuch(f"a number has more than {MOST_BITS} bits")


def _check_width(pattern: re.Pattern, text: str) -> None:
    if pattern.search(text):
        raise TooMuch("a format gives a width of five digits or more, or takes it from a variable")


def _spend_method(owner: str, name: str, args: tuple, kwargs: dict) -> None:
    """What a method of str makes that can be much larger than its text."""
    number = next((value for value in (*args, *kwargs.values()) if isinstance(value, int)), 0)
    if name in ("center", "ljust", "rjust", "zfill"):
        spend_characters(number)
    if name == "expandtabs":
        spend_characters(owner.count("\t") * number)
    if name == "replace":
        _spend_replaced(owner, *args)


def _spend_replaced(text: str, old: Any = "", new: Any = "", *_) -> None:
    spend_characters(text.count(old) * len(new) if isinstance(old, str) and isinstance(new, str) else 0)


def _checked(name: str, function: Callable) -> Callable:
    """The filter, whose result is taken from the budget."""
    first = int(hasattr(function, "jinja_pass_arg"))  # where its value is

    @functools.wraps(function)
    def checked(*args, **kwargs):
        value, *given = args[first:]
        given += kwargs.values()
        if any(isinstance(each, int) and abs(each) > MOST_WIDTH for each in given) and name not in ("d", "default"):
            raise TooMuch(f"the filter {name} is called with a number above {MOST_WIDTH}")
        if name == "replace":
            _spend_replaced(str(value), *given)
        if name in ("indent", "wordwrap"):  # they add something to each line
            added = sum(each if isinstance(each, int) else size(each) for each in given)
            num_lines = len(str(value)) if name == "wordwrap" and len(given) > 1 else str(value).count("\n")
            spend_characters(num_lines * added)
        return _made(function(*args, **kwargs))

    return checked


def _to_json(value: Any, **options: Any) -> str:
    """The filter of jinja2 escapes for HTML."""
    options.setdefault("ensure_ascii", False)
    spend_characters(size(value))
    parts = []
    for part in json.JSONEncoder(**options).iterencode(value):
        spend_characters(len(part))
        parts.append(part)
    return "".join(parts)
