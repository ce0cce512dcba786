"""Rules on how code is written: plain English, few parameters, short files, a small package."""

import ast
import re
import tokenize

import pytest
from common import ROOT

PACKAGE = ROOT / "timm_moe"
MODULES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTED = sorted(file for folder in ("studies", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

#: A docstring begins with a verb or a noun.
FIRST_WORDS = ("What", "Who", "Whether", "Which", "As", "Of", "How", "Where")
#: Words that make a sentence be read twice. "D stands for the width" is fine, "it stands in a file" is not.
RIDDLES = re.compile(r"\b(anew|those\s+of|is\s+told|has\s+(?-i:none)|stands(?!\s+for\b))\b", re.IGNORECASE)
MOST_PARAMETERS, LONGEST_FILE = 8, 500
#: Conversion is the one place where all options of an expert layer meet.
MANY_PARAMETERS = ("convert_to_moe",)
#: Rooms that no training needs: what the papers compare with, the report.
BESIDE = ("rivals", "report")
MOST_LINES, MOST_LINES_WITH_BESIDE = 13_350, 15_290  # the aim is 11,000 and 14,000


def place(file):
    return file.relative_to(ROOT).as_posix()


def report(found):
    return "\n".join([f"{len(found)} found:", *sorted(found)])


def docstrings(file):
    """The docstrings of a module, its classes and functions, each with the line of what it belongs to."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "lineno", 1), docstring


def prose(file):
    """The comments and strings of a file, each with its line; of an f-string, what is written out."""
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def public_functions(body, prefix=""):
    """Functions and methods by their names, without constructors and what is private."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node


def number_of_parameters(function):
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def number_of_lines(file):
    return file.read_text().count("\n")


def test_docstrings_begin_with_a_verb_or_a_noun():
    beginning = re.compile(rf"({'|'.join(FIRST_WORDS)})\b")
    found = [
        f"{place(file)}:{line}: {docstring.splitlines()[0]}"
        for file in (*MODULES, *DOCUMENTED)
        for line, docstring in docstrings(file)
        if beginning.match(docstring)
    ]
    assert not found, report(found)


def test_docstrings_comments_and_messages_have_no_riddles():
    found = {
        f"{place(file)}:{line + text[: match.start()].count(chr(10))}: {' '.join(match[0].split())}"
        for file in MODULES
        for line, text in prose(file)
        for match in RIDDLES.finditer(text)
    }
    assert not found, report(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The weights are drawn anew.", True),
        ("Like those\n    of timm", True),
        ("It stands in a file.", True),
        ("D stands for the width.", False),
        ("It has None as its value", False),
        ("He has nonetheless", False),
    ],
)
def test_a_riddle_is_found(text, found):
    assert bool(RIDDLES.search(text)) == found


def test_public_functions_have_few_parameters():
    found = [
        f"{place(file)}:{function.lineno}: {name} has {number_of_parameters(function)} parameters"
        for file in MODULES
        for name, function in public_functions(ast.parse(file.read_text()).body)
        if number_of_parameters(function) > MOST_PARAMETERS and name not in MANY_PARAMETERS
    ]
    assert not found, report(found)


def test_a_file_is_short_enough_to_be_read_in_one_sitting():
    found = [
        f"{place(file)}: {number_of_lines(file)} lines"
        for file in (*MODULES, *TESTS)
        if number_of_lines(file) > LONGEST_FILE
    ]
    assert not found, report(found)


def test_the_package_is_small():
    lines = {file: number_of_lines(file) for file in MODULES}
    everything = sum(lines.values())
    needed = sum(number for file, number in lines.items() if file.relative_to(PACKAGE).parts[0] not in BESIDE)
    assert (needed <= MOST_LINES, everything <= MOST_LINES_WITH_BESIDE) == (True, True), (needed, everything)
