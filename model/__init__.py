"""What is trained: the DeepSeek model, its configuration, and the way to and from Hugging Face's files."""
