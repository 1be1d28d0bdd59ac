"""Compile the Triton kernels for an H100 or H200 on any machine; the interpreter accepts more code than the compiler.

Run without TRITON_INTERPRET; prints one line per kernel.
"""

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from shardwright.kernels import row_kernels_triton as kernels

TYPES = {"batch": "i32", "runs": "i32", "lookups": "i32", "sums": "A", "out": "A", "settings": "A"}
TYPES |= {"corrections": "A", "id_weights": "A", "values": "ID"}
HOPPER = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel, ids: str = "i64", **constants) -> None:
    element_types = {"A": str(constants["A"]), "ID": ids}
    signature = {}
    for name in kernel.arg_names:
        kind = TYPES.get(name, "i64")
        pointer = f"*{element_types.get(kind, kind)}"
        signature[name] = "constexpr" if name in constants else kind if kind == "i32" else pointer
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    binary = compile(ASTSource(kernel, signature, constants), target=HOPPER)
    print(kernel.__name__, ids, *constants.values(), len(binary.asm["cubin"]), "bytes")


def main() -> None:
    flags = {"HAS_MOMENTUM": True, "L2": True, "DECOUPLED": True, "CLIPPED": True}
    for stored, vectors, columns, ids in (
        (tl.float32, tl.float32, 64, "i64"),
        (tl.float16, tl.float32, 128, "i32"),
        (tl.bfloat16, tl.float32, 16, "i64"),
        (tl.float64, tl.float64, 64, "i64"),
    ):
        shared = {"A": vectors, "COLUMNS": columns}
        rows = 1024 // columns
        compile_kernel(kernels.pool_rows, ids, W=stored, WEIGHTED=True, BAGS=rows, **shared)
        compile_kernel(kernels.dot_rows_with_gradients, ids, W=stored, DTYPE_INDEX=1, BATCH_ROWS=rows, **shared)
        compile_kernel(kernels.sum_chunks, WEIGHTED=True, **shared)
        compile_kernel(kernels.sum_chunk_sums, **shared)
        kinds = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb")
        for kind in kinds if stored == tl.float32 else ("lamb",):
            table = {"W": stored, "DTYPE_INDEX": 1, "OPTIMIZER": kind, "BATCH_ROWS": rows, "WEIGHTED": True}
            compile_kernel(kernels.update_rows, ids, **table, **flags, **shared)


if __name__ == "__main__":
    main()
