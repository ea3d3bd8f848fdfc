"""The experiments: masked language models, GLUE, vision."""
