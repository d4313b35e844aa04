"""The learner that trains with torch: any Hugging Face causal model, one process, CPU or one CUDA device."""
