"""First floor: where things run. Knows nothing of DeepSeek or of training; imports `kernels` only."""
