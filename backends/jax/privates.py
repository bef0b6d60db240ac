"""JAX's private names that are used without being wrapped, each with its reason; compared as hooks are."""

from keras_flow.current.keras_places import Private


def privates() -> tuple[Private, ...]:
    """The private names of this engine that are used."""
    return tuple(Private(module, name, why) for (module, name), why in _NAMES.items())


_NAMES = {
    ("jax._src", "core"): "programs inside a program, before JAX 0.10 made the function public",
    ("jax._src.distributed", "global_state"): "whether processes have joined, and the store that they share",
    ("jax._src.source_info_util", "current_name_stack"): "names of layers stay in a program that is made anew",
    ("jax._src.source_info_util", "user_context"): "names of layers stay in a program that is made anew",
    ("jax._src.xla_bridge", "backends_are_initialized"): "whether it is too late for `kf.init`",
    ("jaxlib._jax", "make_gloo_tcp_collectives"): "the network by which processes of CPUs meet",
}
