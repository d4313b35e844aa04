from typing import Any

from torch.optim import Optimizer

class HybridDeviceOptimizer(Optimizer):
    _get_sub_optimizer_param_groups: Any
