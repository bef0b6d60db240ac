"""Gradients by `tf.GradientTape`: saliency, Grad-CAM, penalties, products with the Hessian, each example's, loops."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.beside_fit.models import from_parts, handing_out


def by_input(model, x):
    """Saliency, FGSM."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        score = tf.reduce_sum(model(x)[:, 1])
    return tape.gradient(score, x)


def by_layer(model, x):
    """Grad-CAM, also of models that hand out what is no layer's output."""
    found = []
    for seen in handing_out(model):
        with tf.GradientTape() as tape:
            hidden, out = seen(x)
            score = tf.reduce_sum(out[:, 1])
        found.append([hidden, tape.gradient(score, hidden)])
    return found


def by_weights(model, x):
    """Of Keras's variables, and of TensorFlow's that they hold, through a training call."""
    with tf.GradientTape(persistent=True) as tape:
        score = tf.reduce_mean(model(x, training=True) ** 2)
    weights = model.trainable_weights
    return [tape.gradient(score, each) for each in (weights, [weight.value for weight in weights])]


def penalty(model, x):
    """A gradient penalty: by the weights, of a norm of a gradient by the inputs."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = tf.reduce_sum(model(x)[:, 1])
        gradient = tape.gradient(score, x)
        squares = tf.reduce_sum(tf.reshape(gradient, (gradient.shape[0], -1)) ** 2, 1)
        cost = tf.reduce_mean((tf.sqrt(squares + 1e-6) - 1) ** 2)
    return [cost, outer.gradient(cost, model.trainable_weights[:-1])]


def twice_by_input(model, x):
    """A gradient of a gradient by the inputs."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = tf.reduce_sum(model(x)[:, 1] ** 2)
        cost = tf.reduce_sum(tape.gradient(score, x) ** 2)
    return outer.gradient(cost, x)


def hessian_vector(model, x):
    """The Hessian by the weights, times a vector of ones."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            score = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(score, model.trainable_weights)
    ones = [tf.ones(weight.shape) for weight in model.trainable_weights]
    return outer.gradient(gradients, model.trainable_weights, output_gradients=ones)


def by_example(model, x):
    """Each example's gradient by the weights, and by its inputs."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        out = model(x)
        costs = tf.reduce_mean(out**2, 1)
    return [tape.jacobian(costs, model.trainable_weights), tape.batch_jacobian(out, x)]


def some_watched(model, x):
    """A tape that watches what it is told to."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(x)
        tape.watch(model.trainable_weights[0].value)
        cost = tf.reduce_sum(model(x) ** 2)
    return tape.gradient(cost, [x, model.trainable_weights[0].value])


def forward(model, x):
    """A product with the Jacobian, by forward accumulation."""
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        out = model(x)
    return accumulator.jvp(out)


def of_parts(model, x):
    """By inputs and weights, of what is computed from layers' inner parts."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = from_parts(model, x)
        score = sum(tf.reduce_mean(value**2) for value in found)
    return [found, tape.gradient(score, [x, *model.trainable_weights])]


def own_loop(model, x):
    """Steps of a loop of one's own, with the model's loss, an optimizer and clipping."""
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=tf.ones((x.shape[0], 3)), y_pred=model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return [loss, *model.get_weights()]


def by_hand(model, x):
    """Updates without an optimizer, a penalty on the weights, and gradients clipped together."""
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
            loss += 0.01 * tf.add_n([tf.nn.l2_loss(weight) for weight in model.trainable_weights])
        gradients = tape.gradient(loss, model.trainable_weights)
        for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
            weight.assign(weight - 0.01 * gradient)
        clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
        keras.optimizers.SGD(0.01).apply_gradients(zip(clipped, model.trainable_weights, strict=True))
    return [loss, norm, *model.get_weights()]


def by_value(model, x):
    """TensorFlow's operations on its own variables, which the eager runtime reads by itself."""
    found, weights = [], [weight.value for weight in model.trainable_weights]
    with tf.GradientTape() as tape:
        for weight, other in zip(weights, weights[::-1], strict=True):
            ones = tf.ones(weight.shape)
            found += [weight - weight * ones, ones - weight, 0.5 * weight + 0.5 * weight, tf.maximum(ones, weight)]
            found += [tf.concat([weight, ones], 0), tf.where(ones > 0, weight, ones), tf.square(weight) * ones]
            found += [tf.nn.l2_loss(weight) * tf.reduce_sum(other), tf.transpose(weight) + tf.transpose(ones)]
        total = tf.add_n([tf.reduce_mean(value**2) for value in found])
    return [found, tape.gradient(total, weights)]


CASES = {
    case.__name__: case
    for case in (
        *(by_input, by_layer, by_weights, penalty, twice_by_input, hessian_vector, by_example, some_watched, forward),
        *(own_loop, of_parts, by_hand, by_value),
    )
}


def _update(model):
    weights = model.trainable_weights
    model.optimizer.apply([tf.ones(weight.shape) for weight in weights], weights)


#: what a `tf.function` of the user's own may hold, which reads or writes variables of several ranks
IN_A_FUNCTION = {
    "a call": lambda model, x: model(x),
    "a call of a layer": lambda model, x: model.get_layer("h")(x),
    "a weight": lambda model, x: tf.matmul(x, model.trainable_weights[0]),
    "its value": lambda model, x: model.trainable_weights[0].value + 1.0,
    "an update": lambda model, x: _update(model),
}


def in_functions(model, x):
    """What each of them raises, compiled."""
    said = []
    for compute in IN_A_FUNCTION.values():
        try:
            tf.function(lambda inputs, compute=compute: compute(model, inputs))(x)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def seeded_in_a_function(model, x):
    """What is raised where a function assigns a seed that it is given."""
    seeds = keras.random.SeedGenerator(3)

    def reset(seed):
        seeds.state.assign(tf.cast(seed, "uint32"))
        return seeds.state.value

    try:
        tf.function(reset)(tf.constant([1, 2]))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def branch(predicate, first, second, x):
    """One of two functions of x, chosen as the graph runs."""
    return tf.cond(predicate, lambda: first(x), lambda: second(x))


def gradient(function, x):
    """The gradient of a function of x, that may be differentiated again."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = function(x)
    return tape.gradient(total, x)
