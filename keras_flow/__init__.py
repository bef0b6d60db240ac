"""keras_flow: one Keras 3 program, trained data-, tensor-, hybrid- and pipeline-parallel on three engines.

Names are loaded on first use (PEP 562), so that `import keras_flow` and its command line load neither Keras nor an
engine.
"""

import sys as _sys
from importlib import import_module as _import_module

from keras_flow.backends import on_import as _on_import

__version__ = "0.1.0"

#: public name -> the module that defines it
_NAMES = {
    "DataParallel": "keras_flow.parallel.data_parallel",
    "DistributedDataParallel": "keras_flow.comm.distributed_data_parallel",
    "FlowError": "keras_flow.errors",
    "FlowWarning": "keras_flow.errors",
    "LaunchError": "keras_flow.errors",
    "Layout": "keras_flow.layout",
    "LayoutError": "keras_flow.errors",
    "ModelParallel": "keras_flow.parallel.model_parallel",
    "ParameterServer": "keras_flow.parallel.parameter_server",
    "PipelineParallel": "keras_flow.parallel.pipeline_parallel",
    "CentralStorage": "keras_flow.parallel.central_storage",
    "Placement": "keras_flow.placements",
    "GlobalTensor": "keras_flow.tensors.global_tensor",
    "arange": "keras_flow.tensors.creation",
    "explain": "keras_flow.tensors.explanation",
    "explain_file": "keras_flow.explainer.explain_file",
    "full": "keras_flow.tensors.creation",
    "global_tensor": "keras_flow.tensors.from_engine",
    "init": "keras_flow.runtime.init",
    "layout_of": "keras_flow.current.variable_layout",
    "ones": "keras_flow.tensors.creation",
    "on_preemption": "keras_flow.launch.preemption",
    "pack": "keras_flow.tensors.microbatches",
    "placement": "keras_flow.runtime.placement",
    "plot_layout": "keras_flow.explainer.plot",
    "rand": "keras_flow.tensors.creation",
    "randint": "keras_flow.tensors.creation",
    "randn": "keras_flow.tensors.creation",
    "run": "keras_flow.launch.run",
    "shard": "keras_flow.distributions.shard",
    "tensor": "keras_flow.tensors.creation",
    "to_global": "keras_flow.tensors.from_local",
    "trace": "keras_flow.timeline.trace",
    "visualize": "keras_flow.tensors.visualize",
    "unpack": "keras_flow.tensors.microbatches",
    "value_and_grad": "keras_flow.tensors.gradients",
    "zeros": "keras_flow.tensors.creation",
}
_MODULES = {
    "boxing": "keras_flow.boxing",
    "callbacks": "keras_flow.callbacks",
    "checkpoint": "keras_flow.checkpoint",
    "comm": "keras_flow.comm",
    "env": "keras_flow.runtime.env",
    "hvd": "keras_flow.hvd",
    "notebook": "keras_flow.notebook",
    "ops": "keras_flow.tensors.ops",
    "sbp": "keras_flow.sbp",
    "scope": "keras_flow.parallel.scope",
    "schedules": "keras_flow.schedules",
}

__all__ = ["__version__", *_NAMES, *_MODULES]


_on_import.arrange()


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = _import_module(_MODULES[name])
    elif name in _NAMES:
        value = getattr(_import_module(_NAMES[name]), name)
    else:
        is_operator = hasattr(getattr(_sys.modules.get("keras"), "ops", None), name)
        hint = f"; operators on global tensors are in kf.ops: kf.ops.{name}" if is_operator else ""
        raise AttributeError(f"module 'keras_flow' has no attribute {name!r}{hint}")
    globals()[name] = value
    _on_import.arrange()
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
