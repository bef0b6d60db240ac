"""JAX: NamedSharding over a Mesh; XLA partitions the program under Keras's stock trainer."""

from keras_flow.backends.jax import boxing, devices, hooks, layouts, probes, trainer, variables
from keras_flow.backends.jax.capabilities import CAPABILITIES


class JaxBackend:
    """The engine interface on JAX; see `keras_flow.backends.interface.Backend`."""

    name = "jax"
    capabilities = CAPABILITIES
    init = staticmethod(devices.init)
    world = staticmethod(devices.world)
    engine_layout = staticmethod(layouts.engine_layout)
    constrain = staticmethod(layouts.constrain)
    redistribute = staticmethod(boxing.redistribute)
    place = staticmethod(variables.place)
    shards = staticmethod(variables.shards)
    enter = staticmethod(trainer.enter)
    forget_steps = staticmethod(trainer.forget_steps)
    recover = staticmethod(trainer.recover)
    hooks = staticmethod(hooks.hooks)
    devices_seen = staticmethod(probes.devices_seen)
    all_reduce = staticmethod(probes.all_reduce)


BACKEND = JaxBackend()
