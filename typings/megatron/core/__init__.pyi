from megatron.core import parallel_state as parallel_state
from megatron.core import tensor_parallel as tensor_parallel
