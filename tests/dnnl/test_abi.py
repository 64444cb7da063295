"""The checked-in ABI table is what the generator makes of the headers, and later headers only add."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import _abi

ROOT = Path(__file__).resolve().parents[2]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_abi", ROOT / "scripts" / "generate_abi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_abi"] = module
    spec.loader.exec_module(module)
    return module


generator = load_generator()
HEADERS = generator.installed_headers()


def test_table_is_up_to_date() -> None:
    include = [include for version, include in HEADERS if version == _abi.HEADER_VERSION]
    if not include:
        pytest.skip(f"no oneDNN {_abi.HEADER_VERSION} headers here")
    checked_in = (ROOT / "fmtprop" / "dnnl" / "_abi.py").read_text()
    assert generator.render(generator.read_abi(include[0])) == checked_in


@pytest.mark.skipif(not HEADERS, reason="no oneDNN headers here")
@pytest.mark.parametrize("include", [include for _, include in HEADERS], ids=[str(version) for version, _ in HEADERS])
def test_other_versions_agree(include: Path) -> None:
    """No signature changed and no value was renumbered between the versions that are installed here."""
    abi = generator.read_abi(include)
    namespace = vars(ctypes) | vars(_abi)
    common = abi.functions.keys() & _abi.FUNCTIONS.keys()
    assert len(common) > 80
    for name in common:
        result, arguments = abi.functions[name]
        assert (eval(result, namespace), tuple(eval(a, namespace) for a in arguments)) == _abi.FUNCTIONS[name], name
    for enum, values in abi.enums.items():
        # `*_max` sentinels and such may move; what both name must agree.
        known = _abi.ENUMS.get(enum, values)
        different = {n: (v, known[n]) for n, v in values.items() if n in known and known[n] != v}
        assert not different, enum
    assert abi.args
    assert abi.args.items() <= {name: int(member) for name, member in _abi.Arg.__members__.items()}.items()


def test_what_the_documentation_states() -> None:
    """Numbers written down independently of the headers (oneDNN's enum values are its ABI)."""
    assert int(dnnl.Arg.DST) == 17 and int(dnnl.Arg.SCRATCHPAD) == 80
    assert dnnl.Arg.ATTR_MULTIPLE_POST_OP(0) == 32768 and dnnl.Arg.ATTR_MULTIPLE_POST_OP(2) == 3 * 32768
    assert _abi.ENUMS["dnnl_query_t"]["query_impl_info_str"] == 8
    assert _abi.ENUMS["dnnl_query_t"]["query_exec_arg_md"] == 255
    assert _abi.ENUMS["dnnl_prop_kind_t"]["forward_inference"] == 96


def test_every_function_of_the_library_has_its_types_set() -> None:
    library = dnnl.lib()
    # the attribute `version` is the answer of its function
    names = [name for name in _abi.FUNCTIONS if library.has(name) and name != "dnnl_version"]
    assert len(names) > 80
    for name in names:
        function = getattr(library, name.removeprefix("dnnl_"))
        assert function.argtypes is not None and function.restype is not None


def test_pointer_types_are_not_interchangeable() -> None:
    with pytest.raises(ctypes.ArgumentError):
        dnnl.lib().stream_destroy(_abi.dnnl_memory_desc_t(1))


C_TYPES = {
    "engine": _abi.dnnl_engine_t,
    "hint": _abi.dnnl_primitive_desc_t,
    "data": _abi.dnnl_memory_desc_t,
    "srcs": ctypes.POINTER(_abi.dnnl_memory_desc_t),
    "flags": ctypes.c_uint,
    **dict.fromkeys(("prop", "alg", "axis", "count", "activation", "direction"), ctypes.c_int),
    **dict.fromkeys(("local_size", "group_size", "groups"), ctypes.c_int64),
    **dict.fromkeys(("strides", "dilates", "kernel", "pad_l", "pad_r"), ctypes.POINTER(ctypes.c_int64)),
    **dict.fromkeys(("alpha", "beta", "k", "p", "eps", "epsilon"), ctypes.c_float),
    **dict.fromkeys(("factors", "scales"), ctypes.POINTER(ctypes.c_float)),
}


@pytest.mark.parametrize("spec", dnnl.SPECS, ids=lambda spec: f"{spec.function} {spec.props[0]}")
def test_the_table_of_primitives_agrees_with_the_signatures(spec: dnnl.Spec) -> None:
    """ctypes would take many a wrong order for right: kinds and axes are integers, operands one type."""
    _, (result, *arguments) = _abi.FUNCTIONS[f"dnnl_{spec.function}_primitive_desc_create"]
    assert result is ctypes.POINTER(_abi.dnnl_primitive_desc_t)
    wanted = [C_TYPES.get(name, _abi.dnnl_memory_desc_t) for name in spec.arguments]
    assert arguments == [*wanted, _abi.dnnl_primitive_attr_t]
