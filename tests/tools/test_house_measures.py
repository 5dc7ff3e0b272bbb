"""What tools/house.py measures besides imports, on a few lines written out."""

import ast
import textwrap

from tools.house import SourceFile, comments_of_long_bodies, longest_chain, opaque_names, reach

ARROWS = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"a"}}


def test_a_name_that_is_grammar_is_found_wherever_it_is_bound():
    code = "for one in rows: _found = one\ndef f(given, row): rows = [told for told in given]\nobject.whole = 1"
    assert opaque_names(ast.parse(code)) == [("one", 1), ("_found", 1), ("given", 2), ("told", 2)]


def test_chains_and_what_a_file_reaches():
    assert longest_chain(ARROWS) == 4
    assert (reach(ARROWS, "a"), reach(ARROWS, "c"), reach(ARROWS, "nowhere")) == (2, 0, 0)


def test_comments_are_counted_in_long_bodies_alone(tmp_path):
    body = '"""Docstring."""\n' + "x = 1  # a reason\n" + "y = 2\n" * 4
    text = "def long():\n" + textwrap.indent(body, "    ") + "# beside\ndef short():\n    return 1  # no matter\n"
    file = SourceFile("a", tmp_path, False, text, ast.parse(text))
    assert comments_of_long_bodies(file, least=5) == (5, 1)
