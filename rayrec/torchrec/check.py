"""Finds the names of TorchRec in a program that are missing or work differently in rayrec, without running it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rayrec.torchrec.alias import ALIAS, TARGET
from rayrec.torchrec.differences import DIFFERENCES
from rayrec.torchrec.not_offered import NotOffered


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A name of TorchRec in a program that is missing or works differently.

    Args:
        lines: lines of the program.
        name: name in TorchRec, for example `torchrec.distributed.comm_ops`.
        missing: whether using it raises an error; otherwise it works differently.
        text: the alternative, or the difference.
    """

    lines: tuple[int, ...]
    name: str
    missing: bool
    text: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The findings in a program, by line, and the number of names of TorchRec it uses."""

    findings: tuple[Finding, ...]
    num_names: int


class Missing(Exception):
    """A name of TorchRec that rayrec.torchrec lacks."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.text = name, text


def check(path: str | Path) -> Checked:
    """Checks one program.

    Args:
        path: a Python file that imports `torchrec` or `rayrec.torchrec`.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: the file is not a Python program.
    """
    reader = _Reader()
    reader.visit(ast.parse(Path(path).read_bytes(), filename=str(path)))
    differences = tuple(_targets())
    lines_by_finding: dict[tuple[str, bool, str], set[int]] = defaultdict(set)
    names: set[str] = set()
    for line, name, keywords in reader.uses():
        names.add(name)
        for missing, finding, text in _findings(name, keywords, differences):
            lines_by_finding[finding, missing, text].add(line)
    findings = (
        Finding(tuple(sorted(lines)), finding, missing, text)
        for (finding, missing, text), lines in lines_by_finding.items()
    )
    return Checked(tuple(sorted(findings)), len(names))


def resolve(name: str) -> Any:
    """Returns the object with a dotted name of TorchRec in rayrec.torchrec.

    Raises:
        Missing: no such object; the text names the alternative.
    """
    target, path = importlib.import_module(TARGET), ALIAS
    for attribute in name.split(".")[1:]:
        try:
            target = _child(target, attribute)
        except NotOffered as error:
            raise Missing(f"{path}.{attribute}", str(error).partition(": ")[2]) from None
        except (AttributeError, ModuleNotFoundError):
            if not isinstance(target, ModuleType | type):
                return target  # an attribute of an object, known only at run time
            if attribute.startswith("_"):
                text = "private in TorchRec; use a public name"
            else:
                similar = get_close_matches(attribute, [item for item in dir(target) if item[0] != "_"], n=1)
                text = f"no such name in {path}" + (f"; did you mean {similar[0]}?" if similar else "")
            raise Missing(f"{path}.{attribute}", text) from None
        path += f".{attribute}"
    return target


def _child(target: Any, attribute: str) -> Any:
    if not isinstance(target, ModuleType):
        return getattr(target, attribute)
    try:
        return getattr(target, attribute)
    except NotOffered:
        raise
    except AttributeError:
        return importlib.import_module(f"{target.__name__}.{attribute}")


def _targets() -> Iterator[tuple[Any, str, str, str]]:
    """Yields the class or function of each difference, its member or "", the argument or "", and the text."""
    for name, text in DIFFERENCES:
        path, _, argument = name.removesuffix(")").partition("(")
        owner, _, member = path.rpartition(".")
        home = resolve(f"{ALIAS}.{owner}")
        if isinstance(home, ModuleType):
            yield getattr(home, member), "", argument, text
        else:
            yield home, member, "", text


def _findings(
    name: str, keywords: tuple[str, ...] | None, differences: tuple[tuple[Any, str, str, str], ...]
) -> Iterator[tuple[bool, str, str]]:
    """Yields (missing, name, text) for one use of a name; `keywords` are those of a call."""
    try:
        used = resolve(name)
        owner = resolve(name.rpartition(".")[0]) if "." in name else None
    except Missing as error:
        yield True, error.name, error.text
        return
    member = name.rpartition(".")[2]
    for target, attribute, argument, text in differences:
        if attribute:
            if attribute == member and isinstance(owner, type) and issubclass(owner, target):
                yield False, name, text
        elif used is target and (not argument or argument in (keywords or ())):
            yield False, f"{name}({argument}=…)" if argument else name, text
    for keyword in keywords or ():
        if not _takes(used, keyword):
            yield True, f"{name}({keyword}=…)", "the argument is not supported; leave it out"


def _takes(target: Any, keyword: str) -> bool:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(item.kind is item.VAR_KEYWORD or item.name == keyword for item in parameters)


class _Reader(ast.NodeVisitor):
    """Collects the names of TorchRec in a program: imports, dotted names, calls, and members of variables of a visible
    class (`kjt: KeyedJaggedTensor`, `kjt = KeyedJaggedTensor(…)`)."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # a name of the program → TorchRec's
        self._classes: dict[str, str] = {}  # a variable (`x`, `self.x`) → TorchRec's name of its class
        self._imported: list[tuple[int, str]] = []
        self._nodes: list[ast.Attribute | ast.Name] = []
        self._calls: dict[int, tuple[str, ...]] = {}  # id of a called node → its keywords

    def uses(self) -> Iterator[tuple[int, str, tuple[str, ...] | None]]:
        """Yields (line, TorchRec's name, keywords of a call or None)."""
        yield from ((line, name, None) for line, name in self._imported)
        for node in self._nodes:
            if (name := self._torchrec_name(node)) is not None:
                yield node.lineno, name, self._calls.get(id(node))

    def visit_Import(self, node: ast.Import) -> None:
        for item in node.names:
            if (name := _as_torchrec(item.name)) is not None:
                self._imported.append((node.lineno, name))
                bound = TARGET if item.name.startswith(TARGET) else ALIAS
                self._names[item.asname or bound] = name if item.asname else ALIAS

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (module := _as_torchrec(node.module or "")) is None:
            if node.module == "rayrec" and not node.level:
                self._names |= {item.asname or item.name: ALIAS for item in node.names if item.name == ALIAS}
            return
        for item in node.names:
            name = module if item.name == "*" else f"{module}.{item.name}"
            self._imported.append((node.lineno, name))
            if item.name != "*":
                self._names[item.asname or item.name] = name

    def visit_Call(self, node: ast.Call) -> None:
        self._calls[id(_bare(node.func))] = tuple(item.arg for item in node.keywords if item.arg)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._nodes.append(node)
        if not _dotted(node):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._nodes.append(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and (class_name := self._class_of(node.value)) is not None:
            self._classes |= {name: class_name for target in node.targets if (name := _dotted(target))}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._annotated(_dotted(node.target), node.annotation)

    def visit_arg(self, node: ast.arg) -> None:
        self.generic_visit(node)
        self._annotated(node.arg, node.annotation)

    def _annotated(self, variable: str, annotation: ast.expr | None) -> None:
        if annotation is not None and (name := self._torchrec_name(annotation)) is not None:
            self._classes[variable] = name

    def _class_of(self, call: ast.Call) -> str | None:
        """Returns TorchRec's name of the class in a call `Class(…)` or `Class.from_…(…)`."""
        name = self._torchrec_name(_bare(call.func)) or ""
        class_name = name.rpartition(".")[0] if name.rpartition(".")[2].startswith("from_") else name
        try:
            return class_name if class_name and isinstance(resolve(class_name), type) else None
        except Missing:
            return None

    def _torchrec_name(self, node: ast.expr) -> str | None:
        dotted = _dotted(node)
        head = dotted
        while head:
            rest = dotted[len(head) :]
            if head in self._names and not (head in self._classes and rest):
                return self._names[head] + rest
            if head in self._classes and rest:
                return self._member(self._classes[head], rest[1:].partition(".")[0])
            head = head.rpartition(".")[0]
        return None

    def _member(self, cls: str, member: str) -> str | None:
        """Returns the name of a member of a class; None for an attribute of instances only."""
        try:
            return f"{cls}.{member}" if hasattr(resolve(cls), member) else None
        except Missing:
            return None


def _as_torchrec(module: str) -> str | None:
    """Returns `torchrec.x` for `torchrec.x` and `rayrec.torchrec.x`; None for other modules."""
    name = module.removeprefix("rayrec.")
    return name if name == ALIAS or name.startswith(f"{ALIAS}.") else None


def _bare(node: ast.expr) -> ast.expr:
    """Returns `Class` for `Class[In, Out]`."""
    return node.value if isinstance(node, ast.Subscript) else node


def _dotted(node: ast.AST) -> str:
    """Returns `a.b.c` for a name or a chain of attributes; "" otherwise."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def report(path: str | Path, checked: Checked) -> str:
    """Returns the findings as text, with lines: first missing names, then differences."""
    missing = [item for item in checked.findings if item.missing]
    different = [item for item in checked.findings if not item.missing]
    head = f"{path}: uses {checked.num_names} names of torchrec: {len(missing)} missing, {len(different)} differences"
    out = [head]
    for title, items in (("missing", missing), ("works differently", different)):
        if items:
            out += ["", title]
            for item in items:
                lines = ", ".join(map(str, item.lines))
                out += [f"  line{'s' * (len(item.lines) > 1)} {lines}: {item.name}", f"      {item.text}"]
    return "\n".join(out)
