"""TensorFlow's private names that are used without being wrapped, each with its reason; compared as hooks are."""

from keras_flow.current.keras_places import Private


def privates() -> tuple[Private, ...]:
    """The private names of this engine that are used."""
    return tuple(Private(f"tensorflow.python.{module}", name, why) for (module, name), why in _NAMES.items())


_NAMES = {
    ("distribute", "collective_all_reduce_strategy"): 'strategy="mirrored" in several processes',
    ("distribute.coordinator.cluster_coordinator", "Cluster"): "its threads end before the process does",
    ("distribute.coordinator.cluster_coordinator", "RemoteValueImpl"): "which worker has computed it",
    ("distribute.values", "MirroredVariable"): "the variables of a strategy",
    ("eager", "context"): "the seed of `tf.random.set_seed`, and errors of ranks that DTensor keeps",
    ("eager", "record"): "a change of layout has its own gradient on every tape",
    ("framework", "smart_cond"): "operands that are known as a step is traced",
    ("ops", "array_ops"): "functions that gradients use",
    ("ops", "gen_stateless_random_ops_v2"): "draws by a key that is known",
    ("ops", "image_grad"): "the gradient of tf.image.rgb_to_hsv",
    ("ops", "image_ops"): "matrices of flat projective transforms",
    ("ops", "random_ops_util"): "the key of a draw's seed",
    ("ops", "resource_variable_ops"): "tapes see that a variable is read; the type of those of a SavedModel",
}
