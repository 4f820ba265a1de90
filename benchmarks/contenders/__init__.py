"""One training step of the same model, by this project and by its peers, each in processes of its own."""
