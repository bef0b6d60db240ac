"""The operators that random programs call, each with random arguments that it may be given."""

from tests.fuzz.operators import elements as elements
from tests.fuzz.operators import places as places
from tests.fuzz.operators import products as products
from tests.fuzz.operators import reductions as reductions
from tests.fuzz.operators import shapes as shapes
from tests.fuzz.operators.registry import OTHERS as OTHERS
from tests.fuzz.operators.registry import SMOOTH as SMOOTH
