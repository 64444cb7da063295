"""Tiles of AMX: their instructions as another assembler encodes them, and where there are none."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from iced_x86 import Register

from fmtprop.jit import no_tiles, unavailable
from fmtprop.jit.assembler import at
from fmtprop.jit.attention_tiles import AttentionTilesArguments
from fmtprop.jit.isa import AMX
from fmtprop.jit.tile_program import PRODUCTS, TileProgram
from tests import processes

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def program() -> TileProgram:
    return TileProgram(AMX, AttentionTilesArguments, bf16=True)


def emitted(add) -> bytes:
    """Return the bytes of the instructions that a function adds to a program."""
    before, after = program(), program()
    add(after)
    return after.code().removeprefix(before.code())


def assembled(source: str, tmp_path) -> bytes:
    """Return what binutils makes of instructions."""
    files = [tmp_path / name for name in ("a.s", "a.o", "a.bin")]
    files[0].write_text(f".intel_syntax noprefix\n{source}\n")
    subprocess.run(["as", "--64", "-o", files[1], files[0]], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", files[1], files[2]], check=True)
    return files[2].read_bytes()


def loads(p: TileProgram) -> None:
    p.load_tile(3, Register.RSI, Register.RAX)
    p.load_tile(7, Register.R10, Register.R12, 1024)
    p.store_tile(Register.R11, Register.RDX, 6, 64)
    p.zero_tile(5)
    p.emit("VEX_TILERELEASE")


def products(p: TileProgram) -> None:
    for types in PRODUCTS:
        p.add_products(1, 4, 7, types)


def masked(p: TileProgram) -> None:
    p.v("VMOVDQU16", Register.ZMM3, at(Register.RSI, 64), mask=Register.K3)
    p.v("VMAXPS", Register.ZMM0, Register.ZMM0, at(Register.RSI, 64, Register.RCX, 4), mask=Register.K1, merge=True)
    p.v("VREDUCEPS", Register.ZMM2, Register.ZMM1, immediate=1)
    p.emit("EVEX_VMOVDQU16_YMMM256_K1Z_YMM", at(Register.RDI), Register.YMM1, mask=Register.K4)
    p.emit("VEX_KMOVD_KR_R32", Register.K4, Register.EAX)


CASES = {
    loads: """
        tileloadd tmm3, [rsi+rax*1]
        tileloadd tmm7, [r10+r12*1+1024]
        tilestored [r11+rdx*1+64], tmm6
        tilezero tmm5
        tilerelease""",
    products: "\n".join(
        f"{name} tmm1, tmm4, tmm7" for name in ("tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")
    ),
    masked: """
        vmovdqu16 zmm3{k3}{z}, [rsi+64]
        vmaxps zmm0{k1}, zmm0, [rsi+rcx*4+64]
        vreduceps zmm2, zmm1, 1
        vmovdqu16 [rdi]{k4}, ymm1
        kmovd k4, eax""",
}


@pytest.mark.skipif(shutil.which("as") is None or shutil.which("objcopy") is None, reason="binutils is not installed")
@pytest.mark.parametrize("add", CASES, ids=lambda add: add.__name__)
def test_instructions_are_encoded_as_binutils_does(add, tmp_path):
    assert emitted(add).hex() == assembled(CASES[add], tmp_path).hex()


def test_there_are_no_tiles_where_onednn_may_not_use_them():
    code = "from fmtprop.jit import no_tiles; print(no_tiles())"
    run = processes.run("-c", code, ONEDNN_MAX_CPU_ISA="AVX2")
    assert run.stdout == "oneDNN uses avx2 here, which has no AMX\n"


@pytest.mark.skipif(bool(no_tiles()), reason=no_tiles())
def test_a_forked_process_has_tiles_too():
    code = "import os\nfrom fmtprop.jit.tiles import no_tiles\nno_tiles()\nno_tiles.cache_clear()\n"
    code += "if os.fork():\n    os.wait()\nelse:\n    print(no_tiles() or 'yes', flush=True)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "yes\n"
