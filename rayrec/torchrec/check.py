"""Finds what a program uses of TorchRec that is missing here or works differently. The program is parsed, not run."""

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
    """Something of TorchRec that a program uses and that is missing or works differently.

    Args:
        lines: where the program uses it.
        name: as TorchRec calls it, `torchrec.distributed.comm_ops`.
        missing: using it raises an error; otherwise it works differently.
        text: what to use instead, or what differs.
    """

    lines: tuple[int, ...]
    name: str
    missing: bool
    text: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The findings in a program, by line, and how many names of TorchRec it uses."""

    findings: tuple[Finding, ...]
    num_names: int


class Missing(Exception):
    """A name of TorchRec that rayrec.torchrec does not have."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.text = name, text


def check(path: str | Path) -> Checked:
    """Checks one program.

    Args:
        path: of a Python file that imports `torchrec` or `rayrec.torchrec`.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: it is not a Python program.
    """
    reader = _Reader()
    reader.visit(ast.parse(Path(path).read_bytes(), filename=str(path)))
    known = tuple(_targets())
    found: dict[tuple[str, bool, str], set[int]] = defaultdict(set)
    names: set[str] = set()
    for line, name, keywords in reader.uses():
        names.add(name)
        for missing, what, text in _judge(name, keywords, known):
            found[what, missing, text].add(line)
    findings = (Finding(tuple(sorted(lines)), what, missing, text) for (what, missing, text), lines in found.items())
    return Checked(tuple(sorted(findings)), len(names))


def resolve(name: str) -> Any:
    """The object that a dotted name of TorchRec stands for in rayrec.torchrec.

    Raises:
        Missing: there is none; its text says what to use.
    """
    here, done = importlib.import_module(TARGET), ALIAS
    for part in name.split(".")[1:]:
        try:
            here = _child(here, part)
        except NotOffered as error:
            raise Missing(f"{done}.{part}", str(error).partition(": ")[2]) from None
        except (AttributeError, ModuleNotFoundError):
            if not isinstance(here, ModuleType | type):
                return here  # an attribute of an object, which only a run can know
            near = get_close_matches(part, [item for item in dir(here) if not item.startswith("_")], n=1)
            also = f"; did you mean {near[0]}?" if near else ""
            text = "private in TorchRec; use a public name" if part.startswith("_") else f"no such name in {done}{also}"
            raise Missing(f"{done}.{part}", text) from None
        done += f".{part}"
    return here


def _child(here: Any, part: str) -> Any:
    if not isinstance(here, ModuleType):
        return getattr(here, part)
    try:
        return getattr(here, part)
    except NotOffered:
        raise
    except AttributeError:
        return importlib.import_module(f"{here.__name__}.{part}")


def _targets() -> Iterator[tuple[Any, str, str, str]]:
    """Of each difference: the class or function, the member or "", the argument or "", the text."""
    for what, text in DIFFERENCES:
        path, _, argument = what.removesuffix(")").partition("(")
        owner, _, member = path.rpartition(".")
        home = resolve(f"{ALIAS}.{owner}")
        if isinstance(home, ModuleType):
            yield getattr(home, member), "", argument, text
        else:
            yield home, member, "", text


def _judge(
    name: str, keywords: tuple[str, ...] | None, known: tuple[tuple[Any, str, str, str], ...]
) -> Iterator[tuple[bool, str, str]]:
    """(missing, what, text) of one use; `keywords` where it is a call."""
    try:
        found = resolve(name)
        owner = resolve(name.rpartition(".")[0]) if "." in name else None
    except Missing as error:
        yield True, error.name, error.text
        return
    member = name.rpartition(".")[2]
    for target, attribute, argument, text in known:
        if attribute:
            if attribute == member and isinstance(owner, type) and issubclass(owner, target):
                yield False, name, text
        elif found is target and (not argument or argument in (keywords or ())):
            yield False, f"{name}({argument}=…)" if argument else name, text
    for keyword in keywords or ():
        if not _takes(found, keyword):
            yield True, f"{name}({keyword}=…)", "the argument is not offered; leave it out"


def _takes(target: Any, keyword: str) -> bool:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(item.kind is item.VAR_KEYWORD or item.name == keyword for item in parameters)


class _Reader(ast.NodeVisitor):
    """Collects the names of TorchRec in a program: imports, dotted names, calls, and members of variables of which the
    class is visible (`kjt: KeyedJaggedTensor`, `kjt = KeyedJaggedTensor(…)`)."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # a name of the program → TorchRec's
        self._classes: dict[str, str] = {}  # a variable (`x`, `self.x`) → TorchRec's name of its class
        self._imported: list[tuple[int, str]] = []
        self._nodes: list[ast.Attribute | ast.Name] = []
        self._calls: dict[int, tuple[str, ...]] = {}  # id of a called node → its keywords

    def uses(self) -> Iterator[tuple[int, str, tuple[str, ...] | None]]:
        """(line, TorchRec's name, keywords of a call or None)."""
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
        if isinstance(node.value, ast.Call) and (made := self._made_by(node.value)) is not None:
            self._classes |= {name: made for target in node.targets if (name := _dotted(target))}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._annotated(_dotted(node.target), node.annotation)

    def visit_arg(self, node: ast.arg) -> None:
        self.generic_visit(node)
        self._annotated(node.arg, node.annotation)

    def _annotated(self, variable: str, annotation: ast.expr | None) -> None:
        if annotation is not None and (name := self._torchrec_name(annotation)) is not None:
            self._classes[variable] = name

    def _made_by(self, call: ast.Call) -> str | None:
        """TorchRec's name of the class that a call makes an object of: `Class(…)` or `Class.from_…(…)`."""
        name = self._torchrec_name(_bare(call.func)) or ""
        made = name.rpartition(".")[0] if name.rpartition(".")[2].startswith("from_") else name
        try:
            return made if made and isinstance(resolve(made), type) else None
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
        """A member that the class has; one that only an object has is no name of TorchRec's."""
        try:
            return f"{cls}.{member}" if hasattr(resolve(cls), member) else None
        except Missing:
            return None


def _as_torchrec(module: str) -> str | None:
    """`torchrec.x` for `torchrec.x` and `rayrec.torchrec.x`; None for other modules."""
    name = module.removeprefix("rayrec.")
    return name if name == ALIAS or name.startswith(f"{ALIAS}.") else None


def _bare(node: ast.expr) -> ast.expr:
    """`Class` of `Class[In, Out]`."""
    return node.value if isinstance(node, ast.Subscript) else node


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or a chain of attributes; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def report(path: str | Path, checked: Checked) -> str:
    """The findings as text: missing names first, then differences, each with its lines."""
    missing = [item for item in checked.findings if item.missing]
    differ = [item for item in checked.findings if not item.missing]
    head = f"{path}: uses {checked.num_names} names of torchrec: {len(missing)} missing, {len(differ)} differences"
    out = [head]
    for title, items in (("missing", missing), ("works differently", differ)):
        if items:
            out += ["", title]
            for item in items:
                lines = ", ".join(map(str, item.lines))
                out += [f"  line{'s' * (len(item.lines) > 1)} {lines}: {item.name}", f"      {item.text}"]
    return "\n".join(out)
