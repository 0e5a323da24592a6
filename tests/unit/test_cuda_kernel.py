"""The Triton kernel, in Triton's interpreter and through its compiler: neither needs a device.

Each runs in a process of its own: Triton decides when it is imported whether it interprets.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

INTERPRETED = """
    import ctypes
    import mmap
    import numpy as np
    from kvtide.transfer.kernels_triton import BLOCK_BYTES, PROGRAMS, move_pieces

    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    rights, private_anonymous_below_2_gib = mmap.PROT_READ | mmap.PROT_WRITE, 0x62
    low = library.mmap(None, ctypes.c_size_t(4096), rights, private_anonymous_below_2_gib, -1, 0)
    assert 0 < low < 1 << 31
    low_table = np.ctypeslib.as_array((ctypes.c_int64 * 3).from_address(low))

    noise = np.random.default_rng(7)
    for storing in (True, False):
        for wide in (False, True):
            unit = 16 if wide else 1
            place = 2 * BLOCK_BYTES + 64
            edges = [1, 2, 15, 16, BLOCK_BYTES // unit - 1, BLOCK_BYTES // unit, BLOCK_BYTES // unit + 1]
            sizes = np.concatenate([edges, noise.integers(1, 2 * BLOCK_BYTES // unit, PROGRAMS)]) * unit
            sizes = np.minimum(sizes, 2 * BLOCK_BYTES)
            # int64 underneath, so that both begin at a multiple of 16 at least in steps of two words.
            held = [np.zeros(place * len(sizes) // 8 + 8, dtype=np.int64) for _ in range(2)]
            scattered, gathered = (array.view(np.uint8) for array in held)
            bases = [-(-array.ctypes.data // 16) * 16 for array in (scattered, gathered)]
            scattered[:] = noise.integers(0, 256, len(scattered))
            gathered[:] = noise.integers(0, 256, len(gathered))
            places = noise.permutation(len(sizes)) * place + noise.integers(0, 64 // unit, len(sizes)) * unit
            along = np.cumsum(sizes) - sizes
            offsets = (places, along) if storing else (along, places)
            arrays = (scattered, gathered) if storing else (gathered, scattered)
            starts = bases if storing else bases[::-1]
            source, target = arrays
            target[:] = 0xA5
            table = np.stack([starts[0] + offsets[0], starts[1] + offsets[1], sizes]).astype(np.int64)
            expected = target.copy()
            for begin, to, size in table.T.tolist():
                begin, to = begin - source.ctypes.data, to - target.ctypes.data
                expected[to : to + size] = source[begin : begin + size]
            move_pieces(table.ctypes.data, len(sizes), wide)
            assert (target == expected).all(), (storing, wide, int((target != expected).sum()))
            low_table[:] = starts[0], starts[1], 32
            begin, to = starts[0] - source.ctypes.data, starts[1] - target.ctypes.data
            target[to : to + 32] = 0xA5
            move_pieces(low, 1, wide)
            assert (target[to : to + 32] == source[begin : begin + 32]).all()
    print("every byte", end="")
"""

COMPILED = """
    import re, warnings
    warnings.simplefilter("ignore")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from kvtide.transfer import kernels_triton as kernels

    types = {"table": "i64", "count": "i32", "WIDE": "constexpr", "BLOCK": "constexpr"}
    for capability in (80, 90):
        block = kernels.BLOCK_BYTES // 8
        source = ASTSource(kernels._move_pieces, types, {(2,): True, (3,): block})
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        moves = re.findall(r"\\b(ld|st)\\.global\\S*?\\.(v\\d\\.)?b(\\d+)", ptx)
        assert {name for name, _, _ in moves} == {"ld", "st"}, moves
        assert all(int((vector or "v1.")[1]) * int(bits) == 128 for _, vector, bits in moves), moves
    print("16 bytes at once", end="")
"""


@pytest.mark.parametrize(
    ("program", "interpret", "says"),
    [(INTERPRETED, "1", "every byte"), (COMPILED, "0", "16 bytes at once")],
    ids=["moves-every-byte", "compiles-to-16-byte-moves"],
)
def test_the_kernel(program: str, interpret: str, says: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "TRITON_INTERPRET": interpret,
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, says), ran.stderr
