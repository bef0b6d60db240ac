"""Gradients by JAX, over `stateless_call` and the model itself: Grad-CAM, penalties, Hessians, per example, loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.beside_fit.models import cut, from_parts


def _values(model):
    """Trained weights, and all else, as `stateless_call` takes them."""
    trained, others = model.trainable_variables, model.non_trainable_variables
    return [[variable.value for variable in each] for each in (trained, others)]


def by_input(model, x):
    """Saliency, FGSM: of the model as a function, of `stateless_call`, and of a compiled function."""
    trained, others = _values(model)

    def score(inputs):
        return jnp.sum(model(inputs)[:, 1])

    def stateless(inputs):
        return jnp.sum(model.stateless_call(trained, others, inputs)[0][:, 1])

    return [jax.grad(score)(x), jax.grad(stateless)(x), jax.jit(jax.grad(stateless))(x)]


def by_layer(model, x):
    """Grad-CAM: the model is cut at a layer."""
    before, after = cut(model)
    hidden = before(x)
    return [hidden, jax.grad(lambda value: jnp.sum(after([value, x])[:, 1]))(hidden)]


def by_weights(model, x):
    """Through a training call, as Keras's own guide writes it, with the state that it leaves."""
    trained, others = _values(model)

    def cost(values):
        out, state = model.stateless_call(values, others, x, training=True)
        return jnp.mean(out**2), state

    (value, state), gradients = jax.value_and_grad(cost, has_aux=True)(trained)
    compiled = jax.jit(jax.grad(lambda values: cost(values)[0]))(trained)
    return [value, gradients, compiled, [each for each in state if jnp.issubdtype(each.dtype, jnp.floating)]]


def penalty(model, x):
    """A gradient penalty: by the weights, of a norm of a gradient by the inputs."""
    trained, others = _values(model)

    def cost(values):
        gradient = jax.grad(lambda inputs: jnp.sum(model.stateless_call(values, others, inputs)[0][:, 1]))(x)
        squares = jnp.sum(gradient.reshape(x.shape[0], -1) ** 2, 1)
        return jnp.mean((jnp.sqrt(squares + 1e-6) - 1) ** 2)

    return [*jax.value_and_grad(cost)(trained), jax.jit(jax.grad(cost))(trained)]


def twice_by_input(model, x):
    """A gradient of a gradient by the inputs."""
    gradient = jax.grad(lambda inputs: jnp.sum(model(inputs)[:, 1] ** 2))
    return jax.grad(lambda inputs: jnp.sum(gradient(inputs) ** 2))(x)


def hessian_vector(model, x):
    """The Hessian by the weights, times a vector of ones: forward over reverse, and reverse over reverse."""
    trained, others = _values(model)
    gradient = jax.grad(lambda values: jnp.mean(model.stateless_call(values, others, x)[0] ** 2))
    ones = [jnp.ones_like(value) for value in trained]

    def total(values):
        return sum(jnp.sum(each) for each in gradient(values))

    return [jax.jvp(gradient, (trained,), (ones,))[1], jax.grad(total)(trained)]


def by_example(model, x):
    """Each example's gradient by the weights, by `vmap` and by a Jacobian; and each output's by its own inputs."""
    trained, others = _values(model)

    def of_one(values, one):
        return jnp.mean(model.stateless_call(values, others, one[None])[0] ** 2)

    def of_all(values):
        return jnp.mean(model.stateless_call(values, others, x)[0] ** 2, 1)

    def outputs(one):
        return model.stateless_call(trained, others, one[None])[0][0]

    by_one = jax.vmap(jax.grad(of_one), (None, 0))
    return [
        by_one(trained, x),
        jax.jit(by_one)(trained, x),
        jax.jacobian(of_all)(trained),
        jax.vmap(jax.jacrev(outputs))(x),
        jax.vmap(jax.jacfwd(outputs))(x),
    ]


def forward(model, x):
    """A product with the Jacobian, by forward accumulation."""
    return list(jax.jvp(model, (x,), (jnp.ones_like(x),)))


def of_parts(model, x):
    """By inputs, of what is computed from layers' inner parts."""

    def score(inputs):
        return sum(jnp.mean(value**2) for value in from_parts(model, inputs))

    return [from_parts(model, x), jax.grad(score)(x)]


def own_loop(model, x):
    """Steps of a loop of one's own, with the model's loss and optimizer, compiled."""
    y = jnp.ones((x.shape[0], 3))

    def cost(trained, others):
        out, others = model.stateless_call(trained, others, x, training=True)
        return model.compute_loss(x=x, y=y, y_pred=out), others

    @jax.jit
    def step(trained, others, of_optimizer):
        (loss, others), gradients = jax.value_and_grad(cost, has_aux=True)(trained, others)
        trained, of_optimizer = model.optimizer.stateless_apply(of_optimizer, gradients, trained)
        return loss, trained, others, of_optimizer

    trained, others = _values(model)
    of_optimizer = [variable.value for variable in model.optimizer.variables]
    for _ in range(2):
        loss, trained, others, of_optimizer = step(trained, others, of_optimizer)
    for variable, value in zip(model.trainable_variables, trained, strict=True):
        variable.assign(value)
    return [loss, *model.get_weights()]


CASES = {
    case.__name__: case
    for case in (
        *(
            by_input,
            by_layer,
            by_weights,
            penalty,
            twice_by_input,
            hessian_vector,
            by_example,
            forward,
            of_parts,
            own_loop,
        ),
    )
}


def branch(predicate, first, second, x):
    """One of two functions of x, chosen as the program runs."""
    return jax.lax.cond(predicate, first, second, x)


def gradient(function, x):
    """The gradient of a function of x, that may be differentiated again."""
    return jax.grad(function)(x)
