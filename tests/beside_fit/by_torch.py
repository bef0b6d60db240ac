"""Gradients by `torch.autograd`: saliency, Grad-CAM, penalties, products with the Hessian, each example's, loops."""

from __future__ import annotations

import torch

from tests.beside_fit.models import cut, from_parts, handing_out


def by_input(model, x):
    """Saliency, FGSM, by `backward`."""
    x = x.clone().requires_grad_()
    model(x)[:, 1].sum().backward()
    return x.grad


def by_layer(model, x):
    """Grad-CAM, by `torch.autograd.grad` and by `backward`, also of models that hand out what is no layer's output."""
    found = []
    for seen in handing_out(model):
        model.zero_grad()
        hidden, out = seen(x)
        (first,) = torch.autograd.grad(out[:, 1].sum(), hidden, retain_graph=True)
        hidden.retain_grad()
        out[:, 1].sum().backward()
        found.append([hidden, first, hidden.grad, [weight.value.grad for weight in model.trainable_weights]])
    return found


def between_layers(model, x):
    """By what a loop of one's own hands from one part of a model to the next, and by the weights."""
    before, after = cut(model)
    hidden = before(x)
    weights = [weight.value for weight in model.trainable_weights]
    cost = (after([hidden, x]) ** 2).mean()
    return [hidden, *torch.autograd.grad(cost, [hidden, *weights])]


def by_weights(model, x):
    """Through a training call, by `torch.autograd.grad` and by `backward`."""
    weights = [weight.value for weight in model.trainable_weights]
    found = list(torch.autograd.grad((model(x, training=True) ** 2).mean(), weights))
    model.zero_grad()
    (model(x, training=True) ** 2).mean().backward()
    return [found, [weight.value.grad for weight in model.trainable_weights]]


def penalty(model, x):
    """A gradient penalty: by the weights, of a norm of a gradient by the inputs."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 1].sum(), x, create_graph=True)
    cost = ((torch.sqrt(gradient.flatten(1).square().sum(1) + 1e-6) - 1) ** 2).mean()
    weights = [weight.value for weight in model.trainable_weights[:-1]]
    return [cost, list(torch.autograd.grad(cost, weights, allow_unused=True))]


def twice_by_input(model, x):
    """A gradient of a gradient by the inputs."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(x)[:, 1] ** 2).sum(), x, create_graph=True)
    return torch.autograd.grad((gradient**2).sum(), x)[0]


def hessian_vector(model, x):
    """The Hessian by the weights, times a vector of ones."""
    weights = [weight.value for weight in model.trainable_weights]
    gradients = torch.autograd.grad((model(x) ** 2).mean(), weights, create_graph=True)
    total = sum(gradient.sum() for gradient in gradients)
    return list(torch.autograd.grad(total, weights))


def by_example(model, x):
    """Each example's gradient by the weights."""
    weights = [weight.value for weight in model.trainable_weights]
    costs = (model(x) ** 2).mean(1)
    return [list(torch.autograd.grad(cost, weights, retain_graph=True)) for cost in costs]


def of_parts(model, x):
    """By inputs and weights, of what is computed from layers' inner parts."""
    x = x.clone().requires_grad_()
    found = from_parts(model, x)
    score = sum((value**2).mean() for value in found)
    return [found, list(torch.autograd.grad(score, [x, *(weight.value for weight in model.trainable_weights)]))]


def own_loop(model, x):
    """Steps of a loop of one's own, with the model's loss and optimizer."""
    for _ in range(2):
        model.zero_grad()
        loss = model.compute_loss(x=x, y=torch.ones(x.shape[0], 3), y_pred=model(x, training=True))
        loss.backward()
        weights = model.trainable_weights
        with torch.no_grad():
            model.optimizer.apply([weight.value.grad for weight in weights], weights)
    return [loss, *model.get_weights()]


CASES = {
    case.__name__: case
    for case in (
        by_input,
        by_layer,
        between_layers,
        by_weights,
        penalty,
        twice_by_input,
        hessian_vector,
        by_example,
        of_parts,
        own_loop,
    )
}


def branch(predicate, first, second, x):
    """One of two functions of x, chosen as the graph runs."""
    return torch.cond(predicate, first, second, (x,))


def gradient(function, x):
    """The gradient of a function of x, that may be differentiated again."""
    if not x.requires_grad:
        x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x, create_graph=True)[0]
