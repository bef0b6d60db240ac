from keras_flow import boxing as boxing
from keras_flow import sbp as sbp
from keras_flow.distributions.data_parallel import DataParallel as DataParallel
from keras_flow.distributions.model_parallel import ModelParallel as ModelParallel
from keras_flow.distributions.placed import layout_of as layout_of
from keras_flow.distributions.shard import shard as shard
from keras_flow.errors import FlowError as FlowError
from keras_flow.errors import FlowWarning as FlowWarning
from keras_flow.errors import LaunchError as LaunchError
from keras_flow.errors import LayoutError as LayoutError
from keras_flow.layout import Layout as Layout
from keras_flow.placements import Placement as Placement
from keras_flow.placements import placement as placement
from keras_flow.runtime import env as env
from keras_flow.runtime.init import init as init
from keras_flow.runtime.run import run as run

__version__: str
