"""Compile the Triton kernels for an H100 or H200 on any machine; the interpreter accepts more code than the compiler.

Run without TRITON_INTERPRET; prints one line per kernel.
"""

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from shardwright.kernels import activations_triton as activations
from shardwright.kernels import grouped_products_triton as products
from shardwright.kernels import routing_triton as routing
from shardwright.kernels import row_kernels_triton as kernels

SCALARS = ("batch", "runs", "lookups")
TYPES = {"sums": "A", "out": "A", "settings": "A"}
TYPES |= {"scales": "A", "scales_out": "A", "table_indices": "i32", "tables_out": "i32"}
TYPES |= {"corrections": "A", "id_weights": "A", "values": "ID"}
HOPPER = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel, ids: str = "i64", **constants) -> None:
    """Compile a kernel of tables; pointers are those of aligned tensors."""
    element_types = {"A": str(constants["A"]), "ID": ids}
    signature = {}
    for name in kernel.arg_names:
        kind = TYPES.get(name, "i64")
        pointer = f"*{element_types.get(kind, kind)}"
        signature[name] = "constexpr" if name in constants else "i32" if name in SCALARS else pointer
    _compile(kernel, signature, constants, ids, num_warps=4, enable_fp_fusion=False)


def _compile(kernel, signature: dict[str, str], constants: dict, *about, **options) -> None:
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, type_ in signature.items()
        if type_.startswith("*")
    }
    by_position = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    binary = compile(ASTSource(kernel, signature, by_position, aligned), target=HOPPER, options=options)
    print(kernel.__name__, *about, *constants.values(), len(binary.asm["cubin"]), "bytes")


def compile_experts() -> None:
    """The kernels of experts, for bf16."""
    dtype, block = "bf16", {"PRECISION": "ieee", "BLOCK_R": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    for transposed, weight in ((True, "[1, 128, 64]"), (False, "[1, 64, 128]")):
        constants = {"TRANSPOSED": transposed, **block, "BAND": 8}
        signature = {"rows": f"tensordesc<{dtype}[128, 64]>", "weight": f"tensordesc<{dtype}{weight}>"}
        signature |= {"out": f"*{dtype}", "tiles": "*i32", "N": "i32", "K": "i32"} | dict.fromkeys(
            constants, "constexpr"
        )
        _compile(products.rows_times_weights_kernel, signature, constants, num_warps=4, num_stages=3)
    constants = {"PRECISION": "ieee", "BLOCK_R": 32, "BLOCK_H": 128, "BLOCK_C": 128}
    signature = dict.fromkeys(("left", "right"), f"tensordesc<{dtype}[32, 128]>") | {
        "groups": "*i32",
        "H": "i32",
        "C": "i32",
    }
    signature |= dict.fromkeys(("left_pointer", "right_pointer", "out"), f"*{dtype}") | dict.fromkeys(
        constants, "constexpr"
    )
    _compile(products.rows_times_rows_kernel, signature, constants, num_warps=4, num_stages=4)
    for kernel, constants in (
        (products.find_tiles_kernel, {"BLOCK_R": 128, "GROUPS": 64}),
        (routing.sum_choices_kernel, {"K": 2, "WEIGHTED": True, "A": tl.float32, "COLUMNS": 1024}),
        (routing.sum_choices_gradient_kernel, {"K": 2, "A": tl.float32, "COLUMNS": 1024}),
        (activations.swiglu_kernel, {"BLOCK": 2048}),
        (activations.swiglu_gradient_kernel, {"BLOCK": 2048}),
    ):
        types = {"H": "i32", "num": "i32", "num_groups": "i32", "positions": "*i64", "sizes": "*i64"}
        types |= {"tiles": "*i32", "groups": "*i32", "weights": "*fp32", "of_weights": "*fp32"}
        signature = {name: types.get(name, f"*{dtype}") for name in kernel.arg_names} | dict.fromkeys(
            constants, "constexpr"
        )
        _compile(kernel, signature, constants)


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
        compile_kernel(kernels.locate_gradients, A=vectors, WEIGHTED=True, BLOCK=1024)
        compile_kernel(kernels.sum_chunks, **shared)
        compile_kernel(kernels.sum_chunk_sums, **shared)
        kinds = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb")
        for kind in kinds if stored == tl.float32 else ("sgd", "lamb") if stored == tl.float64 else ("lamb",):
            table = {"W": stored, "DTYPE_INDEX": 1, "OPTIMIZER": kind, "BATCH_ROWS": rows}
            compile_kernel(kernels.update_rows, ids, **table, **flags, **shared)
    compile_experts()


if __name__ == "__main__":
    main()
