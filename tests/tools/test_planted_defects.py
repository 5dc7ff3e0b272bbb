"""Every planted defect still finds the line that it makes wrong, and the tests that must notice."""

import pytest

from tools.planted_defects import DEFECTS, ROOT


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_finds_its_line_once(defect):
    assert (ROOT / "src/headway" / defect.file).read_text().count(defect.right) == 1
    assert defect.wrong != defect.right
    assert all((ROOT / name).exists() for name in defect.tests)
