from torch import Tensor
from torch.distributed import ProcessGroup

def model_parallel_cuda_manual_seed(seed: int) -> None: ...
def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, *, group: ProcessGroup | None = None
) -> Tensor: ...
