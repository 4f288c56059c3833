"""What must stay true of the package's files, whatever is added to it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit_optim
from lowbit_optim import rules
from lowbit_optim.layout import LowBitOptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lowbit_optim"
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("**/*.py")) if path.stem != "__init__"}

#: Modules by floor; some are not there yet.
FLOORS = (
    ("rules", "formats", "maps", "weights", "state", "state_ops", "slots", "window", "noise", "tables"),
    ("dispatch", "sharding", "hyper", "layout", "step", "trace", "simplify", "expressions", "emit", "native"),
    ("engine", "checkpoint", "peers", "sources", "convert", "stepping", "in_backward", "offload"),
    ("optimizers",),
    ("presets", "planner", "diagnose", "shapes", "files", "doctor"),
    ("cli", "__main__", "torchtune", "torchtitan"),
)
#: What a module may import besides the standard library and torch, where it is installed.
OPTIONAL = {
    "dispatch": {"triton"},
    "cli": {"typer", "rich"},
    "torchtune": {"torchtune"},
    "torchtitan": {"torchtitan"},
}
FLOOR = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`, which never run."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def imports(module: str, running: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (module of this package, "") and (other module, its top-level name) for each import."""
    tree = parsed(module)
    skipped = only_for_types(tree) if running else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module), str(node.module).split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                yield str(name), ""


def inner_imports(module: str, running: bool = False) -> set[str]:
    return {name.removeprefix("lowbit_optim.") for name, top in imports(module, running) if top in ("", "lowbit_optim")}


@pytest.mark.parametrize("module", MODULES)
def test_structure_imports_point_down(module: str) -> None:
    assert module in FLOOR, f"{module}.py stands on no floor: give it one"
    climbing = {name for name in inner_imports(module) if FLOOR.get(name, 99) > FLOOR[module]}
    assert climbing == set()


def test_structure_has_no_import_cycles() -> None:
    left = {module: inner_imports(module, running=True) & MODULES.keys() for module in MODULES}
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert left == {}


@pytest.mark.parametrize("module", MODULES)
def test_structure_depends_on_torch_only(module: str) -> None:
    # torch itself depends on typing_extensions.
    allowed = sys.stdlib_module_names | {"torch", "typing_extensions", "lowbit_optim", ""}
    assert {top for _, top in imports(module)} - allowed - OPTIONAL.get(module, set()) == set()


@pytest.mark.parametrize("module", MODULES)
def test_structure_only_sharding_imports_dtensor(module: str) -> None:
    if module != "sharding":
        assert not {name for name, _ in imports(module) if name.startswith("torch.distributed")}


@pytest.mark.parametrize("module", MODULES)
def test_structure_only_files_knows_of_distributed_checkpoint(module: str) -> None:
    if module != "files":
        assert not any("distributed.checkpoint" in word for word in words(parsed(module)))


def test_structure_library_does_not_need_the_command_line() -> None:
    importing = {module for module in MODULES if inner_imports(module) & {"cli", "__main__"}}
    assert importing == set()


def words(tree: ast.Module) -> Iterator[str]:
    """Names and strings of the code; comments and docstrings may mention anything."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    docstrings |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value
        yield from (
            str(getattr(node, field)) for field in ("id", "attr", "name", "module", "arg") if hasattr(node, field)
        )


@pytest.mark.parametrize("module", MODULES)
def test_structure_only_dispatch_knows_of_triton(module: str) -> None:
    knows = any("triton" in word.lower() for word in words(parsed(module)))
    assert knows == (module == "dispatch")


def test_structure_kernels_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_structure_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    "rule", [rule for rule in vars(rules).values() if isinstance(rule, rules.UpdateRule)], ids=lambda r: r.name
)
def test_structure_update_rules_are_short(rule: rules.UpdateRule) -> None:
    lines = inspect.getsource(rule.update).splitlines()
    assert len([line for line in lines if not line.startswith("@")]) <= 15


# Importing -----------------------------------------------------------------------------------------------------------


def test_structure_import_is_quiet_and_light() -> None:
    code = (
        "import json, sys, torch\n"
        "before, threads = set(sys.modules), torch.get_num_threads()\n"
        "state = torch.get_rng_state()\n"
        "import lowbit_optim\n"
        "assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)\n"
        "json.dump(sorted(set(sys.modules) - before), sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    tops = {name.split(".")[0] for name in json.loads(done.stdout)}
    # Neither Dynamo nor Inductor, nor anything else that torch had not loaded.
    assert tops - sys.stdlib_module_names == {"lowbit_optim"}


# Public names --------------------------------------------------------------------------------------------------------

PUBLIC = """
PRESETS SGD Adam Adam4bit Adam8bit AdamFp8 AdamW AdamW4bit AdamW8bit AdamWBf16SR AdamWFp8 Lion Lion4bit Lion8bit
CPUOffloadOptimizer LowBitOptimizer LowBitOptions Plan Preset QuantizedState SGD8bit convert_state_dict diagnose
from_preset param_policy plan step_in_backward stochastic_round
"""


def test_structure_public_names_are_these() -> None:  # A9
    assert sorted(lowbit_optim.__all__) == sorted(PUBLIC.split())
    assert len(set(lowbit_optim.__all__)) == len(lowbit_optim.__all__)
    assert all(hasattr(lowbit_optim, name) for name in lowbit_optim.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", lowbit_optim.__version__)


SIGNATURES = {
    "AdamW": "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, *, amsgrad=False, maximize=False, "
    "**options)",
    "Adam": "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, *, amsgrad=False, maximize=False, "
    "**options)",
    "Lion": "(params, lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False, **options)",
    "SGD": "(params, lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *, maximize=False, "
    "**options)",
    "convert_state_dict": "(sd, to, *, format=None)",
    "from_preset": "(params, preset='balanced', optimizer='adamw', lr=None, **kwargs)",
    "param_policy": "(model, rules=None, *, embeddings=None)",
    "plan": "(model_or_params, preset='balanced', world_size=1, optimizer='adamw', **kwargs)",
    "stochastic_round": "(x, seed, offset=0, dtype=torch.bfloat16)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_structure_signatures_are_these(name: str) -> None:  # A9
    signature = inspect.signature(getattr(lowbit_optim, name))
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


@pytest.mark.parametrize("name", [name for name in PUBLIC.split() if inspect.isclass(getattr(lowbit_optim, name))])
def test_structure_defaults_are_plain_values(name: str) -> None:
    # Tools that read signatures, such as LightningCLI, write defaults to configs and pass on what they read there.
    thing = getattr(lowbit_optim, name)
    if issubclass(thing, torch.optim.Optimizer):
        for parameter in inspect.signature(thing).parameters.values():
            if parameter.default is not parameter.empty:
                json.dumps(parameter.default)


def test_structure_options_of_every_optimizer_are_these() -> None:  # A9
    names = "state weights preset seed backend min_quantized_numel skip_nonfinite foreach fused"
    assert sorted(LowBitOptions.__annotations__) == sorted(names.split())


def section(text: str, title: str) -> list[str]:
    """Names that a section of a Google docstring explains."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", inspect.cleandoc(text), re.MULTILINE)
    entries = re.findall(r"^    (\S[^:]*):", found[1] if found else "", re.MULTILINE)
    return [name.strip() for entry in entries for name in entry.split(",")]


CLASSES = [name for name in lowbit_optim.__all__ if inspect.isclass(getattr(lowbit_optim, name))]
FUNCTIONS = [name for name in lowbit_optim.__all__ if inspect.isfunction(getattr(lowbit_optim, name))]


def parameters_of(function: Callable[..., Any]) -> list[str]:
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return [stars.get(parameter.kind, "") + name for name, parameter in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_structure_docstrings_explain_every_argument(name: str) -> None:
    thing = getattr(lowbit_optim, name)
    doc = inspect.cleandoc(thing.__doc__ or "")
    if "Same arguments." in doc:
        thing = thing.__mro__[1]
        assert f"`{thing.__name__}`" in doc
        doc = inspect.cleandoc(thing.__doc__)
    explained = section(doc, "Args") or section(doc, "Attributes")
    if name == "LowBitOptions":
        assert sorted(explained) == sorted(LowBitOptions.__annotations__)
    else:
        assert explained == parameters_of(thing)


@pytest.mark.parametrize("name", CLASSES)
def test_structure_public_methods_are_documented(name: str) -> None:
    for attribute, member in vars(getattr(lowbit_optim, name)).items():
        if not attribute.startswith("_") and inspect.isfunction(inspect.unwrap(getattr(member, "__func__", member))):
            doc = inspect.getdoc(getattr(getattr(lowbit_optim, name), attribute))
            assert doc, attribute
            assert doc.splitlines()[0].endswith((".", "?")), attribute
