"""The shape of the code: which module may import which, and how large things may get."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dpexp

PACKAGE = Path(dpexp.__file__).parent
MAX_LINES = 300
MAX_FUNCTION_LINES = 60

# A module may import from its own layer and from those below. A new module has to be put here.
LAYERS: dict[int, list[str]] = {
    0: [
        "beacon",
        "clocks",
        "comparing",
        "env",
        "env_slurm",
        "errors",
        "texts",
        "outlets",
        "exposure",
        "extras",
        "files",
        "identity",
        "leftover",
        "provenance",
        "soundness",
        "rates",
        "records",
        "stats",
        "stragglers",
        "tolerance",
        "uncertainty",
    ],
    1: [
        "schema",
        "schema_measuring",
        "schema_workload",
        "builtin",
        "nodes",
        "config",
        "bounds",
        "claims",
        "pinning",
        "check",
        "check_device",
        "check_measuring",
        "check_sinks",
        "events",
        "events.ended",
        "events.file",
        "events.hparams",
        "events.layout",
        "extra_work",
        "hosts",
        "rounds",
        "schedule",
        "plan_notes",
        "plan",
        "repeats",
        "resuming",
        "checkpoint",
        "help_text",
        "results",
        "quick_end",
        "server",
        "slurm",
        "slurm_requests",
        "logs",
        "network",
        "stopping",
    ],
    2: [
        "device",
        "comm",
        "wire",
        "meeting",
        "disturb",
        "timing",
        "shapes",
        "arrays",
        "batches",
        "uncut",
        "collate",
        "loading",
        "streams",
        "preload",
        "feed",
        "transfer",
        "precision",
        "carried",
        "generators",
        "checkpoint_storage",
        "sensors",
        "nvml",
        "machine",
        "energy",
        "peak",
    ],
    3: [
        "datasets",
        "datasets.digits",
        "datasets.files",
        "datasets.hub",
        "datasets.random",
        "datasets.rows",
        "datasets.synthetic",
        "datasets.vision",
        "models",
        "models.cnn",
        "models.gpt",
        "models.linear",
        "models.mlp",
        "losses",
        "masking",
        "metrics",
        "build",
        "optimizers",
        "weights",
        "prepare",
        "parallel",
        "parallel.base",
        "parallel.chunks",
        "parallel.collectives",
        "parallel.ddp",
        "parallel.dp",
        "parallel.fsdp",
        "parallel.gathers",
        "parallel.hooks",
        "parallel.none",
        "parallel.replicas",
        "parallel.traffic",
        "parallel.virtual",
        "sinks",
        "sinks.base",
        "sinks.console",
        "sinks.csv",
        "sinks.facts",
        "sinks.mlflow",
        "sinks.opening",
        "sinks.tensorboard",
        "sinks.timeline",
        "sinks.wandb",
    ],
    4: [
        "assembly",
        "calibration",
        "checkpoint_state",
        "checkpointing",
        "comm_recorder",
        "comm_times",
        "pause",
        "recorder",
        "brought",
        "rows",
        "training",
        "loop",
        "reference",
        "judge",
        "parity",
        "tutorial",
        "worker",
        "rank_result",
        "failures",
        "witness",
        "lifeline",
        "memory_limit",
        "stacks",
        "beside",
        "compute",
        "tracing",
        "rank",
        "anatomy",
        "anatomy.data",
        "anatomy.dissection",
        "anatomy.memory",
        "anatomy.parts",
        "anatomy.specimen",
        "anatomy.trace",
        "anatomy.traffic",
    ],
    5: [
        "launch",
        "restarting",
        "going_on",
        "orphans",
        "agent",
        "one_queue",
        "watchdog",
        "causes",
        "batch_search",
        "gathering",
        "join",
        "composing",
        "job_config",
        "sweep_lock",
        "sweep_folder",
        "repeating",
        "serving",
        "launchers",
        "launched_cell",
        "launcher_fixes",
        "ray_cells",
        "slurm_jobs",
        "lost_cells",
        "careful",
        "searching",
        "compose",
        "cell",
        "publishing",
        "recording",
        "seats",
        "console",
        "contrast",
        "pairing",
        "sweep",
        "report",
        "report.__main__",
        "report.alternatives",
        "report.anatomy",
        "report.answers",
        "report.boards",
        "report.bars",
        "report.build",
        "report.capacity",
        "report.cells",
        "report.colors",
        "report.content",
        "report.figures",
        "report.findings",
        "report.intervals",
        "report.losses",
        "report.markdown",
        "report.markup",
        "report.numbers",
        "report.page",
        "report.parity",
        "report.pictures",
        "report.reading",
        "report.remarks",
        "report.scaling",
        "report.selection",
        "report.single",
        "report.tables",
        "report.trust",
        "report.waterfall",
        "report.whereabouts",
    ],
    6: [
        "api",
        "compare",
        "inspect",
        "publish",
        "board",
        "__main__",
        "",
    ],  # "" is the package itself, the face that users import
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
# What runs before torch is wanted: the data layers, and all that a refusal or --help needs.
WITHOUT_TORCH = [
    *LAYERS[0],
    *LAYERS[1],
    "composing",
    "job_config",
    "sweep_lock",
    "sweep_folder",
    "going_on",
    "orphans",
    "launchers",
    "launched_cell",
    "launcher_fixes",
    "ray_cells",
    "careful",
    "repeating",
    "searching",
    "compose",
    "console",
    "cell",
    "seats",
    "gathering",
    "publishing",
    "sweep",
    "api",
    "board",
    "inspect",
    "pairing",
    "contrast",
    "compare",
    "__main__",
    "",
]
CLOCKS = {
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
}


@dataclass(frozen=True)
class Import:
    """One module of dpexp naming another."""

    importer: str
    imported: str
    at_load: bool  # executed when the importer is loaded, not when a function of it is called
    line: int

    def __str__(self) -> str:
        return f"{self.importer or '__init__'}:{self.line} imports {self.imported or 'dpexp'}"


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports_of(name: str) -> Iterator[Import]:
    """What a module imports of dpexp, but for the sake of types only."""
    pending: list[tuple[ast.AST, bool]] = [(TREES[name], True)]
    while pending:
        node, at_load = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        inside = at_load and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("dpexp."):
                    yield Import(name, alias.name.removeprefix("dpexp."), at_load, node.lineno)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dpexp":
            base = (node.module or "").removeprefix("dpexp").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                if inner in MODULES or base:
                    found = inner if inner in MODULES else base
                    yield Import(name, found, at_load, node.lineno)


IMPORTS = [found for name in MODULES for found in imports_of(name)]


def test_the_table_of_layers_covers_exactly_the_modules() -> None:
    assert sorted(LAYER_OF) == sorted(MODULES)
    assert sum(map(len, LAYERS.values())) == len(LAYER_OF)


def test_imports_are_absolute_and_name_modules_that_exist() -> None:
    relative = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []
    assert [str(found) for found in IMPORTS if found.imported not in MODULES] == []


def test_imports_point_to_the_same_or_a_lower_layer() -> None:
    upward = [
        str(found) for found in IMPORTS if LAYER_OF[found.importer] < LAYER_OF[found.imported]
    ]
    assert upward == []


def test_the_analysis_sees_imports_at_all() -> None:
    edges = {(found.importer, found.imported, found.at_load) for found in IMPORTS}
    assert ("records", "files", True) in edges
    assert ("parallel.dp", "parallel.replicas", True) in edges
    assert ("parallel", "parallel.dp", True) in edges
    assert ("cell", "launch", False) in edges
    assert not [found for found in IMPORTS if found.importer == "errors"]


def test_no_modules_import_each_other_in_a_circle_when_loaded() -> None:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in IMPORTS:
        if found.at_load:
            edges[found.importer].add(found.imported)
    while edges:  # take away what imports nothing that is left, until only circles are left
        leaves = {name for name, imported in edges.items() if not imported & edges.keys()}
        assert leaves, f"a circle among {sorted(edges)}"
        edges = {name: imported for name, imported in edges.items() if name not in leaves}


def test_what_comes_before_torch_is_loaded_without_torch() -> None:
    names = [f"dpexp.{name}".rstrip(".") for name in WITHOUT_TORCH]
    code = (
        "import importlib, json, sys\n"
        "guilty = []\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        guilty.append(name)\n"
        "        break\n"
        "print(json.dumps(guilty))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "__init__")
def test_no_file_is_too_long(name: str) -> None:
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{name}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def uses_of(module: str, attributes: set[str]) -> dict[str, list[int]]:
    """Lines by module of dpexp that name `attributes` of a module of the standard library."""
    found: dict[str, list[int]] = {}
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            attribute = (
                isinstance(node, ast.Attribute)
                and node.attr in attributes
                and isinstance(node.value, ast.Name)
                and node.value.id == module
            )
            imported = (
                isinstance(node, ast.ImportFrom)
                and node.module == module
                and any(alias.name in attributes for alias in node.names)
            )
            if attribute or imported:
                found.setdefault(name, []).append(node.lineno)
    return found


def test_only_env_touches_the_environment() -> None:
    found = uses_of("os", {"environ", "environb", "getenv", "putenv", "unsetenv"})
    assert found.keys() == {"env", "env_slurm"}


def test_only_timing_reads_clocks() -> None:
    assert uses_of("time", CLOCKS).keys() == {"timing"}


def test_only_comm_asks_whether_processes_are_connected() -> None:
    asking = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"is_initialized", "init_process_group", "destroy_process_group"}
    }
    assert asking == {"comm"}
