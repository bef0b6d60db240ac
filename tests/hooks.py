"""Which hooks are installed."""

from keras_flow.backends import hooking


def wrapped(hook: hooking.Hook) -> list[hooking.Hook]:
    """The hooks on a hook's target, outermost first."""
    owner, attribute = hooking.owner_of(hook)
    target, found = getattr(owner, attribute), []
    while hasattr(target, "keras_flow_hook"):
        found.append(target.keras_flow_hook)
        target = target.__wrapped__
    return found
