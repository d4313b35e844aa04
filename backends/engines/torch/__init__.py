"""The embedded engine: decodes Hugging Face Llama, Qwen2, Qwen3 and Qwen3-MoE checkpoints in this process, on a CPU or
one GPU."""
