"""The embedded engine: decodes Hugging Face Llama, Qwen2, Qwen3 and Qwen3-MoE checkpoints in this process, on a CPU or
one GPU."""

from penstock.backends.engines.torch.backend import TorchEngineBackend
from penstock.backends.engines.torch.opening import CAPABILITIES, open_torch_engine

__all__ = ["CAPABILITIES", "TorchEngineBackend", "open_torch_engine"]
