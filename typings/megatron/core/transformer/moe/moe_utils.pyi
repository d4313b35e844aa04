from torch import Tensor

class MoEAuxLossAutoScaler:
    @staticmethod
    def apply(output: Tensor, aux_loss: Tensor) -> Tensor: ...

def compute_routing_scores_for_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]: ...
