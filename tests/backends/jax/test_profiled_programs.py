"""The collectives of compiled programs, as XLA's profile has them, against the programs' own text."""

from __future__ import annotations

from collections import Counter

from keras_flow.backends.jax import profiled_programs
from tests.explainer.counting.jax import collectives as counted


def field(number: int, value: bytes | int) -> bytes:
    """Of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    head = b""
    while value > 127:
        head, value = head + bytes([value & 127 | 128]), value >> 7
    return head + bytes([value])


def test_kinds_by_the_names_of_instructions() -> None:
    assert profiled_programs.kind_of("all-reduce.6") == "all_reduce"
    assert profiled_programs.kind_of("all-gather-start.1") == "all_gather"
    assert profiled_programs.kind_of("collective-permute") == "send"
    assert profiled_programs.kind_of("all-gather-done.1") is None
    assert profiled_programs.kind_of("add_all-reduce_fusion") is None


def told_and_counted() -> tuple[Counter[str], Counter[str]]:
    """On four ranks: bytes of a program's collectives by kind, from a profile with it and from its text."""
    import jax

    mesh = jax.sharding.Mesh(jax.devices()[:4], ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        with jax.named_scope("layer[model/up]"):
            product = x.T @ y
        return product, x, x.sum()

    shapes = [jax.ShapeDtypeStruct((8, 6), dtype, sharding=split) for dtype in ("float32", "bfloat16")]
    compiled = jax.jit(step, out_shardings=(whole, whole, whole)).lower(*shapes).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    program = field(2, b"jit_step(7)") + field(5, field(6, field(1, module.as_serialized_hlo_module_proto())))
    profile = field(1, field(2, b"/host:metadata") + field(4, field(1, 7) + field(2, program)))
    found = profiled_programs.collectives(profile)
    assert {number for number, _ in found} == {7}
    said: Counter[str] = Counter()
    for each in counted(compiled.as_text()):
        said[str(each["kind"])] += int(each["elements"]) * int(each["itemsize"])  # type: ignore[call-overload]
    told: Counter[str] = Counter()
    for each in found.values():
        told[each.kind] += each.bytes
    assert any("model/up" in each.layers for each in found.values())
    return told, said


def test_bytes_are_those_of_the_programs_text(on_ranks) -> None:
    told, said = on_ranks("jax")(told_and_counted)
    assert set(said) >= {"all_reduce", "all_gather"}
    assert told == said
