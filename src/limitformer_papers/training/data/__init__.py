"""Training data: texts, images, and their order."""
