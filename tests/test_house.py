"""The house keeps its shape: no circles, rooms in their order, one meaning for a name, files of a size to read."""

import ast
import importlib
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tools.house import circles, homes_of_names, importers, longest_chain, opaque_names, read_package, room_arrows

ROOT = Path(__file__).parents[1]
BASE = ["version", "report", "words", "errors", "plugins", "cache", "stores", "quiet", "hub", "safe_path", "files",
        "exports"]  # fmt: skip
CORE = ["count", "devices", "tracing", "conventions", "packing", "log", "config", "meter", "models"]
CORE += [
    "data",
    "synthetic",
    "explain",
    "pages",
    "optim",
    "checkpoint",
    "predict",
    "answer",
    "train",
    "objectives",
]
EDGES = ["integrations", "compat", "audit"]
ORDER = [*BASE, *CORE, *EDGES, "cli", "headway", "__main__"]  # each imports only what stands before it


@pytest.fixture(scope="module")
def files():
    return read_package(ROOT / "src" / "headway")


@pytest.fixture(scope="module")
def all_files(files):
    """The files of the core and of the distributions in plugins/."""
    packages = [path for path in (ROOT / "plugins").glob("*/src/*") if (path / "__init__.py").is_file()]
    assert packages
    return files | {name: file for package in packages for name, file in read_package(package).items()}


@pytest.fixture(scope="module")
def arrows(files):
    return room_arrows(files)


def test_no_files_import_each_other_in_a_circle(all_files):
    assert circles({file.name: file.imports for file in all_files.values()}) == []


def test_a_circle_is_found_where_there_is_one():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_room_has_a_place_in_the_order(files):
    assert {file.room for file in files.values()} <= {*ORDER}


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_what_stands_before_it(room, arrows):
    assert arrows.get(room, set()) <= {*ORDER[: ORDER.index(room)]}


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_is_imported_by_edges_and_the_command_line_alone(edge, arrows):
    assert {room for room, imported in arrows.items() if edge in imported} <= {*EDGES, "cli"}


def test_imports_make_no_longer_chain_and_no_more_slices_than_they_did(files):
    """Both may fall: DESIGN wants a chain of 22, and no file under 130 lines whose one reader stands beside it."""
    assert longest_chain({file.name: file.imports for file in files.values()}) <= 30
    readers = {
        name: {reader for reader in all_readers if reader in files} for name, all_readers in importers(files).items()
    }
    slices = [
        file.name
        for file in files.values()
        if file.lines < 130 and not file.is_package and len(readers[file.name]) == 1
        if file.name.rpartition(".")[0] == min(readers[file.name]).rpartition(".")[0]
    ]
    assert len(slices) <= 27


CLAUSE = re.compile(r"(What|How|Whether|That|When|Which|Why)\b")


def clauses_in(tree):
    """Yield the first lines of docstrings that begin with a clause: of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and CLAUSE.match(text):
                    yield text.splitlines()[0]


def test_a_docstring_begins_with_a_noun_or_a_verb(files):
    assert [*clauses_in(ast.parse('"""What it is."""\nx = 1\n"""Which x."""\ndef f(): "Show it."'))] == [
        "What it is.",
        "Which x.",
    ]
    clauses = [f"{file.name}: {text}" for file in files.values() for text in clauses_in(file.tree)]
    assert clauses == []


# Words by which a comment goes on with a sentence that stands nowhere: begin with the thing, or with a verb.
DANGLING = re.compile(
    r"#:? *((for|to|by|in|with|from|on|at) (which|whom|whose|what)|of|which|as|so|where|what|its?|they|theirs?|them"
    r"|those|whose|who|that|not|nor|or|such|than|when|how|why)\b",
    flags=re.IGNORECASE,
)


def dangling_comments(text):
    """Yield the comments that begin with such a word, continuation lines of a block left out."""
    line_before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            stands_alone = not token.line[:column].strip()
            if DANGLING.match(token.string) and not (stands_alone and line_before == number - 1):
                yield token.string
            line_before = number if stands_alone else None


def test_a_comment_begins_with_the_thing_or_a_verb(all_files):
    text = "x = 1  # of a step\n# Lengths\n# of samples\n# [tokens]\ny = '# as text'  # its unit\n# where it ends\n"
    assert [*dangling_comments(text)] == ["# of a step", "# its unit", "# where it ends"]
    comments = [f"{file.name}: {comment}" for file in all_files.values() for comment in dangling_comments(file.text)]
    assert comments == []


def test_tests_have_the_markers_of_three_speeds():
    """A case that `make test` runs is not marked slow, so that there is no marker that takes the mark back."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"mark\.core\b", text)] == []


@pytest.mark.parametrize("room", ["families", "objectives"])
def test_what_registers_is_imported_by_no_other_room(room, arrows):
    assert {other for other, imported in arrows.items() if room in imported} <= {room}


# Answers of which some are better are a kind of row: the data room reads, shows and makes such rows.
ROWS_OF_ANSWERS = {"cli.index", "cli.look_text", "pages.samples"}
WORDS_OF_PREFERENCES = re.compile(r"preferenc|preferring|unpaired|\bkto\b|\bdpo\b", flags=re.IGNORECASE)


def test_no_file_outside_their_room_knows_preferences(files):
    """The loop, the settings, plans and commands ask whichever objective is registered; comments and texts included."""
    for text in ("config.preference", "as DPO does", "Kto", "UnpairedLoss"):
        assert WORDS_OF_PREFERENCES.search(text)
    reading = [file for file in files.values() if file.room not in ("objectives", "data", "synthetic")]
    knowing = {file.name.partition(".")[2] for file in reading if WORDS_OF_PREFERENCES.search(file.text)}
    assert knowing - ROWS_OF_ANSWERS == set()


def test_the_counting_core_knows_no_torch(files):
    counting = [file for file in files.values() if file.room in ("count", "conventions", "packing")]
    assert counting
    imports_torch = re.compile(r"^\s*(import torch|from torch)", flags=re.MULTILINE)
    assert not [file.name for file in counting if imports_torch.search(file.text)]


def test_a_public_class_name_means_one_thing(files):
    assert homes_of_names(files, ast.ClassDef) == {}


def test_no_more_functions_share_a_name_than_did(files):
    """Commands are named by what is typed, readers of logs and rules by their tool; `to_dict` is one verb."""
    core = {name: file for name, file in files.items() if file.room not in ("cli", "audit")}
    assert len(homes_of_names(core, ast.FunctionDef).keys() - {"to_dict"}) <= 24


# Names that are written to files or that users call: how many a file may have.
OPAQUE_ON_PURPOSE = {
    "cli.demo": 1,
    "cli.explain": 1,
    "explain.explanation": 1,
    "packing.items": 1,
    "packing.parts": 1,
    "report.quantity": 5,
}


def test_names_say_what_they_hold(all_files):
    rooms = Counter()
    for file in all_files.values():
        allowed = OPAQUE_ON_PURPOSE.get(file.name.partition(".")[2], 0)
        rooms[file.room] += max(0, len(opaque_names(file.tree)) - allowed)
    assert {room: count for room, count in rooms.items() if count} == {}


def docstrings_in(tree):
    """Give the nodes of docstrings and of texts below a field or constant."""
    blocks = [node for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    texts = [statement for block in blocks for statement in block.body if isinstance(statement, ast.Expr)]
    return {id(statement.value) for statement in texts}


def texts_in(tree):
    """Yield the texts of a file's code, each with its line; what a text is filled with reads "…"."""
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    skipped = docstrings_in(tree) | within
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


# A command that a user is to type, as it stands; what it is filled with reads "…".
COMMANDS = re.compile(
    r"`(headway|pip) [^`]*`|`--set run\.profile\.start=N` of `headway train`"
    r"|(torchrun|docker run|headway train)( --[\w=-]+( N)?)+"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OPTIONS_OF_OTHERS = {  # of other programs, and CSS's own variables
    "headway.audit.formats": {"--log-throughput"},  # of Megatron-LM, which wrote the log
    "headway.audit.logs": {"--callbacks"},  # of ms-swift
    "headway.explain.trace_files": {"--trace", "--type"},  # of nsys, which exports its reports
    "headway.predict.tune.measure": {"--standalone", "--nproc-per-node"},  # of torchrun, which is started
}


def options_in(tree):
    return {option for _, text in texts_in(tree) for option in OPTION.findall(COMMANDS.sub("", text))}


def test_an_option_is_found_outside_of_a_command_alone():
    assert options_in(ast.parse('f"give --base {x} or {y} --seq-len"')) == {"--base", "--seq-len"}
    assert options_in(ast.parse('"""Of --json."""\nf"run `headway index {x} --force`, or torchrun --n-p N"')) == set()


def test_the_core_speaks_python_and_not_the_command_line(files):
    """Arguments are named by `headway.words.Argument`, which commands and configurations put into their own words."""
    # CSS's variables are in the report; pages say which command to type next
    core = [file for file in files.values() if file.room not in ("cli", "report", "pages")]
    options = {file.name: options_in(file.tree) - OPTIONS_OF_OTHERS.get(file.name, set()) for file in core}
    assert {name: rest for name, rest in options.items() if rest} == {}


def test_commands_print_their_results_in_one_way(files):
    """`print_result` takes the record and the text of a result; JSON is printed nowhere else, but for JSON Schema."""
    printing = {
        file.name
        for file in files.values()
        if file.room == "cli"
        for call in ast.walk(file.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and "json" in ast.unparse(call)
    }
    assert printing == {"headway.cli.output", "headway.cli.config"}


def rewritten_errors(tree):
    """Yield lines in which the text of an error that was caught is taken apart or rewritten."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        errors = {n.name for n in ast.walk(function) if isinstance(n, ast.ExceptHandler)} | {"error"}

        def is_text(node, errors=errors, texts=()):
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            of_error = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and "str" in names)
            return (of_error and bool(names & errors)) or (isinstance(node, ast.Name) and node.id in texts)

        assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and is_text(node.value)]
        texts = {target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                rewrites = node.func.attr in ("removeprefix", "removesuffix", "replace")
                if rewrites and is_text(node.func.value, texts=texts):
                    yield node.lineno


def test_the_text_of_an_error_is_not_taken_apart(all_files):
    old = "def f():\n try: g()\n except E as e:\n  raise F(str(e).removeprefix('x')) from e"
    older = "def f(error):\n text = str(error)\n return text.replace('x', 'y')"
    assert [[*rewritten_errors(ast.parse(code))] for code in (old, older)] == [[4], [3]]
    assert {file.name: lines for file in all_files.values() if (lines := [*rewritten_errors(file.tree)])} == {}


def test_a_result_becomes_a_dictionary_by_one_verb(all_files):
    others = {"as_dict", "as_json", "as_record", "to_json", "to_record"}
    functions = ((file.name, node) for file in all_files.values() for node in ast.walk(file.tree))
    names = [(file, node.name) for file, node in functions if isinstance(node, ast.FunctionDef) and node.name in others]
    assert names == []


def test_no_file_is_longer_than_five_hundred_lines(all_files):
    assert {file.name: file.lines for file in all_files.values() if file.lines > 500} == {}


def test_tests_lie_in_the_rooms_of_what_they_test():
    tests, package = ROOT / "tests", ROOT / "src" / "headway"
    beside = {"helpers", "fake_cuda", "tools"}  # what tests share, their device, and the repository's own tools
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert [str(f) for f in folders if f.parts[:1] and f.parts[0] not in beside and not (package / f).is_dir()] == []


def test_the_helpers_of_tests_are_a_file_for_each_subject():
    helpers = [*(ROOT / "tests" / "helpers").glob("*.py")]
    assert len(helpers) <= 15
    assert {path.name: lines for path in helpers if (lines := len(path.read_text().splitlines())) > 700} == {}


def test_no_helper_is_asked_for_what_it_keeps_to_itself():
    """Texts of programs that tests start are looked through too."""
    helpers = {path.stem for path in (ROOT / "tests" / "helpers").glob("*.py")}
    imports = re.compile(r"from helpers\.(\w+) import (\([^)]*\)|[^\n]*)")
    texts = [
        path.read_text(encoding="utf-8")
        for folder in ("tests", "tools", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    asked = [match.groups() for text in texts for match in imports.finditer(text)]
    assert len(asked) > 300
    assert {module for module, _ in asked} <= helpers
    assert [names for _, names in asked if re.search(r"(?<!\w)_", names.partition("#")[0])] == []


def test_a_program_that_a_test_talks_to_ends_with_the_test():
    """`with subprocess.Popen` waits for the program where a test fails, with no limit: `helpers.processes.running`."""
    started = {
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "plugins/headway-bagel/tests")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "Popen"
    }
    assert started == {"tests/helpers/pages.py", "tests/helpers/processes.py"}


@pytest.mark.parametrize("room", [room for room in ORDER if room not in (*BASE, "headway", "__main__")])
def test_the_page_on_architecture_names_every_room(room):
    assert f"| `{room}/`" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_files_that_the_page_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page) if "/your" not in name}
    named -= {"tests/test_house.py", "tests/test_modalities.py"}
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "src" / "headway" / name).exists()] == []


# model types of transformers that are ordinary words here
ORDINARY_WORDS = {"bit", "clip", "encoderdecoder"}


def names_in(code):
    """Yield the identifiers and strings of a file, without docstrings and comments."""
    tree = ast.parse(code)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, holders) and isinstance(n.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def model_types_in(code, model_types):
    """Find model types among the words of a file's names, as "led" in LEDEncoder and "longt5" in LongT5Attention."""
    found = set()
    for name in names_in(code):
        words = [word.lower() for word in re.findall(r"[A-Z0-9]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", name)]
        runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 5)}
        found |= runs & model_types
    return found


def test_the_tracer_knows_no_model_by_name_outside_inputs_and_families(files):
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    model_types = {re.sub(r"[^a-z0-9]", "", name) for name in mapping} - ORDINARY_WORDS
    assert model_types_in("class LEDEncoder: pixtral_tower = 1", model_types) >= {"led", "pixtral"}
    engine = [f for f in files.values() if f.room == "tracing" and not re.search(r"\.(inputs|families)\b", f.name)]
    assert len(engine) > 20
    assert {f.name: found for f in engine if (found := model_types_in(f.text, model_types))} == {}


# What a distribution in plugins/ brings is known there alone: words of its models, settings, records and attributes.
WORDS_OF_PLUGINS = re.compile(
    r"bagel|vit_model|flow_weight|timestep_shift|drop_reference|DrawingConfig|LossOfDrawing|getattr\([^)]*, \"draws\""
    r"|drawn_K|per_drawn|models? that draws?|draws (no )?images|import-model|flow_loss|last_flow|drawn_(images|patches)"
    r"|workload\.drawn|(?<!\.)\bw\.drawn|images? (that (is|are) )?drawn|drawn images?|\"draw\"|\"drawn\": \(",
    flags=re.IGNORECASE,
)


def test_a_word_of_a_plugin_is_found():
    words = (
        'getattr(hf_model, "draws", False)',
        "# Bagel",
        "an image that is drawn",
        "flow_loss",
        'SamplePart("draw")',
    )
    assert [word for word in words if not WORDS_OF_PLUGINS.search(word)] == []
    assert not WORDS_OF_PLUGINS.search("a line is drawn; samples are drawn at random; draws of a stage")


def test_the_core_knows_no_word_of_a_plugin():
    """In no code, text, comment or file of data."""
    files = [path for path in (ROOT / "src" / "headway").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 400
    known = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in files
        if (match := WORDS_OF_PLUGINS.search(path.read_text(encoding="utf-8")))
    }
    assert known == {}


def test_a_plugin_imports_the_core_and_no_other_way_round(files):
    names = {path.name for path in (ROOT / "plugins").glob("*/src/*") if path.is_dir()}
    assert names
    assert {file.name for file in files.values() for name in names if re.search(rf"\b{name}\b", file.text)} == set()


@pytest.mark.parametrize("module", ["headway", "headway.integrations", "headway.compat.mfu_tracker"])
def test_every_public_name_stands_in_a_page(module):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    words = {word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    assert [name for name in importlib.import_module(module).__all__ if name not in words] == []
