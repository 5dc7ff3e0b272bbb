import pytest
import torch

from headway.explain.events import Operands, Product
from headway.explain.trace import read_trace
from helpers.traces import WrittenTrace, shapes


def operands(*tensors, strides=None):
    return Operands.read([size for _, size in tensors], [kind for kind, _ in tensors], strides)


@pytest.mark.parametrize(
    ("operator", "tensors", "num_bytes"),
    [
        ("aten::mul", [("c10::BFloat16", [8, 4]), ("c10::BFloat16", [8, 4])], 3 * 64),
        ("aten::mul", [("float", [8, 4]), ("Scalar", [])], 2 * 128),
        ("aten::gelu_backward", [("float", [8, 4]), ("float", [8, 4]), ("", [])], 3 * 128),
        ("aten::copy_", [("float", [8, 4]), ("c10::Half", [8, 4]), ("Scalar", [])], 128 + 64),
        ("aten::zero_", [("float", [8, 4])], 128),
        ("aten::sum", [("float", [8, 4]), ("ScalarList", [])], 128),
        ("triton_red_fused_add_0", [("float", [8, 4]), ("float", [8]), ("Scalar", [])], 128 + 32),
        ("aten::embedding", [("float", [1000, 4]), ("long int", [8])], 64 + 2 * 8 * 16),  # eight rows of the table
        ("aten::embedding", [("c10::Half", [1000, 4]), ("long int", [2, 3]), ("", [])], 48 + 2 * 6 * 8),
        ("aten::gather", [("float", [8, 1000]), ("Scalar", []), ("long int", [8, 1])], 64 + 2 * 8 * 4),
        ("aten::embedding", [("float", [1000, 4])], None),
        ("aten::index_select", [("float", [1000, 4]), ("Scalar", []), ("long int", [8])], None),  # along which axis?
        ("aten::transpose", [("float", [8, 4]), ("Scalar", []), ("Scalar", [])], 0),
        ("aten::empty_like", [("float", [8, 4])], 0),
        ("fbgemm::split_embedding_codegen_lookup_adagrad_function", [("float", [640_649_648]), ("long", [8])], None),
        ("mylib::scaled_gather", [("float", [1000, 4]), ("long", [8])], None),
        ("aten::cat", [("TensorList", [[8, 4], [8, 4]]), ("Scalar", [])], None),
        ("aten::add", [("Scalar", []), ("", [])], None),
    ],
)
def test_an_operator_moves_what_it_reads_and_what_it_writes(operator, tensors, num_bytes):
    assert operands(*tensors).bytes_moved(operator) == num_bytes


def test_what_torchs_schemas_call_an_alias_moves_nothing():
    """The result is an operand's memory, and neither is written to."""
    aliases = set()
    for schema in torch._C._jit_get_all_schemas():
        returned = [value.alias_info for value in schema.returns if value.alias_info is not None]
        taken = [value.alias_info for value in schema.arguments if value.alias_info is not None]
        if schema.name.startswith("aten::") and returned and not any(info.is_write for info in [*returned, *taken]):
            aliases.add(schema.name)
    views = {name for name in aliases if operands(("float", [8, 4])).bytes_moved(name) == 0}
    others = {name.removeprefix("aten::") for name in aliases - views}
    assert len(views) > 60
    # Of containers, of sparse tensors, of remote references, and of autograd's own bookkeeping.
    public = {name for name in others if not name.startswith("_")}
    assert public <= {"coalesce", "get", "keys", "local_value", "to_here"}


def test_an_expanded_tensor_is_read_as_often_as_memory_holds_it():
    found = operands(("float", [8, 4]), ("float", [8, 4]), strides=[[4, 1], [0, 1]])
    assert found.bytes_moved("aten::add") == 128 + 16 + 128


@pytest.mark.parametrize(
    ("operator", "sizes", "product"),
    [
        ("aten::mm", [[8, 4], [4, 10]], (1, 8, 10, 4)),
        ("aten::addmm", [[10], [8, 4], [4, 10]], (1, 8, 10, 4)),
        ("aten::bmm", [[3, 8, 4], [3, 4, 10]], (3, 8, 10, 4)),
        ("aten::baddbmm_", [[3, 8, 10], [3, 8, 4], [3, 4, 10]], (3, 8, 10, 4)),
        ("aten::linear", [[2, 8, 4], [10, 4], [10]], (1, 16, 10, 4)),
        # rows of 3 groups and a factor of each; columns likewise; inner sides, which make a result of each group
        ("aten::_grouped_mm", [[8, 4], [3, 4, 10]], (1, 8, 10, 4)),
        ("aten::_grouped_mm", [[3, 8, 4], [4, 10]], (1, 8, 10, 4)),
        ("aten::_grouped_mm", [[8, 4], [4, 10]], (1, 8, 10, 4)),
        ("aten::_grouped_mm", [[3, 8, 4], [3, 4, 10]], (3, 8, 10, 4)),
        ("aten::_grouped_mm", [[8, 4], [3, 5, 10]], None),
        ("aten::mm", [[8, 4], [3, 4, 10]], None),
        ("aten::mm", [[8, 4], [5, 10]], None),
        ("aten::mm", [[8, 4]], None),
        ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], None),
    ],
)
def test_the_sizes_of_a_product_are_those_of_its_factors(operator, sizes, product):
    found = operands(*(("float", size) for size in sizes)).product(operator)
    assert found == (None if product is None else Product(*product, "fp32"))


@pytest.mark.parametrize("told", [(None, None, None), (3, ["float"], None), ([[1, "x"], 7], ["float", ["int"]], [3])])
def test_what_is_not_written_as_expected_is_no_tensor(told):
    found = Operands.read(*told)
    assert (found.bytes_moved("aten::add"), found.product("aten::mm")) == (None, None)


def test_a_trace_keeps_each_kind_of_operands_once(tmp_path):
    trace = WrittenTrace()
    for i in range(3):
        trace.operator("aten::mm", 10 * i, 5, **shapes([[8, 4], [4, 2 + i // 2]]))
    trace.operator("aten::add", 50, 5)
    found = read_trace(trace.write(tmp_path / "t.json"))
    assert found.host.operands.tolist() == [0, 0, 1, -1]
    assert [one.sizes for one in found.operands] == [((8, 4), (4, 2)), ((8, 4), (4, 3))]
