"""The rooms and who may know whom: the table of ARCHITECTURE.md, read off the source with `ast`.

Imports count wherever they stand, inside functions and under `if TYPE_CHECKING:` too, with the one exception below.
What cannot be told from an import has a rule that can:

* service "never holds numerical code": it does not import torch, numpy, scipy or onnxruntime, except to name their
  types under `if TYPE_CHECKING:`. Pictures and numbers reach it as files, dataclasses and tables of other rooms.
* service may import worlds, the embedded default that its commands run on. Nothing else may, but benchmarks and tests.
* nothing unpickles: of the module pickle, only the name of the error that torch.load raises may be imported.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

NOTHING: frozenset[str] = frozenset()
HTTP_CLIENTS = frozenset({"requests", "httpx", "httpx2", "aiohttp", "urllib3", "urllib.request", "http"})
HTTP_SERVERS = frozenset({"starlette", "uvicorn", "fastapi", "flask", "aiohttp.web", "http.server", "socketserver"})
NUMERICAL = frozenset({"torch", "numpy", "scipy", "onnxruntime"})


@dataclass(frozen=True)
class Room:
    """What one top-level folder may import of the others, and which packages it never imports."""

    knows: frozenset[str]
    never: frozenset[str] = NOTHING
    only_as_types: frozenset[str] = NOTHING


ROOMS = {
    "engine": Room(NOTHING, never=frozenset({"bentoml", "pandas", "argparse"}) | HTTP_CLIENTS | HTTP_SERVERS),
    "export": Room(frozenset({"engine"})),
    "audit": Room(frozenset({"engine"}), never=frozenset({"bentoml"}) | HTTP_SERVERS),
    "service": Room(frozenset({"engine", "export", "audit", "worlds"}), only_as_types=NUMERICAL),
    "worlds": Room(frozenset({"engine", "audit"})),
    "benchmarks": Room(frozenset({"engine", "export", "audit", "service", "worlds"})),
    "tests": Room(frozenset({"engine", "export", "audit", "service", "worlds", "benchmarks"})),
}

VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
UNPICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})


def sources(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    )


@dataclass(frozen=True)
class Import:
    """One imported name in full, such as torch.nn.functional, and where it stands."""

    name: str
    line: int
    only_as_type: bool

    def within(self, packages: frozenset[str]) -> bool:
        return any(self.name == package or self.name.startswith(package + ".") for package in packages)


def imports(tree: ast.AST, package: str, only_as_type: bool = False) -> Iterator[Import]:
    """Yields every import under `tree`; `package` is the dotted package of the file, to resolve relative ones."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, only_as_type)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{module}.{alias.name}", node.lineno, only_as_type)
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "importlib.import_module", "__import__"}:
            if node.args and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno, only_as_type)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for child in node.body:
                yield from imports(ast.Module([child], []), package, True)
            for child in node.orelse:
                yield from imports(ast.Module([child], []), package, only_as_type)
            continue
        yield from imports(node, package, only_as_type)


def called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def trespasses(source: str, package: str) -> list[str]:
    """What a file of this package imports against the table, as `line: name` with the reason."""
    own = package.split(".")[0]
    rules = ROOMS[own]
    found = []
    for item in imports(ast.parse(source), package):
        other = item.name.split(".")[0]
        if other in ROOMS and other != own and other not in rules.knows:
            found.append(f"line {item.line}: {own} must not know {other} ({item.name})")
        elif item.within(rules.never):
            found.append(f"line {item.line}: {own} never imports {item.name}")
        elif item.within(rules.only_as_types) and not item.only_as_type:
            found.append(f"line {item.line}: {own} may import {item.name} only under TYPE_CHECKING")
    return found


def unpickling(source: str) -> list[str]:
    """Where a file could run code hidden in data: unpicklers, and loaders that fall back to one."""
    tree = ast.parse(source)
    found = [
        f"line {item.line}: import of {item.name}"
        for item in imports(tree, "")
        if item.within(UNPICKLERS) and item.name != "pickle.UnpicklingError"
    ]
    full_names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, _, rest = called(node).partition(".")
        name = ".".join(filter(None, [full_names.get(head, head), rest]))
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        if name in {"numpy.load", "numpy.lib.npyio.load"} and given.get("allow_pickle", "False") != "False":
            found.append(f"line {node.lineno}: numpy.load with allow_pickle")
        if name.endswith("read_pickle"):
            found.append(f"line {node.lineno}: {name}")
    return found


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def test_every_top_level_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_room_keeps_to_the_table(name: str) -> None:
    files = sources(name)
    assert files
    found = [
        f"{path.relative_to(ROOT)}: {why}" for path in files for why in trespasses(path.read_text(), package_of(path))
    ]
    assert not found, "\n".join(found)


def test_no_file_has_a_name_that_says_nothing() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in sources(*ROOMS)
        if VAGUE_NAMES & {part.removesuffix(".py").lstrip("_") for part in path.relative_to(ROOT).parts}
    ]
    assert not found, "\n".join(found)


def test_no_code_can_be_run_from_data() -> None:
    """Holds for the rooms; tests may write a pickle to show that it is refused."""
    found = [
        f"{path.relative_to(ROOT)}: {why}"
        for path in sources(*(set(ROOMS) - {"tests"}))
        for why in unpickling(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("engine", "import bentoml"),
        ("engine", "import pandas as pd"),
        ("engine", "from urllib.request import urlopen"),
        ("engine", "from urllib import request"),
        ("engine", "def f():\n    import argparse"),
        ("engine", "import importlib\nimportlib.import_module('audit.verdict')"),
        ("engine.runtime", "from audit import metrics"),
        ("engine", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import worlds"),
        ("export", "import audit.verdict"),
        ("export", "from service import cli"),
        ("audit", "from starlette.applications import Starlette"),
        ("audit", "from aiohttp import web"),
        ("audit", "import export"),
        ("service", "import torch"),
        ("service", "from numpy import linalg"),
        ("service.commands", "def run():\n    from torch.nn import functional"),
        ("service", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("worlds", "import service.cli"),
        ("worlds", "import benchmarks"),
    ],
)
def test_a_trespass_is_seen(package: str, source: str) -> None:
    assert len(trespasses(source, package)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("engine", "import torch\nfrom engine.errors import InputError"),
        ("engine.runtime", "from . import torch_runtime\nfrom ..errors import InputError"),
        ("engine", "from urllib.parse import quote"),
        ("audit", "import pandas\nfrom engine.errors import InputError\nimport aiohttp"),
        ("service", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("service", "def run():\n    from worlds.demo import main"),
        ("worlds", "from audit import metrics"),
    ],
)
def test_a_permitted_import_is_not_a_trespass(package: str, source: str) -> None:
    assert trespasses(source, package) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=False)",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x', weights_only=flag)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import pandas as pd\npd.read_pickle('x')",
    ],
)
def test_unpickling_is_seen(source: str) -> None:
    assert len(unpickling(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x')",
        "from safetensors.torch import load_file\nload_file('x')",
        "import json\njson.load(file)",
        "from pickle import UnpicklingError",
    ],
)
def test_safe_loading_is_not_taken_for_unpickling(source: str) -> None:
    assert unpickling(source) == []
