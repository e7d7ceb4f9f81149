"""docs/api.md, from the signatures and docstrings of what engines import. Read from the source: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from docs.generate.markdown import code, prose, table

PACKAGE = Path(__file__).parents[2] / "kvsidecar"
HEAD = """\
<!-- Made by `make docs` from the docstrings of kvsidecar/client and kvsidecar/integrations: change these. -->
# Python API

What `kvsidecar-client` offers to engines. The [client guide](client.md) introduces it with a program that runs.
Anything that is not on this page is not part of the interface, and may change in any release.
"""
CONNECTORS = {
    "kvsidecar.integrations.vllm": ("integrations/vllm/connector.py", "KVSidecarConnector", "vllm.md"),
    "kvsidecar.integrations.sglang": ("integrations/sglang/linker.py", "KVSidecarLinker", "sglang.md"),
}
"""Module to name -> where its class is, the class, and the page about it. Engines call its methods, users none."""


def exported() -> dict[str, Path]:
    """Name -> file that defines it, of everything that `kvsidecar.client` exports."""
    tree = ast.parse((PACKAGE / "client" / "__init__.py").read_text())
    found: dict[str, Path] = {}
    for node in ast.walk(tree):  # some names exist on Linux only
        if isinstance(node, ast.ImportFrom) and node.module:
            path = PACKAGE.parent / (node.module.replace(".", "/") + ".py")
            found |= {alias.asname or alias.name: path for alias in node.names}
    return found


def page() -> str:
    parts = [HEAD, "## kvsidecar.client\n"]
    constants = []
    first = ("Client", "RemoteClient", "Namespace", "GroupLayout", "Region", "Blocks")
    names = exported()
    for name in [*first, *sorted(names.keys() - set(first))]:
        node, doc = _definition(names[name], name)
        if isinstance(node, ast.ClassDef):
            parts.extend(_class(node))
        elif isinstance(node, ast.FunctionDef):
            parts.extend(_function(node, "###", ""))
        else:
            constants.append((code(name), prose(doc)))
    parts += ["### Constants\n", table(("Name", "Meaning"), constants) + "\n"]
    parts.append("## kvsidecar.client.torch\n")
    tree = ast.parse((PACKAGE / "client" / "torch.py").read_text())
    parts.append(_text(ast.get_docstring(tree) or ""))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            parts.extend(_class(node))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            parts.extend(_function(node, "###", ""))
    for module, (path, name, about) in CONNECTORS.items():
        node, _ = _definition(PACKAGE / path, name)
        assert isinstance(node, ast.ClassDef)
        parts += [f"## {module}\n", f"### {name}\n", _text(ast.get_docstring(node) or "")]
        parts.append(f"Its options: [{about}]({about}).\n")
    return "\n".join(parts)


def _definition(path: Path, name: str) -> tuple[ast.stmt, str]:
    """The statement that defines a name in a file, and the string behind it."""
    body = ast.parse(path.read_text()).body
    for index, node in enumerate(body):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        named = [target.id for target in targets if isinstance(target, ast.Name)]
        if getattr(node, "name", None) == name or name in named:
            after = next((each for each in body[index + 1 :] if isinstance(each, ast.Expr)), None)
            doc = after.value.value if after is not None and isinstance(after.value, ast.Constant) else ""
            return node, str(doc)
    raise LookupError(f"{path} does not define {name}")


def _class(node: ast.ClassDef) -> Iterator[str]:
    init = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    yield f"### {node.name}\n"
    if init:
        yield f"```python\n{node.name}{_signature(init[0])}\n```\n"
    yield _text(ast.get_docstring(node) or "")
    fields = [(code(name), code(kind), text) for name, kind, text in _fields(node)]
    if fields:
        yield table(("Field", "Type", "Meaning"), fields) + "\n"
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield from _function(each, "####", node.name + ".")


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """(name, type or value, text) of the public attributes that the body of a class declares."""
    for index, each in enumerate(node.body):
        after = node.body[index + 1] if index + 1 < len(node.body) else None
        doc = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            doc = prose(str(after.value.value)).replace("\n\n", " ")
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
            kind = ast.unparse(each.annotation) + ("" if each.value is None else f" = {ast.unparse(each.value)}")
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            name, kind = each.targets[0].id, ast.unparse(each.value)
        else:
            continue
        if not name.startswith("_"):
            yield name, kind, doc


def _function(node: ast.FunctionDef, heading: str, of: str) -> Iterator[str]:
    decorators = {ast.unparse(each) for each in node.decorator_list}
    if any(each.endswith((".setter", "overload")) for each in decorators):
        return
    yield f"{heading} {of}{node.name}\n"
    if "property" in decorators:
        yield f"```python\n{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}\n```\n"
    else:
        yield f"```python\n{node.name}{_signature(node)}\n```\n"
    yield _text(ast.get_docstring(node) or "")


def _signature(node: ast.FunctionDef) -> str:
    """Of a call: without ``self``. Broken into lines where it is long."""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    if len(arguments) + len(returns) + len(node.name) < 100:
        return f"({arguments}){returns}"
    parts = re.split(r", (?=(?:\*?\*?\w+: |\*, |\*$))", arguments)
    return "(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _text(doc: str) -> str:
    """A docstring: what it says, with indented paragraphs as code, and a list for each of its sections."""
    said, *sections = re.split(r"^(Args|Raises|Returns|Yields):$", doc, flags=re.MULTILINE)
    paragraphs = filter(None, said.strip("\n").split("\n\n"))
    parts = [f"```python\n{dedent(each)}\n```" if each.startswith("    ") else prose(each) for each in paragraphs]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        parts.append(f"**{title}**")
        lists = title in ("Args", "Raises")
        entries = re.split(r"^    (?=\S)", body.strip("\n"), flags=re.MULTILINE) if lists else [body]
        items = []
        for entry in filter(str.strip, entries):
            name, colon, text = entry.partition(":")
            shown = ", ".join(code(each.strip()) for each in name.split(","))
            items.append(f"- {shown}: {prose(text)}" if colon and lists else f"- {prose(entry)}")
        parts.append("\n".join(items))
    return "\n\n".join(parts) + "\n"
