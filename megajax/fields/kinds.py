"""Classes of a section of a config that are chosen by its field `kind`: families of models, tasks."""

import importlib
import pkgutil


class Kinds:
    """The classes of one section, each in a file of its own; they register themselves by `add`."""

    def __init__(self, section: str, package: str, default: str):
        """package: whose modules define the classes of megajax. default: the kind of a section that names none."""
        self.section = section
        self.default = default
        self._package = package
        self._classes: dict[str, type] = {}

    def add(self, chosen: type) -> None:
        """Called once a class is made. Raises TypeError unless it has a kind of its own."""
        kind = chosen.__dict__.get("kind")
        known = self._classes.get(str(kind))
        is_other = known and (known.__module__, known.__qualname__) != (chosen.__module__, chosen.__qualname__)
        if kind is None or is_other:
            raise TypeError(f"{chosen.__qualname__} needs a unique kind: `kind: Literal[NAME] = NAME`, not {kind!r}")
        self._classes[kind] = chosen

    def all(self) -> dict[str, type]:
        """By kind, those of other packages included."""
        for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        return self._classes

    def of(self, kind: str) -> type:
        """Raises ValueError for an unknown one."""
        known = self.all()
        if kind not in known:
            raise ValueError(f"{self.section}.kind={kind} is unknown; use one of {', '.join(sorted(known))}")
        return known[kind]
